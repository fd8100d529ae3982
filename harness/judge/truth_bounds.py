"""Errors against the truth -> those that noise does not explain: the statistics behind the verdict on layers. Pure functions.

Every sampled cell (layer, head, condition) of every claimed phase is tested, and the gain of every head, of every layer, and of
each phase, and the worst query of every cell. Bounds come from honest implementations on the same queries
(`assay.harness.stats.noise_bound`, `assay.harness.stats.query_bounds`). All tests of a session together flag an honest kernel at
most at the rate `FALSE_FLAGS`: half of it for cells, a quarter each for gains and for queries. Queries that were not sampled are
compared with the reference, within the sum of both bounds, and the farthest of each call with the truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.harness.attention.noise import family
from assay.harness.conditions import PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.error_table import DIMENSIONS, ErrorTable, Floats, RoleErrors, elements, gain, relative_l1
from assay.harness.evidence.run_file import REPEAT_RUN
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.stats.noise_bound import (
    FALSE_FLAGS,
    cell_bounds,
    f_quantile_above,
    freedom_of_spread,
    gain_tolerance,
)

# An honest kernel of a finer granularity than its family's may cost this much less than the family's members.
_SLACK_BELOW = 2.0
LAYER, HEAD, PHASE = (DIMENSIONS.index(name) for name in ("layer", "head", "phase"))
_GAIN_LEVELS = ((LAYER, PHASE, HEAD), (LAYER, PHASE), (PHASE,))
_Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class MeasuredCells:
    """Cells, or groups of cells, with an observed number and its bound; arrays of one length.

    Attributes:
        index: int64 [tests, 6], the columns of `DIMENSIONS`; -1 for dimensions that a group covers.
        observed: the number.
        bound: the largest value that rounding explains.
    """

    index: NDArray[np.int64]
    observed: Floats
    bound: Floats

    @property
    def excess(self) -> Floats:
        """Return the observed number as a multiple of its bound, infinite if it is not finite or its bound is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.observed == 0, 0.0, self.observed / self.bound)
        return np.where(np.isnan(ratio), np.inf, ratio)

    @property
    def flagged(self) -> _Flags:
        """Numbers that noise does not explain."""
        return self.excess > 1

    def of(self, layer: int, phase: str) -> MeasuredCells:
        """Select those of a layer and phase."""
        here = (self.index[:, LAYER] == layer) & (self.index[:, PHASE] == PHASES.index(phase))
        return MeasuredCells(self.index[here], self.observed[here], self.bound[here])


_NOTHING = MeasuredCells(np.zeros((0, len(DIMENSIONS)), np.int64), np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class AgainstNoise:
    """The tests of a session.

    Attributes:
        cells: error of the candidate, by cell.
        gains: absolute gain of the candidate, by head, by layer, and by phase.
        queries: error of the worst query of each cell, against honest implementations on that very query; head -1 is all heads
            together. The bound holds for the worst of 10^9 queries (`assay.harness.stats.query_bounds`).
        reference: error of the reference, by cell, against its own family.
        reference_queries: error of the reference's worst queries, likewise.
        apart: difference between candidate and reference over all queries, sampled or not, by cell; the bound is the sum of the
            largest bounds of both in the layer and phase. Omitted where the reference's window is off by a key: it then computes
            something else, and the difference is an error of neither.
        quiet: layers and phases where the candidate's error is smaller than its declared quantisation must cost, with its error
            over all cells and the least cost of the quantisation there.
    """

    cells: MeasuredCells
    gains: MeasuredCells
    queries: MeasuredCells
    reference: MeasuredCells
    reference_queries: MeasuredCells
    apart: MeasuredCells
    quiet: tuple[tuple[int, str, float, float], ...]

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """Layers and phases with a tested cell."""
        places = {(int(layer), PHASES[phase]) for layer, phase in self.cells.index[:, [LAYER, PHASE]]}
        return tuple(sorted(places, key=lambda place: (PHASES.index(place[1]), place[0])))


def compare_with_noise(shadow: ShadowErrors) -> AgainstNoise:
    """Compare the cells of a shadow with the cost of rounding there. Without honest implementations nothing is bounded or tested.

    Raises:
        EvidenceError: the candidate's noise family is unknown.
    """
    table = shadow.cells
    cells, reference = (_cells(table, role) for role in (table.candidate, table.reference))
    header = shadow.headers[0]
    return AgainstNoise(
        cells=cells,
        gains=_gains(table, FALSE_FLAGS / 4, gain_tolerance(header.dtype, header.accumulation)),
        queries=_queries(table, table.candidate),
        reference=reference,
        reference_queries=_queries(table, table.reference),
        apart=_apart(shadow, cells, reference),
        quiet=tuple(_quiet(table)) if _has_least(header.candidate_noise) else (),
    )


def _has_least(noise: str) -> bool:
    try:
        return family(noise).has_least
    except ValueError as error:
        raise EvidenceError(
            f"The shadow's candidate has an unknown noise: {error}.", "a noise family", REPEAT_RUN
        ) from None


def _apart(shadow: ShadowErrors, cells: MeasuredCells, reference: MeasuredCells) -> MeasuredCells:
    """Bound |candidate - reference| <= |candidate - truth| + |reference - truth|, each within its bound."""
    # For example, if 4.2 % of the candidate and 0.01 % of the reference are explained, 4.21 % between them are.
    largest: dict[tuple[int, int], float] = {}
    excused = {(layer, phase) for layer, phase, _ in shadow.known}
    for layer, phase in {(int(a), int(b)) for a, b in cells.index[:, [LAYER, PHASE]]}:
        if (layer, PHASES[phase]) in excused:
            continue
        parts = [measured.of(layer, PHASES[phase]).bound for measured in (cells, reference)]
        largest[layer, phase] = sum(float(part.max(initial=0.0)) for part in parts)
    table = shadow.cells
    places = [(int(a), int(b)) for a, b in table.index[:, [LAYER, PHASE]]]
    observed = relative_l1(table.apart)
    known = np.array([place in largest for place in places], bool) & ~np.isnan(observed)
    bound = np.array([largest[place] for place, is_known in zip(places, known, strict=True) if is_known])
    return MeasuredCells(table.index[known], observed[known], bound)


def _compared(table: ErrorTable) -> ErrorTable | None:
    """Return the cells that were compared with the truth, or None without two honest implementations, which give the bound."""
    there = elements(table.candidate.own) > 0
    return table.chosen(there) if there.any() and table.candidate.honest.shape[1] >= 2 else None


def _cells(table: ErrorTable, role: RoleErrors) -> MeasuredCells:
    """Test each cell's error: the largest that rounding explains is that of honest implementations on the same queries."""
    there = elements(role.own) > 0
    if not there.any() or role.honest.shape[1] < 2:
        return _NOTHING
    some = role.each(lambda values: values[there])
    dropped = np.nan_to_num(relative_l1(some.dropped), posinf=0.0)
    # For example, 16 members that are off by 1.6 % and differ by a tenth of that count as 18 independent roundings; in each
    # of 2,560 cells 4.2 % are then explained.
    bound = cell_bounds(relative_l1(some.honest).T, alpha=FALSE_FLAGS / 2) + dropped
    return MeasuredCells(table.index[there], relative_l1(some.own), bound)


def _queries(table: ErrorTable, role: RoleErrors) -> MeasuredCells:
    """Test each cell's worst query. If the truth is zero, its error and its bound are not relative."""
    # For example, off by 0.003 if the truth sums up to 0.5 is an error of 0.6 %, and the bound is divided likewise.
    there = role.worst.any(1)
    off, bound, size, _, _ = role.worst[there].T
    return MeasuredCells(table.index[there], *(number / np.where(size > 0, size, 1.0) for number in (off, bound)))


def _gains(table: ErrorTable, rate: float, tolerance: float) -> MeasuredCells:
    """Test the candidate's gain at each level, against the root mean square of the members': their bias and their spread."""
    # For example, members that scale by 1e-4 at random explain 1.0e-3 in each of 64 heads. In bfloat16, 4.9e-4 are added, which
    # no averaging removes.
    tests, compared = [_NOTHING], _compared(table)
    for level in _GAIN_LEVELS if compared else ():
        assert compared is not None
        merged = compared.merged(level)
        # If the truth is zero, nothing can be scaled.
        observed = np.nan_to_num(np.abs(gain(merged.candidate.own)), nan=0.0, posinf=np.inf)
        members = np.abs(gain(merged.candidate.honest)).T
        # A gain is one number, so it has one degree of freedom.
        bound = (
            tolerance
            + np.nan_to_num(gain(merged.candidate.dropped), posinf=0.0)
            + cell_bounds(members, freedom=1.0, alpha=rate / len(_GAIN_LEVELS))
        )
        tests.append(MeasuredCells(merged.index, observed, bound))
    parts = zip(*((measured.index, measured.observed, measured.bound) for measured in tests), strict=True)
    return MeasuredCells(*(np.concatenate(part) for part in parts))


def _quiet(table: ErrorTable) -> Iterable[tuple[int, str, float, float]]:
    compared = _compared(table)
    if compared is None:
        return
    merged = compared.merged((LAYER, PHASE))
    noise = relative_l1(merged.candidate.honest).T
    free = freedom_of_spread(noise)
    # For example, below 0.7 % an error is too small if members are off by 1.6 % and agree to a fiftieth of that.
    # The quotient of two mean squares, inverted compared with an error that is too large.
    low = np.sqrt(np.nanmean(noise**2, 0) / f_quantile_above(FALSE_FLAGS / len(free), len(noise) * free, free))
    for where, own, least in zip(merged.index, relative_l1(merged.candidate.own), low / _SLACK_BELOW, strict=True):
        if own < least:
            yield int(where[LAYER]), PHASES[where[PHASE]], float(own), float(least)
