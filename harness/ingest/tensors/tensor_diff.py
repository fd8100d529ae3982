"""Two dumps → the first and the worst difference: layer, boundary, head and token."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat

from assay.harness.errors import EvidenceError
from assay.harness.ingest.tensors.cell_errors import Cells, TensorCell, compare, default_bound
from assay.harness.ingest.tensors.dump import TITLES, Dump, StoredTensor
from assay.harness.ingest.tensors.layout import DumpedModel, Layout, layout_of
from assay.harness.ingest.tensors.tensor_files import NoTensor
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError
from assay.harness.reading import reading
from assay.harness.schema import RULE, Part
from assay.harness.text import counted
from assay.harness.verdict import Decided

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


_Pair = tuple[StoredTensor, StoredTensor]


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


def diff(
    a: Dump, b: Dump, *, exact: bool = False, tolerance: float | None = None, model: DumpedModel | None = None, axes: str = "",
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

    def compared(pair: _Pair) -> _Compared | str | None:
        try:
            with reading(f"{pair[0].path} or {pair[1].path}", "tensor file"):
                return _compare(*pair, exact, tolerance, partial(layout_of, model=model, axes=axes))
        except NoTensor:  # such as a list of request ids
            return None
        except EvidenceError as error:
            return f"not read: {error.found}"

    with ThreadPoolExecutor(_THREADS) as pool:
        made = list(pool.map(compared, pairs))
    problems += [item for item in made if isinstance(item, str)]
    problems += [f"not read: {why}" for why in (*a.refused, *b.refused)]
    result = _result([pair for pair in made if isinstance(pair, _Compared)], problems, exact)
    named = {"a": str(a.path), "b": str(b.path), "format": TITLES[a.format], "seconds": time.monotonic() - started}
    return TensorDiff(**result, **named)


def _result(every: Sequence[_Compared], problems: Sequence[str], exact: bool) -> dict[str, Any]:
    full = [pair for pair in every if pair.bytes]
    changed = [(pair, pair.cells.worst) for pair in full if pair.cells.worst is not None]
    bad = [(pair, pair.cells.first) for pair in full if pair.cells.first is not None]
    worst = max(changed, key=lambda change: change[0].badness, default=None)
    return {
        "verdict": "regression" if bad else "inconclusive" if problems or not full else "pass",
        "headline": _headline(full, bad, problems, exact), "exact": exact, "compared": len(full),
        "identical": len(full) - len(changed), "within": len(changed) - len(bad), "differing": len(bad),
        "bytes": sum(pair.bytes for pair in full), "first": bad[0][0].at(bad[0][1]) if bad else None,
        "worst": worst[0].at(worst[1]) if worst else None, "tensors": tuple(_row(*pair) for pair in changed[:_LISTED]),
        "not_compared": tuple(problems[:_LISTED]), "not_compared_count": len(problems), "empty": len(every) - len(full),
        "grids": tuple(_grids(full)),
    }  # fmt: skip


def _paired(a: Dump, b: Dump) -> tuple[list[_Pair], list[str]]:
    mine, theirs = ({tensor.key: tensor for tensor in dump.tensors} for dump in (a, b))
    pairs = [(tensor, theirs[key]) for key, tensor in mine.items() if key in theirs]
    if not pairs and len(mine) == len(theirs) == 1:  # two tensors were named, whatever they call themselves
        return [(a.tensors[0], b.tensors[0])], []
    return pairs, [
        *(f"only in A: {key}" for key in mine if key not in theirs),
        *(f"only in B: {key}" for key in theirs if key not in mine),
    ]


def _compare(
    a: StoredTensor,
    b: StoredTensor,
    exact: bool,
    tolerance: float | None,
    layout: Callable[[str, Sequence[int]], Layout],
) -> _Compared | str:
    """Compare a pair by cells; a sentence if it cannot be compared."""
    tensor_a, tensor_b = a.map(), b.map()
    if tensor_a.shape != tensor_b.shape:
        return f"shapes differ, {list(tensor_a.shape)} and {list(tensor_b.shape)}: {a.key}"
    if exact and tensor_a.dtype != tensor_b.dtype:
        return f"dtypes differ, {tensor_a.dtype} and {tensor_b.dtype}, so that bits cannot be equal: {a.key}"
    rounding = max(default_bound(tensor_a.dtype), default_bound(tensor_b.dtype))
    bound = None if exact else rounding if tolerance is None else tolerance
    return _Compared(
        a,
        b,
        compare(tensor_a, tensor_b, layout(a.place.name, tensor_a.shape), bound),
        bound,
        tensor_a.nbytes + tensor_b.nbytes,
    )


def _row(compared: _Compared, worst: TensorCell) -> TensorRow:
    cells, place = compared.cells, compared.a.place
    return TensorRow(
        tensor=compared.a.key, layer=place.layer, boundary=place.boundary, cells=cells.total, out_of_bounds=cells.differing,
        not_finite=cells.nonfinite, max_abs=_error(cells.max_abs), first=compared.at(cells.first) if cells.first else None,
        worst=compared.at(worst),
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
