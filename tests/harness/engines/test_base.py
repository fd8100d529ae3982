"""Starting two engines together, on fakes whose behaviour during start-up is controlled."""

import threading
import time
from collections.abc import Callable

import pytest

from assay.harness.engines.base import Engine, start_together
from assay.harness.errors import EngineError


class FakeEngine(Engine):
    """Starts by calling ``begin``. `stop` sets ``stopped``; a start that it interrupted sets ``noticed``."""

    def __init__(self, begin: Callable[["FakeEngine"], None]) -> None:
        self.begin, self.started, self.noticed, self.stopped = begin, False, False, threading.Event()

    def start(self) -> None:
        self.begin(self)
        self.started = True

    def stop(self) -> None:
        self.stopped.set()


def until_stopped(engine: FakeEngine) -> None:
    engine.noticed = engine.stopped.wait(10)
    raise EngineError("stopped while it started")


def fail(engine: FakeEngine) -> None:
    raise EngineError("no such flag")


def test_both_start_in_parallel() -> None:
    meeting = threading.Barrier(2, timeout=10)
    engines = [FakeEngine(lambda _: meeting.wait() and None) for _ in range(2)]
    start_together(engines)
    assert all(engine.started and not engine.stopped.is_set() for engine in engines)


@pytest.mark.parametrize("order", [1, -1])
def test_if_one_fails_both_are_stopped_and_the_first_error_is_raised(order: int) -> None:
    engines = [FakeEngine(fail), FakeEngine(until_stopped)][::order]
    with pytest.raises(EngineError, match="no such flag"):
        start_together(engines)
    assert all(engine.stopped.is_set() for engine in engines)
    assert engines[::order][1].noticed


def test_a_ready_engine_is_stopped_when_the_other_fails_late() -> None:
    ready = FakeEngine(lambda _: None)

    def fail_late(engine: FakeEngine) -> None:
        while not ready.started:
            time.sleep(0.01)
        fail(engine)

    with pytest.raises(EngineError, match="no such flag"):
        start_together([ready, FakeEngine(fail_late)])
    assert ready.stopped.is_set()


def test_an_engine_that_launches_after_it_was_stopped_is_stopped_again() -> None:
    def launch_late(engine: FakeEngine) -> None:
        assert engine.stopped.wait(10)
        engine.stopped.clear()
        until_stopped(engine)

    late = FakeEngine(launch_late)
    with pytest.raises(EngineError, match="no such flag"):
        start_together([FakeEngine(fail), late])
    assert late.noticed
