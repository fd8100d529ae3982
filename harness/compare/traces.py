"""Two traces of the same request, from two kernels -> the error of each layer's output, and how much of it is inherited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence import error_sums
from assay.harness.evidence.error_sums import Floats, sums_of
from assay.harness.evidence.trace import Trace


@dataclass(frozen=True)
class FreeRunningError:
    """The error of the candidate's outputs against the reference's when each runs freely, over the rows that both traces have.

    Attributes:
        layers: layers that were compared, in order.
        sums: float64 [layers, heads, 9], the columns of `assay.harness.evidence.error_sums.SUMS`.
    """

    layers: tuple[int, ...]
    sums: Floats

    @property
    def relative_l1(self) -> Floats:
        """Sum |candidate - reference| / sum |reference| of each layer, [layers], as in arXiv 2410.02367, section 4.4.

        0 where nothing differs; infinite where only the reference is zero or nothing of the candidate is finite; NaN where no
        row matched.
        """
        return error_sums.relative_l1(self.sums.sum(1))


def compare(reference: Trace, candidate: Trace) -> FreeRunningError:
    """Compare two traces of the same request.

    Rows match if they have the same position and input token and come before the first position at which the tokens differ: from
    there on, the texts differ.

    Args:
        reference: the reference's trace.
        candidate: the candidate's.

    Raises:
        ValueError: the traces have other layers, heads or head dimensions.
    """
    shapes = [{layer: out.shape[1:] for layer, out in trace.outputs.items()} for trace in (reference, candidate)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the traces {reference.label!r} and {candidate.label!r} are of different models: {shapes}")
    pairs = _matching(reference, candidate)
    ours, theirs = pairs.T
    sums = [
        sums_of(candidate.outputs[layer][theirs], out[ours], (0, 2)) for layer, out in sorted(reference.outputs.items())
    ]
    return FreeRunningError(tuple(sorted(reference.outputs)), np.stack(sums))


def joined(parts: Sequence[FreeRunningError]) -> FreeRunningError:
    """Join several requests into one: sums are added, never ratios.

    Raises:
        ValueError: there is none, or they are of different layers or heads.
    """
    if len({(part.layers, part.sums.shape) for part in parts}) != 1:
        raise ValueError(
            f"{len(parts)} comparisons of different layers or heads cannot be joined; expected at least one"
        )
    return FreeRunningError(parts[0].layers, np.sum([part.sums for part in parts], axis=0))


@dataclass(frozen=True)
class Split:
    """The error of each layer's output when the candidate runs freely, in two parts; relative L1, float64 [layers].

    Attributes:
        layers: the layers, in order.
        total: of the output, against the reference's.
        own: of the candidate's kernel on the reference's inputs.
        inherited: the rest of `total`; 0 where `own` is larger, since errors may cancel. As the total is at most the sum of the
            two parts (triangle inequality), the inputs contributed at least this much.
    """

    layers: tuple[int, ...]
    total: Floats
    own: Floats
    inherited: Floats


def split(layers: Sequence[int], total: Floats, own: Floats) -> Split:
    """Split the error of layers into own and inherited.

    With f the candidate's layer, g the reference's, x' the input when the candidate runs freely and x the reference's:
    f(x') - g(x) = (f(x) - g(x)) + (f(x') - f(x)), which are the own and the inherited error. Both must be of the same requests, or
    the split is an estimate.

    Args:
        layers: numbers of the layers.
        total: relative L1 of each, `FreeRunningError.relative_l1`.
        own: relative L1 by layer number, for example from ``ShadowErrors.table(by=("layer",))``; NaN, or missing at the end, where
            not observed.

    Returns:
        NaN where total or own was not observed; inherited is also NaN where both are infinite.
    """
    mine = np.array([own[layer] if layer < len(own) else np.nan for layer in layers], np.float64)
    with np.errstate(invalid="ignore"):
        rest = np.maximum(total - mine, 0.0)  # propagates NaN
    return Split(tuple(layers), np.asarray(total, np.float64), mine, rest)


def _matching(reference: Trace, candidate: Trace) -> NDArray[np.int64]:
    """Return the rows of the reference and of the candidate that match, [matched, 2]."""
    ours, theirs = _rows(reference), _rows(candidate)
    common = sorted(set(ours) & set(theirs))
    same = [reference.tokens[ours[at]] == candidate.tokens[theirs[at]] for at in common]
    until = same.index(False) if False in same else len(same)
    return np.array([(ours[at], theirs[at]) for at in common[:until]], np.int64).reshape(-1, 2)


def _rows(trace: Trace) -> dict[int, int]:
    """Return the row of each position; the first, where a request that was interrupted computed it again."""
    rows: dict[int, int] = {}
    for row, position in enumerate(trace.positions.tolist()):
        rows.setdefault(position, row)
    return rows
