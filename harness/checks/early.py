"""The order of a matrix's calls, and the point at which a kernel is so clearly wrong that the others need not be made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import Case
from assay.harness.localize.kernel_runs import CallResult

_FEWEST, _SHARE = 48, 1 / 7
"""Calls that are made in any case, and their share of all. In the small matrix they have each usual number of heads, head_dim
and layout, and cached prefixes of up to 200 tokens, at a twentieth of the cost of all."""
# Clearly wrong calls among them from which on the others need not be made.
_WRONG = 16
# Own error of a clearly wrong call, as a multiple of its bound.
_CLEARLY = 10.0
# Tokens of a tile, by which a kernel's work on a call is counted.
_TILE = 32
# Keys of a sequence from which on a call is long.
_LONG = 1024
# What any call costs, in tiles.
_OVERHEAD = 8


def in_order(made: Sequence[tuple[Case, AttentionCall]]) -> list[AttentionCall]:
    """Order the calls as they are made: at each place that which shows most new conditions for what it costs.

    A condition is a value of an axis in a phase and dtype, with all, some or none of its sequences cached. Calls that show no new
    one come later, the cheapest of them first; those with more than `_LONG` keys last, in falling order, so that shorter ones
    follow longer ones, of which a kernel may keep partial results.
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
    """Return the calls that are made in any case, with their cases: those of a quick check."""
    case_of = {id(call): case for case, call in made}
    return [(case_of[id(call)], call) for call in in_order(made)[: max(_FEWEST, int(_SHARE * len(made)))]]


_KIND = ("phase", "dtype", "cached prefix")


def _cost(call: AttentionCall) -> float:
    """Count the tiles of a call, with its overhead."""
    tiles = sum(
        -(-new // _TILE) * -(-(new + cached) // _TILE) for new, cached in zip(call.lens_q, call.prefixes, strict=True)
    )
    return float(_OVERHEAD + tiles * call.q.shape[1])


def clearly_wrong(results: Sequence[tuple[Case, CallResult]], runs: int, cases: Sequence[Case]) -> bool:
    """Return True if further calls would not change a kernel's verdict.

    At least `_WRONG` calls are wrong by a wide margin. Where it is wrong is then tried on calls that are made for that.

    Args:
        results: what it computed so far, the last of them new: where that is right, nothing has changed.
        runs: how many calls were made so far, those that it refused included.
        cases: all cases of the matrix.
    """
    if runs < max(_FEWEST, _SHARE * len(cases)) or not results[-1][1].fails:
        return False
    return sum(result.fails and result.worst >= _CLEARLY for _, result in results) >= _WRONG
