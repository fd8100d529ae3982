"""Counts of attention calls, written by a server's process and read by the harness, even after the server was killed.

The file is a memory-mapped int64 table with a row per (backend, kernel, phase, with or without a cached prefix) and a column per
layer. It is always up to date, costs one addition per call, and does not need a flush, a signal or an exit handler. A small JSON
file next to it describes each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from pydantic import NonNegativeInt

from assay.harness.errors import EvidenceError
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.reading import regular_file
from assay.harness.schema import Record

FOLDER = "counters"
"""Folder of the counter files, in a server's folder."""
ADMISSIONS = "admissions.jsonl"
"""File of the prefill batches that the meter recorded, in a server's folder."""
REPLAYS = "replays"
"""Folder of counter files for passes served by CUDA graphs, in a server's folder. Their columns are numbers of requests."""
_TABLE_ROWS, TABLE_LAYERS = 64, 512
_TABLE = "{}.calls.i64"


class CounterRow(Record):
    """The kind of call that a row counts.

    Attributes:
        backend: name of the attention backend that computed the call.
        kernel: the kernel with its version, such as "sageattention 1.0.6 (Triton interpreter)".
        phase: "extend" or "decode".
        cached_prefix: whether any sequence of the call had a cached prefix. Always True in decode.
        delegated_by: the backend that delegated the call, or empty if the engine called `backend` directly.
        captured: whether the calls were in a CUDA graph, counted on the device at each replay. Their prefix is unknown there, so
            `cached_prefix` is True in decode and False in extend.
        compiled: whether ``torch.compile`` code made the calls. `cached_prefix` is set as for `captured`.
        interpreted: whether Triton's interpreter ran the kernel, so that the measured time is not the kernel's.
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


class _Legend(RunRecord):
    """The rows of a counter file, in order, and the run."""

    rows: tuple[CounterRow, ...]


_LEGENDS = RunFile("*.rows.json", _Legend, RUN_AGAIN, durable=False)


class Admission(RunRecord):
    """A prefill batch that a server admitted: a line of ``admissions.jsonl``.

    Attributes:
        process: id of the server process that computed it.
        rids: request ids. A prompt computed in chunks is admitted once per chunk.
        new: new tokens per request.
        prefix: cached prefix per request.
    """

    process: int
    rids: tuple[str, ...]
    new: tuple[NonNegativeInt, ...]
    prefix: tuple[NonNegativeInt, ...]


class CounterFile:
    """The writing side, in a server's process."""

    def __init__(self, folder: Path, name: str, run: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[CounterRow, int] = {}
        self._folder, self._name, self._run = folder, name, run
        self._table = np.memmap(folder / _TABLE.format(name), np.int64, "w+", shape=(_TABLE_ROWS, TABLE_LAYERS))

    def row(self, row: CounterRow) -> int:
        """Return the index of `row` in the table, adding it at first use. Raises ValueError beyond `_TABLE_ROWS`."""
        if row not in self._rows:
            if len(self._rows) == _TABLE_ROWS:
                raise ValueError(f"more than {_TABLE_ROWS} kinds of attention call: {row}")
            self._rows[row] = len(self._rows)
            _LEGENDS.write(self._folder, _Legend(rows=tuple(self._rows)), self._run, self._name)
        return self._rows[row]

    def add(self, row: int, layer: int, calls: int = 1) -> None:
        """Count calls. Raises IndexError for a layer beyond `TABLE_LAYERS`."""
        self._table[row, layer] += calls


def read_counters(folder: Path, run: str = "") -> list[CallCount]:
    """Add up the counts of all processes that wrote to `folder`, by row. For arguments and errors, see `read_by_process`."""
    totals: dict[CounterRow, np.ndarray] = {}
    for _, rows in _tables(folder, run):
        for row, calls in rows.items():
            totals[row] = totals.get(row, np.zeros(TABLE_LAYERS, np.int64)) + calls
    return [_count(row, calls) for row, calls in totals.items()]


def read_by_process(folder: Path, run: str = "") -> dict[int, list[CallCount]]:
    """Read the counts of each process that wrote to `folder`, by process id.

    Args:
        run: the nonce that each file must carry, or empty to accept any.

    Raises:
        EvidenceError: a file is damaged, or belongs to another run.
    """
    return {int(process): [_count(row, calls) for row, calls in rows.items()] for process, rows in _tables(folder, run)}


def _tables(folder: Path, run: str) -> Iterator[tuple[str, dict[CounterRow, np.ndarray]]]:
    """Yield each counter file's name, and the calls of each row by layer, int64 [TABLE_LAYERS]."""
    for name, legend in _LEGENDS.read_each(folder, run).items():
        counts = folder / _TABLE.format(name)
        try:
            regular_file(counts)
            table = np.fromfile(counts, np.int64).reshape(_TABLE_ROWS, TABLE_LAYERS)
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{counts} is damaged: {error}.", "a whole table of counts", RUN_AGAIN) from None
        yield name, dict(zip(legend.rows, table, strict=False))


def _count(row: CounterRow, calls: np.ndarray) -> CallCount:
    by_layer = {int(layer): int(calls[layer]) for layer in np.flatnonzero(calls)}
    return CallCount(**row.model_dump(), calls_by_layer=by_layer)


def total_calls(counts: Iterable[CallCount]) -> int:
    """Sum the calls over all rows and layers."""
    return sum(count.calls for count in counts)
