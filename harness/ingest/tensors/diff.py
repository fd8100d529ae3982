"""Two dumps → the first and the worst difference: layer, boundary, head and token."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.ingest.tensors.cells import Cell, Cells, compare, default_bound
from assay.harness.ingest.tensors.dump import TITLES, Dump, StoredTensor
from assay.harness.ingest.tensors.files import NoTensor
from assay.harness.ingest.tensors.layout import ModelShape, layout_of
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError
from assay.harness.reading import reading
from assay.harness.schema import RULE, Part
from assay.harness.text import counted
from assay.harness.verdict import Decided, Verdict

_THREADS = 2
"""Tensors that are compared at once: one thread reads while the other adds up."""
SCHEMA: Literal["assay.tensor-diff/1"] = "assay.tensor-diff/1"
_LISTED = 200
"""Most differing tensors, and most unpaired names, in a result: they are counted beyond that."""


class CellAt(Part):
    """One cell that differs."""

    tensor: str = Field(description="its key in the dump")
    layer: int | None = Field(description="null: outside of the layers")
    boundary: str = Field(description='such as "attention", "o_proj", "mlp"; "other" if the name does not tell')
    step: int = Field(description="number of the forward pass in the dump")
    batch: int | None
    token: int | None
    head: int | None
    error: OwnError = Field(
        description='the larger of sum |b - a| / sum |a| and max |b - a| / max |a|; "not finite" if a side is NaN or infinite'
    )
    bound: FiniteFloat | None = Field(description="null: every bit must be equal")


class TensorRow(Part):
    """One tensor that differs."""

    tensor: str
    layer: int | None
    boundary: str
    cells: int = Field(description="tokens x heads")
    out_of_bounds: int
    not_finite: int = Field(description="cells in which one side is not finite and the other differs")
    max_abs: OwnError = Field(description="largest absolute difference in the worst cell")
    first: CellAt | None = Field(description="null: all within bounds")
    worst: CellAt


class TensorDiff(Decided):
    __doc__ = f"Two dumps, tensor by tensor. {RULE}"

    schema_id: Literal["assay.tensor-diff/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    headline: str
    a: str = Field(description="the reference's dump, as given")
    b: str
    format: str
    exact: bool
    compared: int = Field(description="pairs of tensors")
    identical: int = Field(description="pairs in which no bit differs")
    within: int = Field(description="pairs that differ within bounds")
    differing: int = Field(description="pairs out of bounds")
    bytes: int = Field(description="compared, both sides")
    seconds: FiniteFloat
    first: CellAt | None = Field(description="the first cell out of bounds in depth order")
    worst: CellAt | None = Field(description="the cell with the largest error")
    tensors: tuple[TensorRow, ...] = Field(
        description=f"pairs that differ in some bit, in depth order: at most {_LISTED}"
    )
    not_compared: tuple[str, ...] = Field(description=f"what could not be compared, and why: at most {_LISTED}")
    not_compared_count: int
    empty: int = Field(0, description="pairs without an element, which show nothing")
    grids: tuple[ErrorGrid, ...] = Field((), description="the worst error by layer and head, one heat map per boundary")


@dataclass(frozen=True)
class _Pair:
    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True)
class _Compared:
    pair: _Pair
    cells: Cells
    bound: float | None
    bytes: int


def diff(
    a: Dump, b: Dump, *, exact: bool = False, tolerance: float | None = None, model: ModelShape | None = None, axes: str = "",
) -> TensorDiff:  # fmt: skip
    """Compare two dumps. Both are read once, from the disk in blocks; memory holds one pair of tensors per thread at most.

    Args:
        a: the reference's.
        b: the candidate's.
        exact: every bit must be equal.
        tolerance: error up to which a cell is equal; by default what rounding to the dtype explains.
        model: splits tensors of [tokens, heads * head_dim] into heads.
        axes: layout of the tensors with as many dimensions, such as "bhtd".
    """
    started = time.monotonic()
    pairs, problems = _paired(a, b)

    def one(pair: _Pair) -> _Compared | str | None:
        return _compare(pair, exact, tolerance, model, axes)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(one, pairs))
    every = [x for x in found if isinstance(x, _Compared)]
    compared = [x for x in every if x.bytes]
    problems += [x for x in found if isinstance(x, str)]
    problems += [f"not read: {why}" for why in (*a.refused, *b.refused)]
    result = _result(a, b, compared, problems, exact, time.monotonic() - started)
    return result.model_copy(update={"empty": len(every) - len(compared)})


def _paired(a: Dump, b: Dump) -> tuple[list[_Pair], list[str]]:
    others = {one.key: one for one in b.tensors}
    pairs = [_Pair(one, others[one.key]) for one in a.tensors if one.key in others]
    known = {one.key for one in a.tensors}
    if not pairs and len(a.tensors) == len(b.tensors) == 1:  # two tensors were named, whatever they call themselves
        return [_Pair(a.tensors[0], b.tensors[0])], []
    alone = [f"only in A: {one.key}" for one in a.tensors if one.key not in others]
    return pairs, alone + [f"only in B: {one.key}" for one in b.tensors if one.key not in known]


def _compare(
    pair: _Pair, exact: bool, tolerance: float | None, model: ModelShape | None, axes: str
) -> _Compared | str | None:
    """Compare a pair by cells; a sentence if it cannot be compared; None if it is no tensor, such as a list of request ids."""
    try:
        with reading(f"{pair.a.path} or {pair.b.path}", "tensor file"):
            return _compare_mapped(pair, exact, tolerance, model, axes)
    except NoTensor:
        return None
    except EvidenceError as error:
        return f"not read: {error.found}"


def _compare_mapped(
    pair: _Pair, exact: bool, tolerance: float | None, model: ModelShape | None, axes: str
) -> _Compared | str:
    one, two = pair.a.map(), pair.b.map()
    if one.shape != two.shape:
        return f"shapes differ, {_shape(one)} and {_shape(two)}: {pair.a.key}"
    if exact and one.dtype != two.dtype:
        return f"dtypes differ, {one.dtype} and {two.dtype}, so that bits cannot be equal: {pair.a.key}"
    bound = (
        None if exact else max(default_bound(one.dtype), default_bound(two.dtype)) if tolerance is None else tolerance
    )
    cells = compare(one, two, layout_of(pair.a.place.name, one.shape, model, axes), bound)
    return _Compared(pair, cells, bound, one.nbytes + two.nbytes)


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _result(
    a: Dump, b: Dump, compared: Sequence[_Compared], problems: Sequence[str], exact: bool, seconds: float
) -> TensorDiff:
    changed = [one for one in compared if one.cells.worst is not None]
    bad = [one for one in compared if one.cells.differing]
    first = _at(bad[0], bad[0].cells.first) if bad else None
    worst = max(changed, key=_badness, default=None)
    verdict: Verdict = "regression" if bad else "inconclusive" if problems or not compared else "pass"
    return TensorDiff(
        verdict=verdict,
        headline=_headline(compared, bad, problems, exact),
        a=str(a.path),
        b=str(b.path),
        format=TITLES[a.format],
        exact=exact,
        compared=len(compared),
        identical=len(compared) - len(changed),
        within=len(changed) - len(bad),
        differing=len(bad),
        bytes=sum(one.bytes for one in compared),
        seconds=seconds,
        first=first,
        worst=_at(worst, worst.cells.worst) if worst else None,
        tensors=tuple(_row(one) for one in changed[:_LISTED]),
        not_compared=tuple(problems[:_LISTED]),
        not_compared_count=len(problems),
        grids=tuple(_grids(compared)),
    )


def _badness(one: _Compared) -> tuple[bool, float]:
    """Rank a tensor by its worst cell: first what is not finite, then by multiples of the bound."""
    assert one.cells.worst is not None
    error = one.cells.worst.error
    return math.isnan(error), error / one.bound if one.bound else error


def _at(one: _Compared, cell: Cell | None) -> CellAt:
    assert cell is not None
    place = one.pair.a.place
    return CellAt(
        tensor=one.pair.a.key, layer=place.layer, boundary=place.boundary, step=place.step,
        batch=cell.batch, token=cell.token, head=cell.head, error=_error(cell.error), bound=one.bound,
    )  # fmt: skip


def _row(one: _Compared) -> TensorRow:
    cells, place = one.cells, one.pair.a.place
    return TensorRow(
        tensor=one.pair.a.key, layer=place.layer, boundary=place.boundary, cells=cells.total, out_of_bounds=cells.differing,
        not_finite=cells.nonfinite, max_abs=_error(cells.max_abs), first=_at(one, cells.first) if cells.first else None,
        worst=_at(one, cells.worst),
    )  # fmt: skip


def _error(value: float) -> OwnError:
    return float(value) if math.isfinite(value) else NOT_FINITE


def _headline(compared: Sequence[_Compared], bad: Sequence[_Compared], problems: Sequence[str], exact: bool) -> str:
    if not compared:
        return "Nothing could be compared"
    if bad:
        place, cell = bad[0].pair.a.place, bad[0].cells.first
        assert cell is not None
        return f"{len(bad)} of {len(compared)} tensors differ; the first is {place}{cell_text(cell.head, cell.token, cell.batch)}"
    same = "equal bit for bit" if exact else "equal within bounds"
    alone = compared[0].pair
    names = f" ({alone.a.key} in A, {alone.b.key} in B)" if alone.a.key != alone.b.key else ""
    said = f"{counted(len(compared), 'tensor')} {'is' if len(compared) == 1 else 'are'} {same}{names}"
    return f"{said}, but {len(problems)} could not be compared" if problems else said


def cell_text(head: int | None, token: int | None, batch: int | None) -> str:
    """Describe a cell, such as ", head 3, token 17"; empty parts are left out."""
    named = (("sequence", batch), ("head", head), ("token", token))
    return "".join(f", {what} {number}" for what, number in named if number is not None)


def _grids(compared: Sequence[_Compared]) -> list[ErrorGrid]:
    """Find the worst error by layer and head over all tensors of a boundary, for boundaries that have layers."""
    grids = []
    seen = Counter(one.pair.a.place.boundary for one in compared if one.pair.a.place.layer is not None)
    for boundary in seen:
        here = [one for one in compared if one.pair.a.place.boundary == boundary and one.pair.a.place.layer is not None]
        layers = sorted({one.pair.a.place.layer for one in here if one.pair.a.place.layer is not None})
        heads = max(one.cells.by_head.size for one in here)
        values: list[list[OwnError]] = [[None] * heads for _ in layers]
        bounds: list[float | None] = [None] * len(layers)
        for one in here:
            row = layers.index(one.pair.a.place.layer or 0)
            bounds[row] = one.bound or None
            for head, error in enumerate(one.cells.by_head):
                known = values[row][head]
                if known == NOT_FINITE or (known is not None and np.isfinite(error) and error <= known):
                    continue
                values[row][head] = float(f"{error:.4g}") if np.isfinite(error) else NOT_FINITE
        shown = tuple(tuple(row) for row in values)
        rows, columns = tuple(map(str, layers)), tuple(map(str, range(heads)))
        grids.append(
            ErrorGrid(
                id=boundary.replace(" ", "-"),
                title="layer × head",
                where=boundary,
                columns="head",
                row_labels=rows,
                column_labels=columns,
                values=shown,
                bounds=tuple(bounds),
            )
        )
    return grids
