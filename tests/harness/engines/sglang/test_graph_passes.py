from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.harness.engines.inside.control import Control
from assay.harness.engines.inside.meter import replays
from assay.harness.engines.sglang import graph_passes
from assay.harness.engines.sglang.graph_passes import _watch_runner, graphs_of, served_batch, watch_graphs
from assay.harness.evidence.counters import REPLAYS, read_counters

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def no_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_passes, "_observers", [])
    monkeypatch.setattr(graph_passes, "_counts", [])


def runner_class(
    name: str, can_run: Callable[[Any], bool] = lambda batch: True, execute: Callable[[Any], Any] = lambda batch: "done",
    draft: bool = False,
) -> type:  # fmt: skip
    """Make a class of graph runners that is watched."""
    fields = {"model_runner": SimpleNamespace(is_draft_worker=draft)}
    made = type(name, (), fields | {"can_run_graph": lambda _, batch: can_run(batch), "execute": lambda _, batch: execute(batch)})
    _watch_runner(made)
    return made


@pytest.mark.parametrize("draft", [False, True])
def test_passes_that_graphs_served_are_counted_by_phase_and_requests(draft: bool, tmp_path: Path) -> None:
    prefill, decode = (runner_class(f"{phase}CudaGraphRunner", draft=draft)() for phase in ("Prefill", "Decode"))
    for _ in range(2):  # of a second model runner
        watch_graphs(count=replays(tmp_path))
    for runner, size in ((prefill, 1), (decode, 3), (decode, 3)):
        runner.execute(SimpleNamespace(batch_size=size))
    counts = {count.phase: count.calls_by_layer for count in read_counters(tmp_path / REPLAYS)}
    assert counts == ({"prefill": {}, "decode": {}} if draft else {"prefill": {1: 1}, "decode": {3: 2}})


@pytest.mark.parametrize("control", [Control(), Control(profile="p"), Control(shadow=True), Control(trace="t")])
def test_a_graph_serves_a_batch_only_while_nothing_is_observed(control: Control) -> None:
    watch_graphs(lambda: control.observes)
    runner: Any = runner_class("Runner", can_run=lambda batch: batch == "small")()
    assert (runner.can_run_graph("small"), runner.can_run_graph("large")) == (not control.observes, False)


def test_attention_in_a_graph_is_of_the_batch_that_is_served() -> None:
    runner = runner_class("Runner", execute=lambda batch: served_batch("static") if batch != "fails" else 1 / 0)
    _watch_runner(runner)  # twice is once
    made: Any = runner()
    assert made.execute("of requests") == "of requests"
    with pytest.raises(ZeroDivisionError):
        made.execute("fails")
    assert served_batch("eager") == "eager"


def test_runners_that_serve_in_another_way_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another version of SGLang: `Path` has neither of the methods."""
    monkeypatch.setattr(graph_passes, "RUNNERS", (("pathlib", "Path"), ("no.such.module", "Runner")))
    watch_graphs()
    assert not hasattr(Path, "execute")


@pytest.mark.parametrize(
    ("prefill", "decode", "given", "expected"),
    [
        ("disabled", "full", {}, {"extend": "disabled", "decode": "full"}),
        ("breakable", "full", {}, {"extend": "breakable", "decode": "full"}),
        ("breakable", "full", {"disable_cuda_graph": True}, {"extend": "disabled", "decode": "disabled"}),
    ],
)
def test_how_each_phase_is_captured_is_read_from_the_arguments(
    prefill: str, decode: str, given: dict[str, bool], expected: dict[str, str]
) -> None:
    config = SimpleNamespace(prefill=SimpleNamespace(backend=prefill), decode=SimpleNamespace(backend=decode))
    assert graphs_of(SimpleNamespace(cuda_graph_config=config, **given)) == expected
    assert graphs_of(SimpleNamespace()) == {}
