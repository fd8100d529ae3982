"""Counting calls where no Python runs at each of them: inside CUDA graphs, and in code that ``torch.compile`` made.

When a pass is captured, its first attention call records two small operations: an addition to a counter on the device, and a copy
of it to pinned memory. A thread reads that memory, which waits for nothing and calls nothing of CUDA's. So a replay costs two nodes
of a graph, whatever the number of layers.

In a model that is compiled a call is an operator of its own, `count_call`, which the compiler keeps and does not look into: it
counts whenever the compiled code runs, or is captured, and breaks no graph in two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.harness.evidence.counters import CounterFile

MOST_GRAPHS = 1024
EVERY_S = 0.1
"""Time between two looks at the counters: they are behind by no more than this."""


@dataclass(eq=False)
class _Graph:
    """A captured pass: the row that counts each layer's call, and how many of its replays were counted."""

    rows: dict[int, int] = field(default_factory=dict)
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
        """Allocate the counters, outside of any capture."""
        if self._device is None:
            self._device = torch.zeros(MOST_GRAPHS, dtype=torch.int64, device=device)
            self._host = torch.zeros(MOST_GRAPHS, dtype=torch.int64, pin_memory=True)

    def capture(self, row: int, layer: int) -> None:
        """Note a call of the pass that is being captured, and at its first one record the counting.

        A layer that comes again begins another pass.

        Raises:
            RuntimeError: nothing was prepared, or there are more than `MOST_GRAPHS` graphs.
        """
        if self._device is None or self._host is None:
            raise RuntimeError("a CUDA graph is captured on a device that is not known; its calls cannot be counted")
        if not self._graphs or layer in self._graphs[-1].rows:
            if len(self._graphs) == MOST_GRAPHS:
                raise RuntimeError(f"more than {MOST_GRAPHS} CUDA graphs; their calls cannot be counted")
            at = slice(len(self._graphs), len(self._graphs) + 1)
            self._graphs.append(_Graph())
            self._device[at].add_(1)
            self._host[at].copy_(self._device[at], non_blocking=True)
        self._graphs[-1].rows[layer] = row
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
                for layer, row in tuple(graph.rows.items()) if new else ():
                    self._counters.add(row, layer, new)

    def _read_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            self.read()


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_COUNTED: list[Callable[[int], None]] = []


def compilable(count: Callable[[int], None]) -> int:
    """Let compiled code call a function of a layer's number, by the index that is returned; see `count_call`."""
    _COUNTED.append(count)
    return len(_COUNTED) - 1


@torch.library.custom_op("assay::count_call", mutates_args=("tally",))
def count_call(tally: Tensor, index: int, layer: int) -> None:
    """Call what `compilable` gave `index` to, with `layer`.

    Args:
        tally: a tensor on the device; said to be written to, so that the compiler neither drops nor merges calls.
        index: of the function.
        layer: the layer's number.
    """
    _COUNTED[index](layer)
