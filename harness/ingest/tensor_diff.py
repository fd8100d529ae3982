"""Compares two files or folders of tensors: the first and the worst difference, by layer, boundary, head and token."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.errors import EvidenceError
from assay.harness.files import timestamp
from assay.harness.ingest.comparison import LISTED, CellAt, ComparedTensors, Comparison, TensorRow
from assay.harness.ingest.tensor_files import StoredTensor, open_dump, other_files
from assay.harness.ingest.tensor_layout import Layout, layout_of
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError
from assay.harness.reading import reading
from assay.harness.statement import Statement, state

# Largest share of cells with NaN on both sides that does not count as a gap.
_MOST_NAN = 0.1
# Tensors compared at the same time: one thread reads while the other adds up.
_THREADS = 2
# The passes of A and of B whose rows are compared in order. There is usually one pass on each side.
_Pair = tuple[Sequence[StoredTensor], Sequence[StoredTensor]]


@dataclass(frozen=True)
class TensorRule:
    """How tensors are compared.

    Attributes:
        tolerance: largest error of an equal cell; None allows for rounding to the dtype, 0 requires equal bits.
        axes: layout of tensors with that number of dimensions, such as "bhtd".
    """

    tolerance: float | None = None
    axes: str = ""

    @property
    def exact(self) -> bool:
        """True if every bit must be equal."""
        return self.tolerance == 0


@dataclass(frozen=True)
class _Compared:
    """A pair of tensors, compared cell by cell.

    Attributes:
        a: A's first pass.
        bytes: size of both tensors together.
        layout: the dimensions of both, with passes concatenated.
        passes: the number of passes concatenated in order, for A and for B.
        names: the keys of the first passes.
    """

    a: StoredTensor
    cells: Cells
    bound: float | None
    bytes: int
    layout: Layout
    passes: tuple[int, int]
    names: tuple[str, str]

    def at(self, cell: _TensorCell | None) -> CellAt | None:
        """Return a cell's place in the dump."""
        if cell is None:
            return None
        place = self.a
        return CellAt(
            tensor=self.a.key, layer=place.layer, boundary=place.boundary, step=place.step, index=cell.at,
            axes=self.layout.axes, error=_error(cell.error), bound=self.bound,
        )  # fmt: skip

    @property
    def badness(self) -> tuple[bool, float]:
        """Sort key by the worst cell: non-finite errors rank above all, then multiples of the bound."""
        error = self.cells.worst.error if self.cells.worst else 0.0
        return math.isnan(error), error / self.bound if self.bound else error


def diff_tensors(a: Path, b: Path, rule: TensorRule) -> Comparison:
    """Compare all tensors that both sides have. Each is read once; memory holds at most one pair of tensors per thread.

    Raises:
        UsageError: there is no tensor file.
        EvidenceError: one side cannot be read at all.
    """
    started = time.monotonic()
    (read_a, tensors_a), (read_b, tensors_b) = open_dump(a), open_dump(b)
    pairs, problems = _paired(tensors_a, tensors_b)
    with ThreadPoolExecutor(_THREADS) as pool:
        made = list(pool.map(lambda pair: _compared(pair, rule), pairs))
    problems += [item for item in made if isinstance(item, Statement)]
    problems += [state("tensors-not-read", said=why) for why in (*read_a.notes, *read_b.notes)]
    problems += _other_files(a, b)
    every = [pair for pair in made if isinstance(pair, _Compared)]
    problems += [_nan([pair]) for pair in every if pair.cells.nan > _MOST_NAN * pair.cells.total]
    full = [pair for pair in every if pair.bytes and pair.cells.total > pair.cells.nan]
    changed = [pair for pair in full if pair.cells.worst]
    bad = [pair for pair in full if pair.cells.first]
    worst = max(changed, key=lambda pair: pair.badness, default=None)
    return Comparison(
        verdict="regression" if bad else "inconclusive" if problems or not full else "pass",
        created=timestamp(), kind="tensors", why=_why(full, bad, problems, rule.exact), a=read_a, b=read_b,
        tensors=ComparedTensors(
            exact=rule.exact, pairs=len(full), identical=len(full) - len(changed), within=len(changed) - len(bad),
            differing=len(bad), empty=sum(not pair.bytes for pair in every), bytes=sum(pair.bytes for pair in full),
            seconds=time.monotonic() - started, first=bad[0].at(bad[0].cells.first) if bad else None,
            worst=worst.at(worst.cells.worst) if worst else None, tensors=tuple(map(_row, changed[:LISTED])),
            not_compared=tuple(problems[:LISTED]), not_compared_count=len(problems), grids=tuple(_grids(full)),
        ),
    )  # fmt: skip


def _other_files(a: Path, b: Path) -> list[Statement]:
    """State which non-tensor files differ or exist on one side only. Their contents were not compared."""
    ours, theirs = other_files(a), other_files(b)
    return [
        state("file-not-read", file=name, side="" if name in ours and name in theirs else "A" if name in ours else "B")
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not cmp(ours[name], theirs[name], shallow=False)
    ]


def _nan(pairs: Sequence[_Compared]) -> Statement:
    cells, of = sum(pair.cells.nan for pair in pairs), sum(pair.cells.total for pair in pairs)
    return state("nan-in-both", tensor=pairs[0].a.key, tensors=len(pairs), cells=cells, of=of)


def _paired(a: Sequence[StoredTensor], b: Sequence[StoredTensor]) -> tuple[list[_Pair], list[Statement]]:
    """Pair tensors by key. Passes of a series with different keys, such as one forward vs. prefill and decode, pair by rows."""
    mine, theirs = _series(a), _series(b)
    if len(a) == len(b) == 1 and a[0].key != b[0].key:  # the user named both, so their keys do not matter
        return [(a, b)], []
    pairs, problems = list[_Pair](), list[Statement]()
    for series in dict.fromkeys((*mine, *theirs)):
        of_a, of_b = mine.get(series, {}), theirs.get(series, {})
        if of_a and of_b and of_a.keys() != of_b.keys():
            pairs.append(([*of_a.values()], [*of_b.values()]))
            continue
        pairs += [([of_a[key]], [of_b[key]]) for key in of_a if key in of_b]
        problems += [state("tensor-in-one", side="A", tensor=key) for key in of_a if not of_b]
        problems += [state("tensor-in-one", side="B", tensor=key) for key in of_b if not of_a]
    return sorted(pairs, key=lambda pair: pair[0][0].depth), problems


def _series(tensors: Sequence[StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Return the passes of each series in a dump by key, in order."""
    series: dict[str, dict[str, StoredTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.step):
        series.setdefault(tensor.series, {})[tensor.key] = tensor
    return series


def _rows(a: Sequence[Tensor], b: Sequence[Tensor]) -> int | None:
    """Return the dimension along which both sides' passes have equally many rows in total, or None if there is none."""
    if len({tensor.dim() for tensor in (*a, *b)}) > 1:
        return None
    for dim in range(a[0].dim() - 1):
        others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (*a, *b)}
        if len(others) == 1 and sum(tensor.shape[dim] for tensor in a) == sum(tensor.shape[dim] for tensor in b):
            return dim
    return None


def _compared(pair: _Pair, rule: TensorRule) -> _Compared | Statement:
    """Compare a pair cell by cell, or state why it cannot be compared."""
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
            bound = rule.tolerance
            stored = None
            if bound is None:
                if _CACHE.search(a.name):  # a step between its 8-bit values is a step in other 8-bit floats too
                    both = ((each, each.dtype == torch.uint8) for each in (tensor_a, tensor_b))
                    tensor_a, tensor_b = (each.view(torch.float8_e4m3fn) if bits else each for each, bits in both)
                stored = _stored(tensor_a.dtype, tensor_b.dtype)
                bound = max(map(_default_bound, [stored] if stored else map(_grid, (tensor_a, tensor_b))))
            bound = None if rule.exact else bound
            layout = layout_of(tensor_a.shape, rule.axes)
            # A tolerance from the user applies to cells. Rounding alone does not explain a factor.
            cells = compare_cells(tensor_a, tensor_b, layout, bound, stored, bound if rule.tolerance else None)
            bytes_ = tensor_a.nbytes + tensor_b.nbytes
            return _Compared(a, cells, bound, bytes_, layout, (len(of_a), len(of_b)), (a.key, b.key))
    except EvidenceError as error:
        return state("tensors-not-read", said=error.found)


def _row(pair: _Compared) -> TensorRow:
    first, worst = pair.at(pair.cells.first), pair.at(pair.cells.worst)
    assert worst is not None  # it differs
    return TensorRow(cells=pair.cells.total, out_of_bounds=pair.cells.differing, first=first, worst=worst)


def _error(value: float) -> OwnError:
    return float(value) if math.isfinite(value) else NOT_FINITE


def _why(
    compared: Sequence[_Compared], bad: Sequence[_Compared], problems: Sequence[Statement], exact: bool
) -> tuple[Statement, ...]:
    if not compared:
        return (state("no-tensor-compared", why=list(problems[:1])),)
    most = max((pair.passes for pair in compared), key=sum)
    joined = [state("passes-in-order", a=most[0], b=most[1])] if sum(most) > 2 else []
    if nan := [pair for pair in compared if pair.cells.nan]:
        joined.append(_nan(nan))
    if bad and (cell := bad[0].cells.first):
        place = bad[0].a
        differ = state(
            "tensors-differ", differing=len(bad), compared=len(compared), layer=place.layer, boundary=place.boundary,
            name=place.name, step=place.step, index=cell.at, axes=bad[0].layout.axes,
        )  # fmt: skip
        return differ, *joined
    names = compared[0].names
    return state("tensors-equal", compared=len(compared), exact=exact, names=names, not_compared=len(problems)), *joined


def _grids(compared: Sequence[_Compared]) -> Iterator[ErrorGrid]:
    """Yield each boundary's worst error by layer and head over all its tensors, for boundaries inside layers."""
    layered: dict[str, dict[int, list[_Compared]]] = {}
    for pair in compared:
        if pair.a.layer is not None:
            layered.setdefault(pair.a.boundary, {}).setdefault(pair.a.layer, []).append(pair)
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


# Elements converted at once: 1 MiB of float32, which stays in the CPU cache.
_BLOCK = 1 << 18
# Bound of a cell with elements of 16 bits or fewer, in units of the dtype's epsilon. Each side rounds twice before saving (the
# operands and the result), each time by at most half an epsilon, and all errors in a cell may have the same sign.
_ROUNDINGS = 4
# The same for float32, whose errors come from the order of summation: about sqrt(n) half epsilons for n = 4096 ... 16384 terms.
_SUMMED = 64
# 8-bit floats without a mantissa, and pairs of 4-bit floats: their bits are compared.
_EXACT = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
# A cache that stores 8-bit floats as bytes.
_CACHE = re.compile(r"(^|[._])(k|v|kv|key|value)_?(cache|buffer|pool)s?($|[._])", re.IGNORECASE)
# Elements sampled to infer the dtype of a tensor's numbers, and the smallest share that uses its last bit (random ones: half).
_LOOKED_AT, _LAST_BIT = 1 << 14, 0.2
# Fewest rows for which columns, and a factor common to all of them, are judged.
_LEAST_ROWS = 16
# Largest error of a column relative to its size, in bounds of a cell: cancellation makes some columns small.
_COLUMN = 8.0
# Largest difference from 1 of a factor, in bounds of a cell: half of its roundings, since they do not all have the same sign.
_FACTOR = 0.5


def _default_bound(dtype: torch.dtype) -> float:
    """Compute the error of a cell that rounding explains: 0 for integers and for scales, which are powers of two."""
    if not (dtype.is_floating_point or dtype.is_complex) or (dtype.itemsize == 1 and not _stored(dtype)):
        return 0.0
    if dtype.itemsize == 1:
        return _step_of_one(dtype) / 4
    return torch.finfo(dtype).eps * (_ROUNDINGS if dtype.itemsize < 4 else _SUMMED)


def _grid(tensor: Tensor) -> torch.dtype:
    """Return the dtype that a tensor's numbers had before they were saved wider: the narrowest one, if its last bit is used."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor.dtype
    some = tensor.flatten()[:: max(1, tensor.numel() // _LOOKED_AT)]
    some = some[some.isfinite() & (some != 0)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = some.to(dtype)
        if len(some) and bool((narrow.to(some.dtype) == some).all()):
            last = float((_bits(narrow) & 1).double().mean())
            return dtype if _LAST_BIT <= last <= 1 - _LAST_BIT else tensor.dtype
    return tensor.dtype


def _stored(*dtypes: torch.dtype) -> torch.dtype | None:
    """Return the coarsest dtype that is an 8-bit float with a mantissa, or None if there is none."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize == 1 and dtype not in _EXACT]
    return max(floats, key=_step_of_one, default=None)


def _step_of_one(dtype: torch.dtype) -> float:
    """Return the step from 1 to an 8-bit float's next number. PyTorch 2.13's `eps` of float8_e5m2fnuz differs from it."""
    return float((torch.ones(1).to(dtype).view(torch.uint8) + 1).view(dtype).float()) - 1


class _TensorCell(NamedTuple):
    """One cell.

    Attributes:
        at: its index in the leading dimensions, as in `Layout.lead`.
        error: the larger of relative L1, sum |b - a| / sum |a|, and max |b - a| / max |a|: losing one element in a hundred changes
            the first by less than rounding does. Infinite if only b is not zero, NaN if one side is not finite.
            For 8-bit floats, a quarter of the second, since equal numbers may be stored as neighbours.
    """

    at: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class Cells:
    """The differences between two tensors of the same shape.

    Attributes:
        differing: number of cells out of bounds.
        total: number of cells.
        first: the first cell out of bounds, by sequence, token and head where they are named, or None if all are within.
        worst: the cell with the largest error, or None if the tensors are equal bit for bit.
        by_head: float64 [heads], the largest error of each head, NaN if one side is not finite; [1] without heads.
        nan: number of cells with NaN on both sides in the same element, which shows nothing.
    """

    differing: int
    total: int
    first: _TensorCell | None
    worst: _TensorCell | None
    by_head: NDArray[np.float64]
    nan: int = 0


def compare_cells(
    a: Tensor,
    b: Tensor,
    layout: Layout,
    bound: float | None,
    stored: torch.dtype | None = None,
    factor: float | None = None,
) -> Cells:
    """Compare two tensors of the same shape.

    Args:
        a: the reference, any strides, on the CPU.
        b: the candidate.
        layout: the meaning of their dimensions.
        bound: largest error of an equal cell, or None if every bit must be equal.
        stored: the 8-bit float to which both are rounded first, or None to compare them as they are.
        factor: largest difference from 1 of a factor between the sides; None means `_FACTOR` bounds.
    """
    rows = math.prod(layout.lead)
    equal = Cells(0, rows, None, None, np.zeros(layout.heads))
    if not a.numel():  # nothing to compare, even if a damaged header states many rows of no elements
        return equal
    a, b = (each.resolve_conj().resolve_neg().contiguous().view(rows, layout.dim) for each in (a, b))
    if a.is_complex() or b.is_complex():  # real and imaginary parts are elements
        both = torch.promote_types(a.dtype, b.dtype)
        a, b = (torch.view_as_real(each.to(both)).view(rows, 2 * layout.dim) for each in (a, b))
    a, b = (each.view(torch.uint8) if each.dtype in _EXACT else each for each in (a, b))
    # float32 is accurate to 1e-4 for sums of fewer than 2^20 16-bit terms.
    narrow = all(dtype.is_floating_point and dtype.itemsize <= 4 for dtype in (a.dtype, b.dtype))
    if stored:
        largest = torch.finfo(stored).max
        a, b = (torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(stored) for x in (a.float(), b.float()))
    errors: Tensor | None = None
    nan = 0
    step = max(_BLOCK // max(layout.dim, 1), 1)
    for start in range(0, rows, step):
        x, y = a[start : start + step], b[start : start + step]
        # The sum is NaN if any element is, and costs less than testing each.
        if x.is_floating_point() and y.is_floating_point() and math.isnan(float(x.float().sum())):
            nan += int((x.float().isnan() & y.float().isnan()).any(-1).sum())
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        if errors is None:
            errors, out = torch.zeros(rows), torch.zeros(rows, dtype=torch.bool)
        here = slice(start, start + len(x))
        errors[here] = _errors(x, y, torch.float32 if narrow else torch.float64, stored is not None)
        out[here] = (_bits(x) != _bits(y)).any(-1) if bound is None else ~(errors[here] <= bound)
    if errors is None:
        return replace(equal, nan=nan)
    if bound:
        ratios = _by_column(a, b, layout, bound, bound * _FACTOR if factor is None else factor)
        errors = torch.maximum(errors, (ratios * bound).float())  # a NaN stays
        out |= ratios > 1
    return replace(_summary(layout, errors.numpy(), out.numpy()), nan=nan)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _errors(a: Tensor, b: Tensor, dtype: torch.dtype, stored: bool) -> Tensor:
    """Compute each row's error between two [rows, dim] tensors, as defined in `_TensorCell`. Infinities and NaNs can be equal."""
    apart, x = _apart(a, b, dtype), a.to(dtype)
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    difference = apart.sum(-1)
    of_element = apart.amax(-1) / size.amax(-1)
    relative = of_element / 4 if stored else torch.maximum(difference / size.sum(-1), of_element)
    relative = torch.where(difference.isfinite(), relative, math.nan)
    return torch.where(difference == 0, 0.0, relative).float()


def _apart(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute |b - a|, without rounding for integers; 0 where both are the same infinity or NaN."""
    if not a.is_floating_point() and not b.is_floating_point():  # float64 cannot represent all integers above 2^53
        return (b.long() - a.long()).to(dtype).abs_()
    x, y = a.to(dtype), b.to(dtype)
    return (y - x).abs_().masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0)


def _by_column(a: Tensor, b: Tensor, layout: Layout, bound: float, factor: float) -> Tensor:
    """Judge the columns of two [rows, dim] tensors, each relative to its own size over all tokens, and a factor common to all.

    The bound of a row misses errors in dimensions that are small next to massive ones, and a factor between the sides. A column is
    one dimension of one head. It is out of bounds if Σ|b - a| exceeds `_COLUMN` bounds of Σ|a|. All are, if the slope of b over a
    differs from 1 by more than `factor`. Fewer than `_LEAST_ROWS` rows show neither.

    Returns:
        For each row [rows], the largest error, in units of its bound, of a column in which the row differs; at most 1 is in bounds.
    """
    heads, dim = layout.heads, a.shape[1]

    def columns(flat: Tensor, *last: int) -> Tensor:
        shaped = flat.view((*layout.lead, *last))
        moved = shaped.movedim(layout.axes.index("h"), len(layout.lead) - 1) if heads > 1 else shaped
        return moved.reshape(-1, math.prod((heads, *last)))

    x, y, place = columns(a, dim), columns(b, dim), columns(torch.arange(len(a)))
    worst = torch.zeros(len(a), dtype=torch.float64)
    if len(x) < _LEAST_ROWS:
        return worst
    wide = torch.float32 if all(each.is_floating_point() and each.itemsize <= 4 for each in (a, b)) else torch.float64
    step = max(_BLOCK // x.shape[1], 1)

    def block(start: int) -> tuple[Tensor, Tensor]:
        size, other = (each[start : start + step].to(wide) for each in (x, y))
        apart, size = (other - size).nan_to_num_(0.0, 0.0, 0.0), size.nan_to_num(0.0, 0.0, 0.0)
        # A massive token counts the same as any other.
        scale = size.abs().amax(-1, keepdim=True)
        return (size / scale).nan_to_num_(0.0), apart.div_(scale).nan_to_num_(0.0, 0.0, 0.0)

    sums = torch.zeros(4, x.shape[1], dtype=torch.float64)
    for start in range(0, len(x), step):
        size, apart = block(start)
        sums += torch.stack([each.sum(0) for each in (apart.abs(), size.abs(), size * apart, size * size)])
    lost, of, product, square = sums
    # A column that is zero relative to the others shows only rounding.
    least = torch.finfo(torch.bfloat16).eps ** 2 * float(of.mean())
    slope = float((product.sum().abs() / square.sum()).nan_to_num(0.0))
    off = (lost / (_COLUMN * bound * of + least)).nan_to_num(0.0).clamp(min=slope / factor)
    for start in range(0, len(x) if float(off.max()) > 1 else 0, step):
        ratios = torch.where(block(start)[1] != 0, off, 0.0)
        worst[place[start : start + step]] = ratios.view(-1, heads, dim).amax(-1)
    return worst


def _summary(layout: Layout, errors: NDArray[np.float32], out: NDArray[np.bool_]) -> Cells:
    """Summarise `errors` and `out` (cells out of bounds), both [rows] in the tensor's order."""
    order = sorted(range(len(layout.lead)), key=lambda dim: "bth".index(layout.axes[dim]) if layout.axes else dim)
    by_place, out_by_place = (x.reshape(layout.lead).transpose(order) for x in (errors.astype(np.float64), out))
    # A NaN ranks as worse than an infinite ratio.
    finite = np.nan_to_num(by_place, nan=0.0, posinf=np.finfo(np.float64).max)
    ranked = np.where(np.isnan(by_place), np.inf, finite)

    def cell(flat: np.intp) -> _TensorCell:
        at = dict(zip(order, map(int, np.unravel_index(flat, by_place.shape)), strict=True))
        return _TensorCell(tuple(at[dim] for dim in sorted(at)), float(by_place.reshape(-1)[flat]))

    heads_last = by_place if "h" in layout.axes else by_place[..., None]
    return Cells(
        differing=int(out.sum()), total=errors.size, first=cell(out_by_place.argmax()) if out.any() else None,
        worst=cell(ranked.argmax()), by_head=heads_last.reshape(-1, heads_last.shape[-1]).max(0),  # NaN wins
    )  # fmt: skip
