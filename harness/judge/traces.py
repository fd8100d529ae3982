"""Two traces of the same request, from two kernels -> the error of each layer's output, and how much of it is inherited."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence.error_table import Floats, relative_l1, sums_of
from assay.harness.evidence.trace import Trace


def free_running_errors(pairs: Sequence[tuple[Trace, Trace]], own: Floats) -> dict[int, tuple[float, float]]:
    """Compute the error of each layer's output when the candidate runs freely, and how much of it is inherited.

    With f the candidate's layer, g the reference's, x' the input when the candidate runs freely and x the reference's:
    f(x') - g(x) = (f(x) - g(x)) + (f(x') - f(x)), which are the own and the inherited error. As the total is at most the sum of the
    two (triangle inequality), the inputs contributed at least the total less the own error; 0 where the own is larger, since errors
    may cancel. Both must be of the same requests, or the split is an estimate.

    Args:
        pairs: traces of each request, the reference's and the candidate's. Their sums are added, never ratios.
        own: relative L1 of the candidate's kernel on the reference's inputs by layer number, for example from
            ``ErrorTable.distance(("layer",))``; NaN, or missing at the end, where not observed.

    Returns:
        Layer -> total and inherited error, relative L1 as in arXiv 2410.02367, section 4.4. The total is infinite where only the
        reference is zero or a number of the candidate is not finite, and NaN where no row matched; inherited is also NaN where
        `own` was not observed, or both are infinite.

    Raises:
        ValueError: the traces have other layers, heads or head dimensions.
    """
    total: dict[int, Floats] = {}
    for reference, candidate in pairs:
        for layer, sums in trace_sums(reference, candidate).items():
            total[layer] = total[layer] + sums if layer in total else sums
    errors = {}
    for layer, sums in total.items():
        error = float(relative_l1(sums.sum(0)))
        mine = float(own[layer]) if layer < len(own) else math.nan
        errors[layer] = error, max(error - mine, 0.0)  # NaN where the difference is
    return errors


def trace_sums(reference: Trace, candidate: Trace) -> dict[int, Floats]:
    """Sum the errors of the candidate's outputs over the rows that two traces of one request have in common.

    Rows match if they have the same position and input token and come before the first position at which the tokens differ: from
    there on, the texts differ.

    Returns:
        Layer -> float64 [heads, 5], the columns of `assay.harness.evidence.error_table.DISTANCE`.

    Raises:
        ValueError: the traces have other layers, heads or head dimensions.
    """
    shapes = [{layer: out.shape[1:] for layer, out in trace.outputs.items()} for trace in (reference, candidate)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the traces {reference.label!r} and {candidate.label!r} are of different models: {shapes}")
    ours, theirs = matching_rows(reference, candidate).T
    return {
        layer: sums_of(candidate.outputs[layer][theirs], out[ours], (0, 2))
        for layer, out in sorted(reference.outputs.items())
    }


def matching_rows(reference: Trace, candidate: Trace) -> NDArray[np.int64]:
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
