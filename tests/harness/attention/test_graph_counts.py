"""Counting inside CUDA graphs, on a real GPU: the meter on a stand-in backend, its passes captured and replayed."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.attention.graph_counts import EVERY_S, GraphCounts
from harness.attention.meter import meter
from harness.evidence.counters import CounterFile, CounterRow, read_counters

LAYERS = 3


class Backend:
    """Stand-in for an SGLang attention backend: one operation a call."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        return q + 1

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        return q * 2


def decode(backend: Any, q: torch.Tensor, batch: Any) -> None:
    for number in range(LAYERS):
        backend.forward_decode(q, None, None, SimpleNamespace(layer_id=number), batch)


@pytest.mark.cuda
def test_each_replay_is_counted_and_nothing_else(tmp_path: Path) -> None:
    backend, q = meter(Backend(), "mine", tmp_path), torch.ones(8, device="cuda")
    graphs = []
    for _ in range(2):
        batch = SimpleNamespace(rids=[])
        decode(backend, q, batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode(backend, q, batch)
        graphs.append(graph)
    for graph, times in zip(graphs, (5, 7), strict=True):
        for _ in range(times):
            graph.replay()
    torch.cuda.synchronize()
    time.sleep(5 * EVERY_S)
    counts = {c.captured: c.calls_by_layer for c in read_counters(tmp_path / "counters")}
    assert counts[True] == dict.fromkeys(range(LAYERS), 12)
    assert counts[False] == dict.fromkeys(range(LAYERS), 2), "the passes that were run before each capture"


def test_a_graph_that_cannot_be_counted_is_an_error(tmp_path: Path) -> None:
    counters = CounterFile(tmp_path, "1")
    row = counters.row(CounterRow(backend="b", kernel="k", phase="decode", cached_prefix=True, captured=True))
    with pytest.raises(RuntimeError, match="cannot be counted"):
        GraphCounts(counters).capture(row, 0, object())


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    counters = CounterFile(tmp_path, "1")
    row = counters.row(CounterRow(backend="b", kernel="k", phase="decode", cached_prefix=True, captured=True))
    counts = GraphCounts(counters)
    # The two tensors of a GPU; what a replay does to them is done by hand.
    counts._device, counts._host = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    batch = object()
    for layer in range(LAYERS):
        counts.capture(row, layer, batch)
    counts._host[0] = 0  # a capture runs nothing
    for replays in (3, 3, 8):
        counts._host[0] = replays
        counts.read()
    (count,) = read_counters(tmp_path)
    assert count.calls_by_layer == dict.fromkeys(range(LAYERS), 8)
