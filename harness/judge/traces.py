"""Two traces of the same request, from two kernels -> the error of each layer's output, and how much of it is inherited."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from assay.harness.evidence.error_table import Floats, relative_l1, sums_of
from assay.harness.evidence.trace import Trace
from assay.harness.schema import Part
from assay.harness.statement import Statement, state


def free_running_errors(pairs: Sequence[tuple[Trace, Trace]], own: Floats) -> dict[int, tuple[float, float]]:
    """Compute the error of each layer's output when the candidate runs freely, and how much of it is inherited.

    With f the candidate's layer, g the reference's, x' the input when the candidate runs freely and x the reference's:
    f(x') - g(x) = (f(x) - g(x)) + (f(x') - f(x)), which are the own and the inherited error. As the total is at most the sum of the
    two (triangle inequality), the inputs contributed at least the total less the layer's own error, or 0 if that is larger, since
    errors may cancel. Both traces must be of the same requests, or the split is an estimate.

    Args:
        pairs: traces of each request, the reference's and the candidate's. Their sums are added, never ratios.
        own: relative L1 of the candidate's kernel on the reference's inputs by layer number, for example from
            ``ErrorTable.distance(("layer",))``; NaN, or missing at the end, if not observed.

    Returns:
        Layer -> total and inherited error, relative L1 as in arXiv 2410.02367, section 4.4. The total is infinite if only the
        reference is zero or a number of the candidate is not finite, and NaN if no row matched; inherited is also NaN if `own`
        was not observed, or both are infinite.
    """
    total: dict[int, Floats] = {}
    for reference, candidate in pairs:
        for layer, sums in _trace_sums(reference, candidate).items():
            total[layer] = total[layer] + sums if layer in total else sums
    errors = {}
    for layer, sums in total.items():
        error = float(relative_l1(sums.sum(0)))
        mine = float(own[layer]) if layer < len(own) else math.nan
        errors[layer] = error, max(error - mine, 0.0)  # NaN if the difference is
    return errors


def _trace_sums(reference: Trace, candidate: Trace) -> dict[int, Floats]:
    """Sum the errors of the candidate's outputs over the rows that two traces of one request have in common.

    Rows match if they have the same position and input token and come before the first position at which the tokens differ,
    because the texts differ from there on.

    Returns:
        Layer -> float64 [heads, 5], the columns of `assay.harness.evidence.error_table.DISTANCE`.
    """
    shapes = [{layer: out.shape[1:] for layer, out in trace.outputs.items()} for trace in (reference, candidate)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the traces {reference.label!r} and {candidate.label!r} are of different models: {shapes}")
    ours, theirs = _matching_rows(reference, candidate).T
    return {
        layer: sums_of(candidate.outputs[layer][theirs], out[ours], (0, 2))
        for layer, out in sorted(reference.outputs.items())
    }


def _matching_rows(reference: Trace, candidate: Trace) -> NDArray[np.int64]:
    """Return the rows of the reference and of the candidate that match, [matched, 2]."""
    ours, theirs = _rows(reference), _rows(candidate)
    common = sorted(set(ours) & set(theirs))
    same = [reference.tokens[ours[at]] == candidate.tokens[theirs[at]] for at in common]
    until = same.index(False) if False in same else len(same)
    return np.array([(ours[at], theirs[at]) for at in common[:until]], np.int64).reshape(-1, 2)


def _rows(trace: Trace) -> dict[int, int]:
    """Return the row of each position; the first one, if an interrupted request computed it again."""
    rows: dict[int, int] = {}
    for row, position in enumerate(trace.positions.tolist()):
        rows.setdefault(position, row)
    return rows


# Where two passes diverge: before attention, in the K and V of earlier tokens that it reads, in attention itself, in the rest of
# the layer, or after the last layer: after its attention, if the outputs of layers were not compared.
_Place = Literal["input", "cache", "attention", "layer", "behind attention", "behind layers"]
_Name = Literal["q", "k", "v", "output"]
_Tensor = tuple[_Place, _Name]
# Compared tensors of a layer: q, K and V of new tokens as they are computed, K and V of all as they are read, the output of
# attention, and that of the layer.
_ORDER: tuple[_Tensor, ...] = (
    ("input", "q"), ("input", "k"), ("input", "v"), ("cache", "k"), ("cache", "v"), ("attention", "output"), ("layer", "output"),
)  # fmt: skip
# The floor extends to this multiple of the base's largest difference from itself, in other batches, as for the mean of
# an arm.
_FLOOR_FACTOR = 4.0
# Error below which nothing is a difference, by dtype: some 100 units in the last place in float32, where sums in
# another order move a row by less than 1e-6; 5 in float16.
_LEAST: Mapping[str, float] = {"float32": 1e-5, "float16": 5e-3}
_LEAST_BFLOAT16 = 3e-2


class PartingRow(Part):
    """Where in the model a request diverges from the same request to the reference, or to the server without the features."""

    features: tuple[str, ...] = Field((), description="features that were on, or empty for two sides of a run")
    probe: str = Field("", description="traced sequence, or empty if all tokens of the probes agree")
    index: int | None = Field(None, description="index in its sequence, from 0, of the first token that differs")
    place: str = Field(
        "",
        description='"input" of attention, "cache", "attention", the rest of the "layer", "behind attention" or "behind layers" if '
        "none differs, without or with the outputs of layers, or empty if it was not observed",
    )
    layer: int | None = Field(None, description="the first layer that differs; the last of the model if none does")
    names: tuple[str, ...] = Field((), description='the tensors that differ there: "q", "k", "v" or "output"')
    head: int | None = Field(None, description="head that differs most: a q head, or a kv head for K and V")
    position: int | None = Field(None, description="position, from 0, of the first query or key that differs")
    positions: int = Field(0, description="queries or keys that differ")
    error: float | None = Field(None, description="largest error of a row, relative to the mean size of a row")
    bound: float | None = Field(None, description="the largest error of the base against itself in other batches")
    before: int | None = Field(None, description="the last earlier layer whose attention output was compared")
    layers: int = Field(0, description="layers whose attention output was compared")
    not_observed: Statement | None = Field(None, description="why it was not observed, or null if it was")

    @property
    def inside(self) -> Statement:
        """The observation inside the model, as numbers."""
        without = {"features", "probe", "index", "not_observed"}
        return self.not_observed or state("inside-the-model", **self.model_dump(exclude=without))

    @property
    def nowhere(self) -> bool:
        """True if all layers were compared and none differs."""
        return self.place in ("behind attention", "behind layers")

    @property
    def where(self) -> str:
        """The place in a few words, such as "layer 1, before attention, head 3", or "" if it was not observed."""
        if not self.place:
            return ""
        words = {"input": "before attention", "cache": "KV cache", "attention": "attention"}
        if self.place == "layer":
            return f"layer {self.layer}, after attention"
        if self.place not in words:
            return f"after {'the attention of ' if self.place == 'behind attention' else ''}layer {self.layer}"
        return f"layer {self.layer}, {words[self.place]}, {'KV head' if self.names[0] in 'kv' else 'head'} {self.head}"


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
        another_kernel: whether another kernel computed one of the two. In float32 it may multiply in TF32, which has as many
            bits as float16.
    """
    return _LEAST.get("float16" if another_kernel and dtype == "float32" else dtype, _LEAST_BFLOAT16)


def parting(base: Trace, again: Trace, other: Trace, least: float) -> PartingRow:
    """Find where a request diverges from the base's, in traces that have its queries, and K and V as its last query reads them.

    Args:
        again: the base, repeated in another batch.
        other: the request that may part from it.
        least: the error below which nothing is a difference.

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
            at = _at(place, names, errors[layer, (place, first)], bounds[place, first])
            break
    else:
        layer = max(base.outputs)
        whole = (layer, ("layer", "output")) in errors
        at = PartingRow(place="behind layers" if whole else "behind attention", error=0.0, bound=0.0)
    # A layer of another kind, such as a recurrent layer, has no attention.
    before = max((each for each in other.outputs if each < layer), default=None)
    return at.model_copy(update={"layer": layer, "before": before, "layers": len(other.outputs)})


def _at(place: _Place, names: tuple[_Name, ...], errors: _Errors, bound: float) -> PartingRow:
    positions = errors.positions[errors.by_row.max(1) > bound]
    worst = np.unravel_index(errors.by_row.argmax(), errors.by_row.shape)
    return PartingRow(
        place=place, names=names, head=None if place == "layer" else int(worst[1]), position=int(positions[0]),
        positions=len(positions), error=errors.largest, bound=bound,
    )  # fmt: skip


def _errors(base: Trace, other: Trace) -> dict[tuple[int, _Tensor], _Errors]:
    """Compare two traces, by layer and tensor."""
    rows = _matching_rows(base, other)
    last = max(base.positions, default=-1)
    if not len(rows) or last != max(other.positions, default=-1) or base.positions[rows[-1, 0]] != last:
        raise ValueError("the traces do not end at the same position and token")
    errors: dict[tuple[int, _Tensor], _Errors] = {}
    for (place, name), ours, theirs in zip(_ORDER, _tensors(base), _tensors(other), strict=True):
        # A layer that reads K and V of another layer computes none.
        shared = place == "input" and name != "q"
        if place != "layer" and (set(ours) != set(theirs) or (set(ours) != set(base.outputs) and not shared)):
            raise ValueError(f"the traces have {name} of other layers")
        for layer in set(ours) & set(theirs):
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
    """Return the compared tensors of a trace, in the order of `_ORDER`."""
    read = (trace.queries, trace.new_keys, trace.new_values, trace.keys, trace.values)
    return *read, trace.outputs, trace.layer_outputs


def _relative(base: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """Compute the error of each row in each head, [rows, heads], of [rows, heads, dims]; infinite if not finite."""
    a, b = base.astype(np.float64), other.astype(np.float64)
    size = np.abs(a).sum(2).mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.abs(b - a).sum(2) / np.where(size > 0, size, 1.0)
    return np.where(np.isfinite(errors), errors, np.inf)
