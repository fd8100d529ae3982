"""Counts calls where Python does not run at each call: inside CUDA graphs, and in code compiled by ``torch.compile``.

When a pass is captured, its first attention call records two small operations: an addition to a counter on the device, and a copy
of that counter to pinned memory. A thread reads the memory without waiting and without calling CUDA. A replay therefore costs two
graph nodes, whatever the number of layers.

In a compiled model the count is an opaque operator, `count_call`. The compiler keeps it without tracing into it, so it counts
whenever the compiled code runs or is captured, and causes no graph break.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.harness.evidence.counters import CounterFile

_MAX_GRAPHS = 1024
# Seconds between two reads of the device counters, and the most by which the counter file lags.
_READ_INTERVAL_S = 0.1


@dataclass(eq=False)
class _Graph:
    """A captured pass: the counter row per layer, and the number of replays counted so far."""

    rows: dict[int, int] = field(default_factory=dict)
    seen: int = 0


class GraphCounts:
    """Counts the calls of a process's CUDA graphs in its counter file."""

    def __init__(self, counters: CounterFile) -> None:
        self._counters = counters
        self._graphs: list[_Graph] = []
        self._device: Tensor | None = None
        self._host: Tensor | None = None
        self._reader: threading.Thread | None = None
        self._reading = threading.Lock()

    def prepare(self, device: torch.device) -> None:
        """Allocate the counters. Must be called outside of a capture."""
        if self._device is None:
            self._device = torch.zeros(_MAX_GRAPHS, dtype=torch.int64, device=device)
            self._host = torch.zeros(_MAX_GRAPHS, dtype=torch.int64, pin_memory=True)

    def capture(self, row: int, layer: int) -> None:
        """Record a call of the pass that is being captured. At the first call of a pass, capture the counting as well.

        A layer that occurs again starts a new pass.

        Raises:
            RuntimeError: `prepare` was not called, or there are more than `_MAX_GRAPHS` graphs.
        """
        if self._device is None or self._host is None:
            raise RuntimeError("a CUDA graph is captured but no counters were prepared; its calls cannot be counted")
        if not self._graphs or layer in self._graphs[-1].rows:
            if len(self._graphs) == _MAX_GRAPHS:
                raise RuntimeError(f"more than {_MAX_GRAPHS} CUDA graphs; their calls cannot be counted")
            at = slice(len(self._graphs), len(self._graphs) + 1)
            self._graphs.append(_Graph())
            self._device[at].add_(1)
            self._host[at].copy_(self._device[at], non_blocking=True)
        self._graphs[-1].rows[layer] = row
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_forever, name="assay-graph-counts", daemon=True)
            self._reader.start()

    def read(self) -> None:
        """Add the replays since the last read to the counter file."""
        if self._host is None:
            return
        replays = self._host.numpy()
        with self._reading:
            for number, graph in enumerate(self._graphs):
                new = int(replays[number]) - graph.seen
                graph.seen += new
                for layer, row in tuple(graph.rows.items()) if new else ():
                    self._counters.add(row, layer, new)

    def _read_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(_READ_INTERVAL_S):
            self.read()


def capturing() -> bool:
    """Return True if the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


_COUNTED: list[Callable[[int], None]] = []


def compilable(count: Callable[[int], None]) -> int:
    """Register a function of a layer number, and return the index by which compiled code calls it; see `count_call`."""
    _COUNTED.append(count)
    return len(_COUNTED) - 1


@torch.library.custom_op("assay::count_call", mutates_args=("tally",))
def count_call(tally: Tensor, index: int, layer: int) -> None:
    """Call the function registered by `compilable` under `index`.

    Args:
        tally: a tensor on the device, declared as mutated so that the compiler neither drops nor merges calls.
    """
    _COUNTED[index](layer)
