"""Counts of attention calls, kept by the serving process and read by the harness, even of a server that was killed.

The file is a memory-mapped table of int64: a row per (backend, kernel, phase, with or without a cached prefix), a column
per layer. It is always up to date, costs one addition a call, and needs no flushing, no signal and no exit handler. The
meaning of the rows stands in a small JSON file beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from assay.harness.files import write_whole
from assay.harness.schema import Record

MOST_ROWS, MOST_LAYERS = 64, 512


class CounterRow(Record):
    """What one row counts.

    Attributes:
        backend: name of the attention backend that the engine called.
        kernel: what computed the output, with its version, such as "sageattention 1.0.6 (Triton interpreter)".
        phase: "extend" or "decode".
        cached_prefix: whether any sequence of the call had a cached prefix; always True in decode.
        delegated_by: the backend that handed the call on, empty if the engine called this one itself.
        captured: whether the calls were inside a CUDA graph and counted at each replay of it, on the device. What a graph's calls
            had cached is not known there: `cached_prefix` is True in decode and False in extend.
        compiled: whether the calls were made by code of ``torch.compile``; the same holds for `cached_prefix`.
    """

    backend: str
    kernel: str
    phase: str
    cached_prefix: bool
    delegated_by: str = ""
    captured: bool = False
    compiled: bool = False


class CallCount(CounterRow):
    """A row with its counts: calls by layer, layers without calls left out."""

    calls_by_layer: dict[int, int]

    @property
    def calls(self) -> int:
        """Calls over all layers."""
        return sum(self.calls_by_layer.values())


class CounterFile:
    """The writing side: lives in a server's process."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[CounterRow, int] = {}
        self._legend = folder / f"{name}.rows.json"
        self._table = np.memmap(folder / f"{name}.calls.i64", np.int64, "w+", shape=(MOST_ROWS, MOST_LAYERS))

    def row(self, row: CounterRow) -> int:
        """Index of the row that counts `row`, made on first use. Raises ValueError past `MOST_ROWS`."""
        if row not in self._rows:
            if len(self._rows) == MOST_ROWS:
                raise ValueError(f"more than {MOST_ROWS} kinds of attention call: {row}")
            self._rows[row] = len(self._rows)
            write_whole(self._legend, json.dumps([r.model_dump() for r in self._rows]), durable=False)
        return self._rows[row]

    def add(self, row: int, layer: int, calls: int = 1) -> None:
        """Count calls. Raises IndexError for a layer past `MOST_LAYERS`."""
        self._table[row, layer] += calls


def read_counters(folder: Path) -> list[CallCount]:
    """The counts of all processes that wrote into `folder`, added up by row; an empty list where none did."""
    totals: dict[CounterRow, np.ndarray] = {}
    for legend in sorted(folder.glob("*.rows.json")):
        counts = legend.with_name(legend.name.replace(".rows.json", ".calls.i64"))
        table = np.fromfile(counts, np.int64).reshape(MOST_ROWS, MOST_LAYERS)
        for index, fields in enumerate(json.loads(legend.read_text())):
            row = CounterRow(**fields)
            totals[row] = totals.get(row, np.zeros(MOST_LAYERS, np.int64)) + table[index]
    return [_count(row, calls) for row, calls in totals.items()]


def _count(row: CounterRow, calls: np.ndarray) -> CallCount:
    by_layer = {int(layer): int(calls[layer]) for layer in np.flatnonzero(calls)}
    return CallCount(**row.model_dump(), calls_by_layer=by_layer)


def total_calls(counts: Iterable[CallCount]) -> int:
    """Calls over all rows and layers."""
    return sum(count.calls for count in counts)
