"""Two traces of one request -> the first layer, boundary and head at which they part beyond what rounding explains.

Layers are compared in the order in which a pass computes them, and in each what attention is given and reads, then what it returns.
An error is the sum of a row's absolute differences, divided by the mean over rows of the base's sums of absolute values in that
head: a row that happens to be small is no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence.trace import Trace
from assay.harness.judge.traces import matching_rows

Place = Literal["input", "cache", "attention", "behind attention"]
"""Where two passes part: before attention, in the K and V of earlier tokens that it reads, in attention itself, or behind the last
layer's."""
Name = Literal["q", "k", "v", "output"]
_Tensor = tuple[Place, Name]
_ORDER: tuple[_Tensor, ...] = (
    ("input", "q"), ("input", "k"), ("input", "v"), ("cache", "k"), ("cache", "v"), ("attention", "output"),
)  # fmt: skip
"""What is compared of a layer: q, K and V of new tokens as they are computed, K and V of all as they are read, and the output."""
_FLOOR_FACTOR = 4.0
"""Times the largest difference of the base from itself, in other batches, that is still the floor: as for the mean of an arm."""
_LEAST: Mapping[str, float] = {"float32": 1e-5, "float16": 5e-3}
"""Error below which nothing is a difference, by dtype: some 100 units in the last place in float32, where sums in another order
move a row by less than 1e-6; 5 in float16."""
_LEAST_BFLOAT16 = 3e-2


@dataclass(frozen=True)
class Parting:
    """The first place at which two traces part.

    Attributes:
        place: where.
        layer: its number; the last one for "behind attention".
        names: what differs there of q, k, v and the output: of k and v as computed, or in the cache.
        head: number of the q head, or of the kv head of K and V, in which the first of them differs most; None behind attention.
        position: of the first row or key of it that differs, from 0; None behind attention.
        positions: rows or keys of it that differ.
        error: the largest, relative.
        bound: the largest that is no difference.
    """

    place: Place
    layer: int
    names: tuple[Name, ...] = ()
    head: int | None = None
    position: int | None = None
    positions: int = 0
    error: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class _Errors:
    """Errors of one tensor: the position of each row or key, int64 [rows], and float64 [rows, heads]."""

    positions: NDArray[np.int64]
    by_row: NDArray[np.float64]

    @property
    def largest(self) -> float:
        return float(self.by_row.max(initial=0.0))


def least_error(dtype: str, another_kernel: bool = False) -> float:
    """Return the error below which nothing is a difference.

    Args:
        dtype: of the activations.
        another_kernel: whether one of the two is computed by another kernel. In float32 it may multiply in TF32, which has as many
            bits as float16.
    """
    return _LEAST.get("float16" if another_kernel and dtype == "float32" else dtype, _LEAST_BFLOAT16)


def parting(base: Trace, again: Trace, other: Trace, least: float) -> Parting:
    """Find where a request parts from the base's, in traces that have its queries, and K and V as its last query reads them.

    Args:
        base: the base's.
        again: the base's in other batches: the floor.
        other: the same request where it differs.
        least: error below which nothing is a difference.

    Raises:
        ValueError: the traces do not end at the same position and token, or have other layers or shapes.
    """
    floor, errors = _errors(base, again), _errors(base, other)
    for layer in sorted(base.outputs):
        kept = [each for each in _ORDER if (layer, each) in errors and (layer, each) in floor]
        bounds = {each: max(least, _FLOOR_FACTOR * floor[layer, each].largest) for each in kept}
        differing = [each for each in kept if errors[layer, each].largest > bounds[each]]
        if differing:
            place, first = differing[0]
            names = tuple(name for at, name in differing if at == place)
            return _at(place, layer, names, errors[layer, (place, first)], bounds[place, first])
    return Parting("behind attention", max(base.outputs))


def _at(place: Place, layer: int, names: tuple[Name, ...], errors: _Errors, bound: float) -> Parting:
    positions = errors.positions[errors.by_row.max(1) > bound]
    worst = np.unravel_index(errors.by_row.argmax(), errors.by_row.shape)
    return Parting(
        place, layer, names, int(worst[1]), int(positions[0]), len(positions), error=errors.largest, bound=bound
    )


def _errors(base: Trace, other: Trace) -> dict[tuple[int, _Tensor], _Errors]:
    """Compare two traces: by layer, and by what is compared of it."""
    rows = matching_rows(base, other)
    last = max(base.positions, default=-1)
    if not len(rows) or last != max(other.positions, default=-1) or base.positions[rows[-1, 0]] != last:
        raise ValueError("the traces do not end at the same position and token")
    errors: dict[tuple[int, _Tensor], _Errors] = {}
    for (place, name), ours, theirs in zip(_ORDER, _tensors(base), _tensors(other), strict=True):
        # A layer that reads K and V of another one computes none.
        shared = place == "input" and name != "q"
        if set(ours) != set(theirs) or (set(ours) != set(base.outputs) and not shared):
            raise ValueError(f"the traces have {name} of other layers")
        for layer in ours:
            a, b = ours[layer], theirs[layer]
            if place == "cache":  # a pool may have dropped the first keys of one of them
                count = min(len(a), len(b))
                a, b, positions = a[-count:], b[-count:], np.arange(last + 1 - count, last + 1)
            else:
                a, b, positions = a[rows[:, 0]], b[rows[:, 1]], base.positions[rows[:, 0]]
            if a.shape != b.shape:
                raise ValueError(
                    f"{name} of layer {layer} is {list(a.shape)} in one of the traces, {list(b.shape)} in the other"
                )
            errors[layer, (place, name)] = _Errors(positions, _relative(a, b))
    return errors


def _tensors(trace: Trace) -> tuple[dict[int, NDArray[np.float32]], ...]:
    """Return what is compared of a trace, in the order of `_ORDER`."""
    return trace.queries, trace.new_keys, trace.new_values, trace.keys, trace.values, trace.outputs


def _relative(base: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the error of each row in each head, [rows, heads], of tensors [rows, heads, dims]; infinite where not finite."""
    a, b = base.astype(np.float64), other.astype(np.float64)
    size = np.abs(a).sum(2).mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.abs(b - a).sum(2) / np.where(size > 0, size, 1.0)
    return np.where(np.isfinite(errors), errors, np.inf)
