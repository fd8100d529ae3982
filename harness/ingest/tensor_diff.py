"""Two files or folders of tensors -> the first and the worst difference: layer, boundary, head and token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.files import timestamp
from assay.harness.ingest.comparison import LISTED, CellAt, ComparedTensors, Comparison, TensorRow
from assay.harness.ingest.tensor_files import StoredTensor, open_dump
from assay.harness.ingest.tensor_layout import Layout, ModelHeads, layout_of
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError
from assay.harness.reading import reading
from assay.harness.statement import Statement, state

# Tensors that are compared at once: one thread reads while the other adds up.
_THREADS = 2
# The passes of both sides whose rows, in order, are compared; mostly one and one.
_Pair = tuple[Sequence[StoredTensor], Sequence[StoredTensor]]


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
    """A pair of tensors, compared by cells; they have so many bytes.

    Attributes:
        a: the first pass of A.
        b: the first pass of B.
        shape: of both, passes put together.
        layout: how the shape was read.
        passes: how many were put together in order, of A and of B.
    """

    a: StoredTensor
    b: StoredTensor
    cells: Cells
    bound: float | None
    bytes: int
    shape: tuple[int, ...]
    layout: Layout
    passes: tuple[int, int]

    def at(self, cell: TensorCell) -> CellAt:
        """Place a cell in the dump."""
        place = self.a.place
        return CellAt(
            tensor=self.a.key, layer=place.layer, boundary=place.boundary, step=place.step, **self.named(cell),
            error=_error(cell.error), bound=self.bound,
        )  # fmt: skip

    def named(self, cell: TensorCell) -> dict[str, Any]:
        """Return where a cell lies: by batch, token and head, or by the index of its dimensions where these are ambiguous."""
        if not self.layout.either:
            return {"batch": cell.batch, "token": cell.token, "head": cell.head}
        index = tuple(map(int, np.unravel_index(cell.token or 0, self.shape[: max(1, len(self.shape) - 1)])))
        return {"batch": None, "token": None, "head": None, "index": index}

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
    (read_a, tensors_a), (read_b, tensors_b) = open_dump(a), open_dump(b)
    pairs, problems = _paired(tensors_a, tensors_b)
    with ThreadPoolExecutor(_THREADS) as pool:
        made = list(pool.map(lambda pair: _compared(pair, rule), pairs))
    problems += [item for item in made if isinstance(item, Statement)]
    problems += [state("tensors-not-read", said=why) for why in (*read_a.notes, *read_b.notes)]
    every = [pair for pair in made if isinstance(pair, _Compared)]
    full = [pair for pair in every if pair.bytes]
    changed = [(pair, pair.cells.worst) for pair in full if pair.cells.worst is not None]
    bad = [(pair, pair.cells.first) for pair in full if pair.cells.first is not None]
    worst = max(changed, key=lambda change: change[0].badness, default=None)
    return Comparison(
        verdict="regression" if bad else "inconclusive" if problems or not full else "pass",
        created=timestamp(), kind="tensors", why=_why(full, bad, len(problems), rule.exact), a=read_a, b=read_b,
        tensors=ComparedTensors(
            exact=rule.exact, pairs=len(full), identical=len(full) - len(changed), within=len(changed) - len(bad),
            differing=len(bad), empty=len(every) - len(full), bytes=sum(pair.bytes for pair in full),
            seconds=time.monotonic() - started, first=bad[0][0].at(bad[0][1]) if bad else None,
            worst=worst[0].at(worst[1]) if worst else None, tensors=tuple(_row(*pair) for pair in changed[:LISTED]),
            not_compared=tuple(problems[:LISTED]), not_compared_count=len(problems), grids=tuple(_grids(full)),
        ),
    )  # fmt: skip


def _paired(a: Sequence[StoredTensor], b: Sequence[StoredTensor]) -> tuple[list[_Pair], list[Statement]]:
    mine, theirs = ({tensor.key: tensor for tensor in tensors} for tensors in (a, b))
    if (
        not mine.keys() & theirs.keys() and len(mine) == len(theirs) == 1
    ):  # they were named, whatever they call themselves
        return [(a, b)], []
    # One forward of a text and its generation, a pass for the prompt and one for each token, have the same rows in other passes.
    passes_a, passes_b = _passes(a), _passes(b)
    joined = {
        series
        for series in passes_a.keys() & passes_b.keys()
        if {tensor.key for tensor in passes_a[series]} != {tensor.key for tensor in passes_b[series]}
    }
    pairs: list[_Pair] = [(passes_a[series], passes_b[series]) for series in passes_a if series in joined]
    pairs += [
        ([tensor], [theirs[key]]) for key, tensor in mine.items() if key in theirs and tensor.series not in joined
    ]
    pairs.sort(key=lambda pair: pair[0][0].place.depth)
    return pairs, [
        state("tensor-in-one", side=side, tensor=key)
        for side, these, those in (("A", mine, theirs), ("B", theirs, mine))
        for key in these
        if key not in those and these[key].series not in joined
    ]


def _passes(tensors: Sequence[StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Return the passes of each series of a dump, in order."""
    series: dict[str, list[StoredTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.place.step):
        series.setdefault(tensor.series, []).append(tensor)
    return series


def _rows(a: Sequence[Tensor], b: Sequence[Tensor]) -> int | None:
    """Return the dimension along which the passes of both sides have as many rows together; None if there is none."""
    if len({tensor.dim() for tensor in (*a, *b)}) > 1:
        return None
    for dim in range(a[0].dim() - 1):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (*a, *b)}
        if len(others) == 1 and sum(tensor.shape[dim] for tensor in a) == sum(tensor.shape[dim] for tensor in b):
            return dim
    return None


def _compared(pair: _Pair, rule: TensorRule) -> _Compared | Statement:
    """Compare a pair by cells; state why if it cannot be compared."""
    (a, *_), (b, *_) = pair
    try:
        with reading(f"{a.path} or {b.path}", "tensor file"):
            of_a, of_b = ([each.map() for each in side] for side in pair)
            rows = _rows(of_a, of_b) if len(of_a) + len(of_b) > 2 else None
            if rows is None and len(of_a) + len(of_b) > 2:
                shapes = {side: [tuple(each.shape) for each in of] for side, of in (("a", of_a), ("b", of_b))}
                return state("rows-differ", tensor=a.series.strip("/"), **shapes)
            tensor_a, tensor_b = (of[0] if rows is None else torch.cat(of, rows) for of in (of_a, of_b))
            if tensor_a.shape != tensor_b.shape:
                return state("shapes-differ", a=tuple(tensor_a.shape), b=tuple(tensor_b.shape), tensor=a.key)
            if rule.exact and tensor_a.dtype != tensor_b.dtype:
                return state("dtypes-differ", a=str(tensor_a.dtype), b=str(tensor_b.dtype), tensor=a.key)
            rounding = max(_default_bound(tensor_a.dtype), _default_bound(tensor_b.dtype))
            bound = None if rule.exact else rounding if rule.tolerance is None else rule.tolerance
            shape = tuple(tensor_a.shape)
            layout = layout_of(a.place.name, shape, rule.model, rule.axes, rows)
            cells = compare_cells(tensor_a, tensor_b, layout, bound)
            bytes_ = tensor_a.nbytes + tensor_b.nbytes
            return _Compared(a, b, cells, bound, bytes_, shape, layout, (len(of_a), len(of_b)))
    except EvidenceError as error:
        return state("tensors-not-read", said=error.found)


def _row(compared: _Compared, worst: TensorCell) -> TensorRow:
    cells = compared.cells
    first = compared.at(cells.first) if cells.first else None
    return TensorRow(
        cells=cells.total, out_of_bounds=cells.differing, not_finite=cells.nonfinite, max_abs=_error(cells.max_abs),
        first=first, worst=compared.at(worst),
    )  # fmt: skip


def _error(value: float) -> OwnError:
    return float(value) if math.isfinite(value) else NOT_FINITE


def _why(
    compared: Sequence[_Compared], bad: Sequence[tuple[_Compared, TensorCell]], not_compared: int, exact: bool
) -> tuple[Statement, ...]:
    if not compared:
        return (state("no-tensor-compared"),)
    most = max(compared, key=lambda pair: sum(pair.passes)).passes
    joined = [state("passes-in-order", a=most[0], b=most[1])] if sum(most) > 2 else []
    if bad:
        first, cell = bad[0]
        place, layout = first.a.place, first.layout
        differ = state(
            "tensors-differ", differing=len(bad), compared=len(compared), layer=place.layer, boundary=place.boundary,
            name=place.name, step=place.step, **first.named(cell),
        )  # fmt: skip
        read = state("layout", shape=first.shape, axes=layout.axes, either=layout.either)
        return differ, *joined, *([] if layout.known or len(first.shape) < 3 else [read])
    names = compared[0].a.key, compared[0].b.key
    return state("tensors-equal", compared=len(compared), exact=exact, names=names, not_compared=not_compared), *joined


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
            id=boundary.replace(" ", "-"), where=boundary, columns="head",
            row_labels=tuple(str(layer) for layer, _ in rows), column_labels=tuple(map(str, range(heads))),
            values=tuple(tuple(_worst(head, tensors) for head in range(heads)) for _, tensors in rows),
            bounds=tuple(tensors[-1].bound or None for _, tensors in rows),
        )  # fmt: skip


def _worst(head: int, tensors: Sequence[_Compared]) -> OwnError:
    errors = [float(tensor.cells.by_head[head]) for tensor in tensors if head < tensor.cells.by_head.size]
    if not all(map(math.isfinite, errors)):
        return NOT_FINITE
    return float(f"{max(errors):.4g}") if errors else None


# Elements that are converted at once: 1 MiB of float32, which stays in the cache.
_BLOCK = 1 << 18
# Bound of a cell whose elements are stored in 16 bits or fewer, in units of the dtype's epsilon: each side rounds twice on the way
# to what is saved (the operands, the result), each time by at most half an epsilon, and all errors of a cell may point one way.
_ROUNDINGS = 4
# The same for float32, whose error is that of sums in another order: about sqrt(n) half epsilons for n = 4096 ... 16384 terms.
_SUMMED = 64


def _default_bound(dtype: torch.dtype) -> float:
    """Compute the error of a cell that rounding explains; 0 for integers."""
    if not dtype.is_floating_point:
        return 0.0
    return torch.finfo(dtype).eps * (_ROUNDINGS if dtype.itemsize < 4 else _SUMMED)


class TensorCell(NamedTuple):
    """One cell.

    Attributes:
        batch: place in the batch; None if the tensor has no such dimension.
        token: row of the token; None for a tensor without tokens.
        head: None if the tensor was not split by head.
        error: the larger of relative L1, sum |b - a| / sum |a|, and of max |b - a| / max |a|: one element that is lost among a
            hundred changes the first by less than rounding does. Infinite if only b is not zero, NaN if one side is not finite.
    """

    batch: int | None
    token: int | None
    head: int | None
    error: float


@dataclass(frozen=True)
class Cells:
    """The differences between two tensors of one shape.

    Attributes:
        differing: cells that are out of bounds.
        total: cells.
        first: the first of them by place in the batch, token and head; None if there is none.
        worst: the largest error of any cell; None if no bit differs.
        by_head: float64 [heads], the largest error of each head, NaN if one side is not finite; [1] without heads.
        nonfinite: cells in which one side is not finite and the other differs.
        max_abs: largest absolute difference in the worst cell.
    """

    differing: int
    total: int
    first: TensorCell | None
    worst: TensorCell | None
    by_head: NDArray[np.float64]
    nonfinite: int
    max_abs: float


def compare_cells(a: Tensor, b: Tensor, layout: Layout, bound: float | None) -> Cells:
    """Compare two tensors of one shape.

    Args:
        a: the reference, any strides, on the CPU.
        b: the candidate.
        layout: how to read their dimensions.
        bound: error up to which a cell is equal; None if every bit must be.
    """
    rows = math.prod(layout.lead)
    heads = layout.lead[layout.axes.index("h")] if "h" in layout.axes else 1
    equal = Cells(0, rows, None, None, np.zeros(heads), 0, 0.0)
    if not a.numel():  # nothing to compare, however many rows of no elements a damaged header states
        return equal
    a, b = a.contiguous().view(rows, layout.dim), b.contiguous().view(rows, layout.dim)
    # float32 holds sums of fewer than 2^20 16-bit terms to 1e-4.
    narrow = all(dtype.is_floating_point and dtype.itemsize <= 4 for dtype in (a.dtype, b.dtype))
    errors: Tensor | None = None
    step = max(_BLOCK // max(layout.dim, 1), 1)
    for start in range(0, rows, step):
        x, y = a[start : start + step], b[start : start + step]
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        if errors is None:
            errors, out = torch.zeros(rows), torch.zeros(rows, dtype=torch.bool)
        here = slice(start, start + len(x))
        errors[here] = _errors(x, y, torch.float32 if narrow else torch.float64)
        out[here] = (_bits(x) != _bits(y)).any(-1) if bound is None else ~(errors[here] <= bound)
    return equal if errors is None else _summary(a, b, layout, errors.numpy(), out.numpy())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _errors(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the error of each row of two [rows, dim] tensors, as `TensorCell` has it. Equal infinities and NaNs are equal."""
    x, y = a.to(dtype), b.to(dtype)
    apart = (y - x).abs_().masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0)
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    difference = apart.sum(-1)
    relative = torch.maximum(difference / size.sum(-1), apart.amax(-1) / size.amax(-1))
    relative = torch.where(difference.isfinite(), relative, math.nan)
    return torch.where(difference == 0, 0.0, relative).float()


def _summary(a: Tensor, b: Tensor, layout: Layout, errors: NDArray[np.float32], out: NDArray[np.bool_]) -> Cells:
    """Summarise `errors` and `out` (which cells are out of bounds): [rows], in the order of the tensor."""
    axes = "".join(sorted(layout.axes, key="bth".index))
    order = [layout.axes.index(letter) for letter in axes]
    by_place, out_by_place = (x.reshape(layout.lead).transpose(order) for x in (errors, out))
    count, ranked = int(out.sum()), _ranked(errors)
    row = int(ranked.argmax())
    heads_last = by_place if "h" in axes else by_place[..., None]
    apart = (b[row].double() - a[row].double()).abs()
    return Cells(
        differing=count,
        total=errors.size,
        first=_cell(by_place, axes, int(out_by_place.reshape(-1).argmax())) if count else None,
        worst=_cell(by_place, axes, int(_ranked(by_place).argmax())),
        by_head=heads_last.reshape(-1, heads_last.shape[-1]).astype(np.float64).max(0),  # NaN wins
        nonfinite=int(np.isnan(errors).sum()),
        max_abs=float(apart.max()) if apart.numel() else 0.0,
    )


def _ranked(errors: NDArray[Any]) -> NDArray[Any]:
    """Rank errors: a NaN is worse than an infinite ratio."""
    finite = np.nan_to_num(errors.astype(np.float64), nan=0.0, posinf=np.finfo(np.float64).max)
    return np.where(np.isnan(errors), np.inf, finite).reshape(-1)


def _cell(errors: NDArray[Any], axes: str, flat: int) -> TensorCell:
    at = dict(zip(axes, (int(i) for i in np.unravel_index(flat, errors.shape)), strict=True)) if axes else {}
    return TensorCell(at.get("b"), at.get("t"), at.get("h"), float(errors.reshape(-1)[flat]))
