"""Counting calls inside CUDA graphs: no Python runs when a graph is replayed, so the counting is recorded into the graph.

When a pass is captured, its first attention call records two small operations: an addition to a counter on the device, and a copy
of it to pinned memory. A thread reads that memory, which waits for nothing and calls nothing of CUDA's. So a replay costs two nodes
of a graph, whatever the number of layers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.evidence.counters import CounterFile

MOST_GRAPHS = 1024
EVERY_S = 0.1
"""Time between two looks at the counters: they are behind by no more than this."""


@dataclass(eq=False)
class _Graph:
    """A captured pass: what was called in it, as (row, layer), and how many of its replays were counted."""

    batch: Any
    calls: list[tuple[int, int]] = field(default_factory=list)
    seen: int = 0


class GraphCounts:
    """Counts calls of one process's CUDA graphs into its counter file."""

    def __init__(self, counters: CounterFile) -> None:
        self._counters = counters
        self._graphs: list[_Graph] = []
        self._device: Tensor | None = None
        self._host: Tensor | None = None
        self._reader: threading.Thread | None = None
        self._reading = threading.Lock()

    def prepare(self, device: torch.device) -> None:
        """Allocate the counters, outside of any capture. A pass is always run before it is captured."""
        if self._device is None:
            self._device = torch.zeros(MOST_GRAPHS, dtype=torch.int64, device=device)
            self._host = torch.zeros(MOST_GRAPHS, dtype=torch.int64, pin_memory=True)

    def capture(self, row: int, layer: int, batch: Any) -> None:
        """Note a call of the pass that is being captured, and at its first one record the counting.

        Raises:
            RuntimeError: nothing was prepared, or there are more than `MOST_GRAPHS` graphs.
        """
        if self._device is None or self._host is None:
            raise RuntimeError("a CUDA graph is captured before any pass was run; its calls cannot be counted")
        if not self._graphs or self._graphs[-1].batch is not batch:
            if len(self._graphs) == MOST_GRAPHS:
                raise RuntimeError(f"more than {MOST_GRAPHS} CUDA graphs; their calls cannot be counted")
            at = slice(len(self._graphs), len(self._graphs) + 1)
            self._graphs.append(_Graph(batch))
            self._device[at].add_(1)
            self._host[at].copy_(self._device[at], non_blocking=True)
        self._graphs[-1].calls.append((row, layer))
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_on, name="assay-graph-counts", daemon=True)
            self._reader.start()

    def read(self) -> None:
        """Add what was replayed since the last look to the counter file."""
        if self._host is None:
            return
        replays = self._host.numpy()
        with self._reading:
            for number, graph in enumerate(self._graphs):
                new = int(replays[number]) - graph.seen
                graph.seen += new
                for row, layer in tuple(graph.calls) if new else ():
                    self._counters.add(row, layer, new)

    def _read_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            self.read()


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
