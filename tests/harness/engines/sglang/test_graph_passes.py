from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.attention.bugs.faults import rounded_oracle as right
from assay.harness.engines.inside.candidates import KernelCandidate
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.engines.inside.meter import replays
from assay.harness.engines.inside.shadow import Shadow
from assay.harness.engines.sglang import attach as attaching
from assay.harness.engines.sglang import graph_passes
from assay.harness.engines.sglang.graph_passes import GraphObserver, Replays, _watch_runner, graphs_of, observe_graphs, served_batch
from assay.harness.evidence.counters import REPLAYS, read_counters
from assay.harness.evidence.envelope import EngineLimits, read_envelope
from assay.harness.evidence.shadow_errors import read_shadow_errors


@pytest.fixture(autouse=True)
def no_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_passes, "_observers", [])
    monkeypatch.setattr(graph_passes, "_counts", [])


def runner_class(
    name: str, can_run: Callable[[Any], bool] = lambda batch: True, execute: Callable[[Any], Any] = lambda batch: "done",
    draft: bool = False, backend: object = None,
) -> type:  # fmt: skip
    """Make a class of graph runners that is watched."""
    fields = {"model_runner": SimpleNamespace(is_draft_worker=draft), "backend": backend}
    made = type(name, (), fields | {"can_run_graph": lambda _, batch: can_run(batch), "execute": lambda _, batch: execute(batch)})
    _watch_runner(made)
    return made


@pytest.mark.parametrize("draft", [False, True])
def test_passes_that_graphs_served_are_counted_by_phase_and_requests(draft: bool, tmp_path: Path) -> None:
    prefill, decode = (runner_class(f"{phase}CudaGraphRunner", draft=draft)() for phase in ("Prefill", "Decode"))
    for _ in range(2):  # of a second model runner
        observe_graphs(count=replays(tmp_path))
    for runner, size in ((prefill, 1), (decode, 3), (decode, 3)):
        runner.execute(SimpleNamespace(batch_size=size))
    counts = {count.phase: count.calls_by_layer for count in read_counters(tmp_path / REPLAYS)}
    assert counts == ({"prefill": {}, "decode": {}} if draft else {"prefill": {1: 1}, "decode": {3: 2}})


def observing(control: Control, replays: Replays | None = None) -> GraphObserver:
    """Observe under a control, from now on."""
    observer = GraphObserver(lambda: control, replays or Replays(SimpleNamespace()))
    observe_graphs(observer)
    return observer


def readable() -> Replays:
    """Replays of a graph of four rows, whose one layer was given ones."""
    replays = Replays(SimpleNamespace())
    replays.keep(0, {"q": torch.ones(4, 2), "k": None})
    replays.observed_by(0, lambda batch, tensors: None)
    return replays


@pytest.mark.parametrize("control", [Control(), Control(profile="p"), Control(shadow=True), Control(trace="t")])
def test_a_graph_that_hides_its_calls_serves_a_batch_only_while_nothing_is_observed(control: Control) -> None:
    observing(control)
    runner: Any = runner_class("Runner", can_run=lambda batch: batch == "small")()
    assert (runner.can_run_graph("small"), runner.can_run_graph("large")) == (not control.observes, False)


@pytest.mark.parametrize(
    ("control", "draft", "refused"),
    [
        (Control(shadow=True), False, False),
        (Control(trace="t"), False, False),
        (Control(shadow=True, fault="mask-top-left"), False, False),  # of the candidate in the shadow
        (Control(fault="mask-top-left"), False, True),
        (Control(shadow=True, substitute=(1,)), False, True),
        (Control(shadow=True), True, True),
    ],
)
def test_a_decode_graph_whose_calls_are_kept_serves_what_is_observed_unless_outputs_are_replaced(
    control: Control, draft: bool, refused: bool
) -> None:
    seen: list[Any] = []
    replays = readable()
    replays.observed_by(0, lambda batch, tensors: seen.append((batch.rids, tensors)))
    observing(control, replays)
    runner: Any = runner_class("DecodeCudaGraphRunner", draft=draft)()
    assert runner.can_run_graph("any") is not refused
    assert runner.execute(SimpleNamespace(rids=["a"], input_ids=torch.zeros(3))) == "done"
    assert [(rids, {name: list(kept.shape) for name, kept in tensors.items()}) for rids, tensors in seen] == (
        [] if refused else [(["a"], {"q": [3, 2]})]
    )


@pytest.mark.parametrize(
    ("kept", "compiled", "read"),
    [
        ({"q": torch.ones(2, 2)}, False, True),
        ({"q": torch.ones(2, 2)}, True, False),
        ({"q": torch.ones(5, 2)}, False, False),  # a larger graph after a smaller one
        ({"out": (torch.ones(4, 2), None)}, False, False),
    ],
)
def test_graphs_are_read_where_every_call_is_kept(kept: dict[str, Any], compiled: bool, read: bool) -> None:
    replays = Replays(SimpleNamespace(enable_torch_compile=compiled))
    replays.keep(0, {"q": torch.ones(4, 2), "k": None})
    replays.observed_by(0, lambda batch, tensors: None)
    replays.keep(0, kept)
    assert replays.readable is read


def test_what_was_read_is_not_filled_by_the_next_replay() -> None:
    replays, seen = readable(), []
    replays.observed_by(0, lambda batch, tensors: seen.append(tensors["q"]))
    replays.observe(SimpleNamespace(input_ids=torch.zeros(2)))
    replays.keep(0, {"q": torch.full((2, 2), 7.0)})
    assert seen[0].tolist() == [[1, 1], [1, 1]]


def test_a_decode_graph_is_compared_as_an_eager_pass_is(
    stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadow's sums, the trace and the envelope of the same passes: eager, and captured with padding and read."""
    lens = [(1, 40), (1, 7)]
    sums = {}
    for name in ("eager", "graph"):
        folder = tmp_path / name
        folder.mkdir()
        server = stand_in.Server()
        limits = EngineLimits(context_tokens=4096, graphs={"decode": "full"})
        shadow = Shadow(folder, KernelCandidate("other", right), None, limits=limits)
        stand_in.attach(server, folder, shadow=shadow)
        set_control(folder, Control(shadow=True))
        server.step("extend", [(40, 0), (7, 0)])
        if name == "graph":
            monkeypatch.setattr(attaching, "capturing", lambda: True)
        server.step("decode", lens)
        monkeypatch.undo()
        if name == "graph":
            assert not read_envelope(folder)
            server.replays.observe(server.batch)
        shadow.write()
        errors, counts = read_shadow_errors(folder), read_envelope(folder)
        assert errors is not None
        assert counts is not None
        sums[name] = (errors.cells.apart, counts.count("decode", "graph", "in a CUDA graph"))
        assert counts.count("decode", "total-tokens", "17-128") == 1
    assert sums["eager"][0].tolist() == sums["graph"][0].tolist()
    assert (sums["eager"][1], sums["graph"][1]) == (0, 1)


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
def test_a_graph_that_calls_attention_from_python_serves_what_is_observed(name: str, backend: object, served: bool) -> None:
    observing(Control(shadow=True))
    made: Any = runner_class(name, backend=backend)()
    assert made.can_run_graph("any") is served


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
    observe_graphs()
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


@pytest.mark.cuda
def test_every_size_of_real_graphs_fills_the_buffers_when_it_is_replayed() -> None:
    q, replays, graphs = torch.ones(8, 2, device="cuda"), Replays(SimpleNamespace()), {}
    for rows in (8, 4):
        torch.cuda.synchronize()
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows], pool=graphs[8].pool() if rows == 4 else None):
            replays.keep(0, {"q": q[:rows]})
            q[:rows].mul_(2)  # as a backend that scales its inputs
            replays.keep(0, {"out": q[:rows] + 1})
    seen: list[Any] = []
    replays.observed_by(0, lambda batch, tensors: seen.append({name: kept.tolist() for name, kept in tensors.items()}))
    for rows, value in ((4, 3.0), (8, 5.0), (4, 7.0)):
        q.fill_(value)
        graphs[rows].replay()
        replays.observe(SimpleNamespace(input_ids=torch.zeros(3)))
        assert seen[-1] == {"q": [[value] * 2] * 3, "out": [[2 * value + 1] * 2] * 3}
