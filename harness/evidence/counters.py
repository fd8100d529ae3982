"""Counts of attention calls, written by a server's process and read by the harness, even after the server was killed.

The file is a memory-mapped int64 table: a row per (backend, kernel, phase, with or without a cached prefix), a column per layer.
It is always up to date, costs one addition per call, and needs no flush, signal or exit handler. A small JSON file next to it
says what each row counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from assay.harness.files import write_whole
from assay.harness.schema import Record

FOLDER = "counters"
"""Folder of the counter files, in a server's folder."""
ADMISSIONS = "admissions.jsonl"
"""File of the prefill batches that the meter noted, in a server's folder."""
TABLE_ROWS, TABLE_LAYERS = 64, 512


class CounterRow(Record):
    """What one row counts.

    Attributes:
        backend: name of the attention backend that computed the call.
        kernel: what computed the output, with its version, for example "sageattention 1.0.6 (Triton interpreter)".
        phase: "extend" or "decode".
        cached_prefix: whether any sequence of the call had a cached prefix. Always True in decode.
        delegated_by: the backend that delegated the call; empty if the engine called `backend` directly.
        captured: whether the calls were in a CUDA graph, counted on the device at each replay. Their prefix is unknown there, so
            `cached_prefix` is True in decode and False in extend.
        compiled: whether ``torch.compile`` code made the calls. `cached_prefix` is set as for `captured`.
        interpreted: whether Triton's interpreter ran the kernel, so that its time is not the kernel's.
    """

    backend: str
    kernel: str
    phase: str
    cached_prefix: bool
    delegated_by: str = ""
    captured: bool = False
    compiled: bool = False
    interpreted: bool = False


class CallCount(CounterRow):
    """A row with its calls by layer. Layers without calls are left out."""

    calls_by_layer: dict[int, int]

    @property
    def calls(self) -> int:
        """Calls over all layers."""
        return sum(self.calls_by_layer.values())


class CounterFile:
    """The writing side, in a server's process."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[CounterRow, int] = {}
        self._legend = folder / f"{name}.rows.json"
        self._table = np.memmap(folder / f"{name}.calls.i64", np.int64, "w+", shape=(TABLE_ROWS, TABLE_LAYERS))

    def row(self, row: CounterRow) -> int:
        """Index of the row that counts `row`, created at its first use. Raises ValueError beyond `TABLE_ROWS`."""
        if row not in self._rows:
            if len(self._rows) == TABLE_ROWS:
                raise ValueError(f"more than {TABLE_ROWS} kinds of attention call: {row}")
            self._rows[row] = len(self._rows)
            write_whole(self._legend, json.dumps([r.model_dump() for r in self._rows]), durable=False)
        return self._rows[row]

    def add(self, row: int, layer: int, calls: int = 1) -> None:
        """Count calls. Raises IndexError for a layer beyond `TABLE_LAYERS`."""
        self._table[row, layer] += calls


def read_counters(folder: Path) -> list[CallCount]:
    """The counts of all processes that wrote to `folder`, added up by row. Empty if none did."""
    totals: dict[CounterRow, np.ndarray] = {}
    for legend in sorted(folder.glob("*.rows.json")):
        counts = legend.with_name(legend.name.replace(".rows.json", ".calls.i64"))
        table = np.fromfile(counts, np.int64).reshape(TABLE_ROWS, TABLE_LAYERS)
        for index, fields in enumerate(json.loads(legend.read_text())):
            row = CounterRow(**fields)
            totals[row] = totals.get(row, np.zeros(TABLE_LAYERS, np.int64)) + table[index]
    return [_count(row, calls) for row, calls in totals.items()]


def _count(row: CounterRow, calls: np.ndarray) -> CallCount:
    by_layer = {int(layer): int(calls[layer]) for layer in np.flatnonzero(calls)}
    return CallCount(**row.model_dump(), calls_by_layer=by_layer)


def total_calls(counts: Iterable[CallCount]) -> int:
    """Calls over all rows and layers."""
    return sum(count.calls for count in counts)
