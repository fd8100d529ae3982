"""Orders a matrix's calls, and decides when a kernel is so clearly wrong that the remaining calls are not needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import Case
from assay.harness.localize.kernel_runs import CallResult

_FEWEST, _SHARE = 48, 1 / 7
"""The calls that are always made: their number, and share of all. In the small matrix they have each usual number of heads,
head_dim and layout, and cached prefixes of up to 200 tokens, at a twentieth of the total cost."""
# With this many clearly wrong calls among them, the other calls are not needed.
_WRONG = 16
# The own error of a clearly wrong call, or that of a log-sum-exp, is at least this multiple of its bound.
_CLEARLY = 10.0
# Tokens of a tile, the unit of a kernel's work on a call.
_TILE = 32
# A call is long if a sequence has more keys than this.
_LONG = 1024
# The overhead of a call, in tiles.
_OVERHEAD = 8


def in_order(made: Sequence[tuple[Case, AttentionCall]]) -> list[AttentionCall]:
    """Order the calls: next comes the call that shows the most new conditions for its cost.

    A condition is a value of an axis in a phase and dtype, with all, some or none of its sequences cached. Calls without a new
    condition come later, cheapest first. Calls with more than `_LONG` keys come last, in descending order, so that shorter ones
    follow longer ones, whose partial results a kernel may have kept.
    """
    numbers: dict[tuple[str, ...], int] = {}
    rows = []
    for case, _ in made:
        kind = tuple(case.condition.get(axis, "") for axis in _KIND)
        rows.append([numbers.setdefault((*kind, *pair), len(numbers)) for pair in case.condition.items()])
    shows = np.zeros((len(made), len(numbers)), dtype=bool)
    for place, row in enumerate(rows):
        shows[place, row] = True
    cost = np.array([_cost(call) for _, call in made])
    longest = np.array([max(call.lens_k) for _, call in made])
    left, order = longest <= _LONG, []
    new = shows[left].any(0)
    while new.any():
        best = int(np.where(left, shows[:, new].sum(1) / cost, -1.0).argmax())
        order.append(best)
        left[best] = False
        new &= ~shows[best]
    order += sorted(left.nonzero()[0].tolist(), key=lambda place: float(cost[place]))
    order += sorted((longest > _LONG).nonzero()[0].tolist(), key=lambda place: -int(longest[place]))
    return [made[place][1] for place in order]


def first_ones(made: Sequence[tuple[Case, AttentionCall]]) -> list[tuple[Case, AttentionCall]]:
    """Return the calls that are always made, with their cases: those of a quick check."""
    case_of = {id(call): case for case, call in made}
    return [(case_of[id(call)], call) for call in in_order(made)[: max(_FEWEST, int(_SHARE * len(made)))]]


_KIND = ("phase", "dtype", "cached prefix")


def _cost(call: AttentionCall) -> float:
    """Count the tiles of a call, with its overhead."""
    tiles = sum(
        -(-new // _TILE) * -(-(new + cached) // _TILE) for new, cached in zip(call.lens_q, call.prefixes, strict=True)
    )
    return float(_OVERHEAD + tiles * call.q.shape[1])


def clearly_wrong(results: Sequence[CallResult], runs: int, cases: int) -> bool:
    """Return True if further calls would not change a kernel's verdict.

    That is so if at least `_WRONG` calls are clearly wrong. Experiments then find the conditions on their own calls.

    Args:
        results: its results so far. Only the last is new: if it is not clearly wrong, nothing has changed.
        runs: the number of calls so far, including refused ones.
        cases: the number of cases of the matrix.
    """
    if runs < max(_FEWEST, _SHARE * cases) or not _clearly(results[-1]):
        return False
    return sum(_clearly(result) for result in results) >= _WRONG


def _clearly(result: CallResult) -> bool:
    """Return True if the output of a call, or a log-sum-exp, is out of bounds by a wide margin."""
    if result.fails and result.worst >= _CLEARLY:
        return True
    return result.lse_errors is not None and result.lse_errors.excess >= _CLEARLY
