"""Counting in CUDA graphs, on a real GPU, and in compiled code: the meter on a stand-in backend that is captured and compiled."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.engines.inside.graph_counts import _READ_INTERVAL_S, GraphCounts
from assay.harness.engines.sglang.meter import meter
from assay.harness.evidence.counters import CounterFile, CounterRow, read_counters

LAYERS = 3
MODEL = [SimpleNamespace(layer_id=number) for number in range(LAYERS)]


class Backend:
    """Stand-in for an SGLang attention backend: one operation per call."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        return q + 1

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        return q * 2


def decode(backend: Any, q: torch.Tensor, batch: Any) -> torch.Tensor:
    for layer in MODEL:
        q = backend.forward_decode(q, None, None, layer, batch)
    return q


@pytest.mark.cuda
def test_each_replay_is_counted_and_nothing_else(tmp_path: Path) -> None:
    backend = meter(Backend(), "mine", tmp_path, "cuda")
    counts = replayed(decode, backend, tmp_path)
    assert counts == {(True, False): 12, (False, False): 2}


@pytest.mark.cuda
def test_each_replay_of_compiled_code_is_counted(tmp_path: Path) -> None:
    backend = meter(Backend(), "mine", tmp_path, "cuda")
    # As SGLang compiles a model.
    compiled = torch.compile(decode, fullgraph=True, mode="max-autotune-no-cudagraphs", dynamic=False)
    assert replayed(compiled, backend, tmp_path) == {(True, True): 12, (False, True): 2}


def replayed(run: Any, backend: Any, folder: Path) -> dict[tuple[bool, bool], int]:
    """Counts by captured and compiled, equal in all layers, after two passes were run, captured, and replayed 5 and 7 times."""
    q, graphs = torch.ones(8, device="cuda"), []
    for _ in range(2):
        batch = SimpleNamespace(rids=[])
        run(backend, q, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(backend, q, batch)
        graphs.append(graph)
    for graph, times in zip(graphs, (5, 7), strict=True):
        for _ in range(times):
            graph.replay()
    torch.cuda.synchronize()
    time.sleep(5 * _READ_INTERVAL_S)
    return by_kind(folder)


def by_kind(folder: Path) -> dict[tuple[bool, bool], int]:
    counts = {(c.captured, c.compiled): c.calls_by_layer for c in read_counters(folder / "counters")}
    assert all(calls == dict.fromkeys(range(LAYERS), calls[0]) for calls in counts.values()), counts
    return {kind: calls[0] for kind, calls in counts.items()}


def test_compiled_calls_are_counted_each_time_and_break_no_graph(tmp_path: Path) -> None:
    backend, batch = meter(Backend(), "mine", tmp_path, "cpu"), SimpleNamespace(rids=[])
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager", dynamic=False)
    for _ in range(3):
        assert torch.equal(compiled(backend, torch.ones(8), batch), torch.full((8,), 2.0**LAYERS))
    decode(backend, torch.ones(8), batch)
    assert by_kind(tmp_path) == {(False, True): 3, (False, False): 1}


def test_compiled_calls_of_two_backends_are_counted_separately(tmp_path: Path) -> None:
    batch = SimpleNamespace(rids=[])
    backends = [meter(Backend(), name, tmp_path, "cpu") for name in ("mine", "yours")]
    for times, backend in enumerate(backends, start=1):
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager", dynamic=False)
        for _ in range(times):
            compiled(backend, torch.ones(8), batch)
    counts = {c.backend: c.calls for c in read_counters(tmp_path / "counters")}
    assert counts == {"mine": LAYERS, "yours": 2 * LAYERS}


def test_replays_are_counted_once_and_a_layer_that_occurs_again_belongs_to_a_new_graph(tmp_path: Path) -> None:
    counters = CounterFile(tmp_path, "1")
    rows = [counters.row(CounterRow(backend=name, kernel="k", phase="decode", cached_prefix=True, captured=True)) for name in "ab"]
    counts = GraphCounts(counters)
    with pytest.raises(RuntimeError, match="cannot be counted"):
        counts.capture(rows[0], 0)
    # Stand-ins for the two tensors on a GPU; the test does by hand what a replay does to them.
    counts._device, counts._host = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for row in rows:
        for layer in range(LAYERS):
            counts.capture(row, layer)
    for replays in ([0, 0], [3, 3], [3, 5], [8, 5]):  # a capture executes nothing
        counts._host[:2] = torch.tensor(replays)
        counts.read()
    assert {c.backend: c.calls_by_layer for c in read_counters(tmp_path)} == {
        "a": dict.fromkeys(range(LAYERS), 8), "b": dict.fromkeys(range(LAYERS), 5),
    }  # fmt: skip
