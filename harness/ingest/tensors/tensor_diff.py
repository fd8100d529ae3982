"""Two files or folders of tensors -> the first and the worst difference: layer, boundary, head and token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.files import timestamp
from assay.harness.ingest.comparison import LISTED, CellAt, ComparedTensors, Comparison, TensorRow
from assay.harness.ingest.tensors.cell_errors import Cells, TensorCell, compare_cells, default_bound
from assay.harness.ingest.tensors.dump import Dump, StoredTensor, open_dump
from assay.harness.ingest.tensors.layout import ModelHeads, layout_of
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError
from assay.harness.reading import reading
from assay.harness.text import counted

_THREADS = 2
"""Tensors that are compared at once: one thread reads while the other adds up."""
_Pair = tuple[StoredTensor, StoredTensor]


@dataclass(frozen=True)
class TensorRule:
    """How tensors are compared.

    Attributes:
        tolerance: error up to which a cell is equal; None for what rounding to the dtype explains; 0 asks for equal bits.
        model: splits tensors of [tokens, heads * head_dim] into heads.
        axes: layout of the tensors with as many dimensions, such as "bhtd".
    """

    tolerance: float | None = None
    model: ModelHeads | None = None
    axes: str = ""

    @property
    def exact(self) -> bool:
        """True if every bit must be equal."""
        return self.tolerance == 0


@dataclass(frozen=True)
class _Compared:
    """A pair of tensors, compared by cells; they have so many bytes."""

    a: StoredTensor
    b: StoredTensor
    cells: Cells
    bound: float | None
    bytes: int

    def at(self, cell: TensorCell) -> CellAt:
        """Place a cell in the dump."""
        place = self.a.place
        return CellAt(
            tensor=self.a.key, layer=place.layer, boundary=place.boundary, step=place.step, batch=cell.batch,
            token=cell.token, head=cell.head, error=_error(cell.error), bound=self.bound,
        )  # fmt: skip

    @property
    def badness(self) -> tuple[bool, float]:
        """Ranks it by its worst cell: first what is not finite, then by multiples of the bound."""
        error = self.cells.worst.error if self.cells.worst else 0.0
        return math.isnan(error), error / self.bound if self.bound else error


def diff_tensors(a: Path, b: Path, rule: TensorRule) -> Comparison:
    """Compare all tensors that both have. Each is read once; memory holds one pair of tensors per thread at most.

    Raises:
        UsageError: there is no tensor file.
        EvidenceError: one of the two cannot be read at all.
    """
    started = time.monotonic()
    left, right = open_dump(a), open_dump(b)
    pairs, problems = _paired(left, right)
    with ThreadPoolExecutor(_THREADS) as pool:
        made = list(pool.map(lambda pair: _compared(pair, rule), pairs))
    problems += [item for item in made if isinstance(item, str)]
    problems += [f"not read: {why}" for why in (*left.file.notes, *right.file.notes)]
    every = [pair for pair in made if isinstance(pair, _Compared)]
    full = [pair for pair in every if pair.bytes]
    changed = [(pair, pair.cells.worst) for pair in full if pair.cells.worst is not None]
    bad = [(pair, pair.cells.first) for pair in full if pair.cells.first is not None]
    worst = max(changed, key=lambda change: change[0].badness, default=None)
    headline = f"{_headline(full, bad, problems, rule.exact)}."
    return Comparison(
        verdict="regression" if bad else "inconclusive" if problems or not full else "pass",
        created=timestamp(), kind="tensors", headline=headline, reasons=(headline,), a=left.file, b=right.file,
        tensors=ComparedTensors(
            exact=rule.exact, pairs=len(full), identical=len(full) - len(changed), within=len(changed) - len(bad),
            differing=len(bad), empty=len(every) - len(full), bytes=sum(pair.bytes for pair in full),
            seconds=time.monotonic() - started, first=bad[0][0].at(bad[0][1]) if bad else None,
            worst=worst[0].at(worst[1]) if worst else None, tensors=tuple(_row(*pair) for pair in changed[:LISTED]),
            not_compared=tuple(problems[:LISTED]), not_compared_count=len(problems), grids=tuple(_grids(full)),
        ),
    )  # fmt: skip


def _paired(a: Dump, b: Dump) -> tuple[list[_Pair], list[str]]:
    mine, theirs = ({tensor.key: tensor for tensor in dump.tensors} for dump in (a, b))
    pairs = [(tensor, theirs[key]) for key, tensor in mine.items() if key in theirs]
    if not pairs and len(mine) == len(theirs) == 1:  # two tensors were named, whatever they call themselves
        return [(a.tensors[0], b.tensors[0])], []
    return pairs, [
        *(f"only in A: {key}" for key in mine if key not in theirs),
        *(f"only in B: {key}" for key in theirs if key not in mine),
    ]


def _compared(pair: _Pair, rule: TensorRule) -> _Compared | str:
    """Compare a pair by cells; return a sentence if it cannot be compared."""
    a, b = pair
    try:
        with reading(f"{a.path} or {b.path}", "tensor file"):
            tensor_a, tensor_b = a.map(), b.map()
            if tensor_a.shape != tensor_b.shape:
                return f"shapes differ, {list(tensor_a.shape)} and {list(tensor_b.shape)}: {a.key}"
            if rule.exact and tensor_a.dtype != tensor_b.dtype:
                return f"dtypes differ, {tensor_a.dtype} and {tensor_b.dtype}, so that bits cannot be equal: {a.key}"
            rounding = max(default_bound(tensor_a.dtype), default_bound(tensor_b.dtype))
            bound = None if rule.exact else rounding if rule.tolerance is None else rule.tolerance
            layout = layout_of(a.place.name, tensor_a.shape, rule.model, rule.axes)
            cells = compare_cells(tensor_a, tensor_b, layout, bound)
            return _Compared(a, b, cells, bound, tensor_a.nbytes + tensor_b.nbytes)
    except EvidenceError as error:
        return f"not read: {error.found}"


def _row(compared: _Compared, worst: TensorCell) -> TensorRow:
    cells = compared.cells
    first = compared.at(cells.first) if cells.first else None
    return TensorRow(
        cells=cells.total, out_of_bounds=cells.differing, not_finite=cells.nonfinite, max_abs=_error(cells.max_abs),
        first=first, worst=compared.at(worst),
    )  # fmt: skip


def _error(value: float) -> OwnError:
    return float(value) if math.isfinite(value) else NOT_FINITE


def _headline(
    compared: Sequence[_Compared], bad: Sequence[tuple[_Compared, TensorCell]], problems: Sequence[str], exact: bool
) -> str:
    if not compared:
        return "Nothing could be compared"
    if bad:
        first, cell = bad[0]
        place = f"{first.a.place}{cell_text(cell.head, cell.token, cell.batch)}"
        return f"{len(bad)} of {len(compared)} tensors differ; the first is {place}"
    same = "equal bit for bit" if exact else "equal within bounds"
    alone = compared[0]
    names = f" ({alone.a.key} in A, {alone.b.key} in B)" if alone.a.key != alone.b.key else ""
    said = f"{counted(len(compared), 'tensor')} {'is' if len(compared) == 1 else 'are'} {same}{names}"
    return f"{said}, but {len(problems)} could not be compared" if problems else said


def cell_text(head: int | None, token: int | None, batch: int | None) -> str:
    """Describe a cell, such as ", head 3, token 17"; empty parts are left out."""
    named = (("sequence", batch), ("head", head), ("token", token))
    return "".join(f", {what} {number}" for what, number in named if number is not None)


def _grids(compared: Sequence[_Compared]) -> Iterator[ErrorGrid]:
    """Yield the worst error by layer and head over all tensors of a boundary, for boundaries that have layers."""
    layered: dict[str, dict[int, list[_Compared]]] = {}
    for pair in compared:
        if pair.a.place.layer is not None:
            layered.setdefault(pair.a.place.boundary, {}).setdefault(pair.a.place.layer, []).append(pair)
    for boundary, layers in layered.items():
        heads = max(tensor.cells.by_head.size for tensors in layers.values() for tensor in tensors)
        rows = sorted(layers.items())
        yield ErrorGrid(
            id=boundary.replace(" ", "-"), title="layer × head", where=boundary, columns="head",
            row_labels=tuple(str(layer) for layer, _ in rows), column_labels=tuple(map(str, range(heads))),
            values=tuple(tuple(_worst(head, tensors) for head in range(heads)) for _, tensors in rows),
            bounds=tuple(tensors[-1].bound or None for _, tensors in rows),
        )  # fmt: skip


def _worst(head: int, tensors: Sequence[_Compared]) -> OwnError:
    errors = [float(tensor.cells.by_head[head]) for tensor in tensors if head < tensor.cells.by_head.size]
    if not all(map(math.isfinite, errors)):
        return NOT_FINITE
    return float(f"{max(errors):.4g}") if errors else None
