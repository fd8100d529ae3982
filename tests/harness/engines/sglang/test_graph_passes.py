from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from assay.harness.engines.sglang import graph_passes
from assay.harness.engines.sglang.graph_passes import graphs_of, keep_served, observe_graphs, refuse_while, served_batch


def test_a_graph_serves_a_batch_only_while_nothing_is_observed() -> None:
    class Runner:
        def can_run_graph(self, forward_batch: str) -> bool:
            return forward_batch == "small"

    observed = [False]
    refuse_while(Runner, lambda: observed[0])
    runner = Runner()
    assert (runner.can_run_graph("small"), runner.can_run_graph("large")) == (True, False)
    observed[0] = True
    assert not runner.can_run_graph(forward_batch="small")


def test_a_version_whose_runners_ask_in_another_way_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def serves(self, forward_batch: str) -> bool:
            return True

    monkeypatch.setattr(graph_passes, "RUNNERS", ((__name__, "Runner"), ("no.such.module", "Runner")))
    monkeypatch.setattr(sys.modules[__name__], "Runner", Runner, raising=False)
    observe_graphs(lambda: True)
    assert Runner().serves("any")
    assert not hasattr(Runner, "can_run_graph")


class BreakableCudaGraphBackend:
    """Stands for SGLang's: its graphs call attention from Python."""

    def __init__(self, debug_eager: bool = False) -> None:
        self._debug_eager = debug_eager


class FullCudaGraphBackend:
    """Stands for SGLang's: a replay runs no Python."""


@pytest.mark.parametrize(
    ("name", "backend", "served"),
    [
        ("PrefillCudaGraphRunner", BreakableCudaGraphBackend(), True),
        ("PrefillCudaGraphRunner", FullCudaGraphBackend(), False),
        ("DecodeCudaGraphRunner", BreakableCudaGraphBackend(), False),  # its attention is captured
        ("DecodeCudaGraphRunner", BreakableCudaGraphBackend(debug_eager=True), True),
        ("DecodeCudaGraphRunner", FullCudaGraphBackend(), False),
    ],
)
def test_a_graph_that_calls_attention_from_python_serves_what_is_observed(
    name: str, backend: object, served: bool
) -> None:
    runner = type(name, (), {"can_run_graph": lambda self, forward_batch: True})
    refuse_while(runner, lambda: True)
    made = runner()
    made.backend = backend  # type: ignore[attr-defined]
    assert made.can_run_graph("any") is served  # type: ignore[attr-defined]


def test_attention_in_a_graph_is_of_the_batch_that_is_served() -> None:
    class Runner:
        def execute(self, forward_batch: str) -> str:
            return served_batch("static")

    keep_served(Runner)
    keep_served(Runner)
    assert Runner().execute("of requests") == "of requests"
    assert served_batch("eager") == "eager"


def test_a_pass_that_fails_serves_nothing_afterwards() -> None:
    class Runner:
        def execute(self, forward_batch: str) -> str:
            raise RuntimeError(forward_batch)

    keep_served(Runner)
    with pytest.raises(RuntimeError):
        Runner().execute("of requests")
    assert served_batch("eager") == "eager"


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
