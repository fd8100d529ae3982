"""Errors -> the parts of a report that show them: heat maps, and the profile along depth.

A value of a heat map is the worst of the finest cells (head, cached prefix, position, place in the batch) that it covers, never
their average: a bound from noise holds at the worst cell, and an average hides a bug that only few positions have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Literal

import numpy as np

from assay.harness.conditions import CACHED_PREFIX, PHASES, PLACE, POSITION
from assay.harness.evidence.error_table import Floats, relative_l1
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.judge.report import (
    NOT_FINITE,
    DepthRow,
    ErrorGrid,
    LayersResult,
    OwnError,
    TruthRow,
    excess,
    out_of_bounds,
)
from assay.harness.judge.truth_bounds import HEAD, AgainstNoise, MeasuredCells
from assay.harness.statement import Statement, state

# By layer and phase: the relative L1 that rounding explains at the worst cell.
_Bounds = Mapping[tuple[int, str], float]
_Columns = Literal["head", "prefix", "position", "batch"]


# The conditions that heat maps by head or position are drawn for: id, title and cached prefixes. A mask can be misaligned only
# with a prefix.
_SLICES: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("no-cached-prefix", "no cached prefix", CACHED_PREFIX.labels[:1]),
    ("cached-prefix", "cached prefix", CACHED_PREFIX.labels[1:]),
)
# Significant digits of an error in a report: more are noise, and cost bytes in 65,536 cells.
_DIGITS = 4


def _own_errors(shadow: ShadowErrors) -> dict[tuple[str, str], Floats]:
    """Tabulate the errors of the finest observed cells, by phase and cached prefix."""
    finest = {}
    for phase in shadow.cells.observed("phase"):
        for prefix in shadow.cells.observed("prefix"):
            where = {"phase": phase, "prefix": prefix}
            errors = relative_l1(shadow.cells.distance(("layer", "head", "position", "batch"), where))
            if not np.isnan(errors).all():
                finest[phase, prefix] = errors
    return finest


def layers_result(
    shadow: ShadowErrors,
    bounds: _Bounds,
    free: Mapping[int, tuple[float, float]] | None = None,
    *,
    pack: str = "",
    not_observed: Sequence[Statement] = (),
    against_truth: Sequence[TruthRow] = (),
) -> LayersResult:
    """Make the errors a part of a report.

    Args:
        bounds: by layer and phase, the error that rounding explains; a missing layer is unbounded.
        free: by layer, relative L1 of its output in a free-running candidate against the reference's, and the part of it that comes
            from earlier layers.
        against_truth: errors against the truth, which count in the profile along depth instead of those against the reference.
    """
    errors, header = _own_errors(shadow), shadow.headers[0]
    layers = sorted({*map(int, shadow.cells.observed("layer"))})
    depth = tuple(_depth(shadow, errors, bounds, free or {}, against_truth))
    return LayersResult(
        reference=header.reference,
        candidate=header.candidate,
        phases=header.phases,
        layers=len(layers),
        heads=len(shadow.cells.observed("head")),
        # Each process of a tensor-parallel server sees every pass.
        passes=max(header.passes for header in shadow.headers),
        sources=tuple(row.layer for row in depth if row.out_of_bounds),
        grids=tuple(_grids(errors, bounds)),
        depth=depth,
        not_observed=(*_not_observed(shadow, errors, layers), *not_observed),
        pack=pack,
        candidate_errors=tuple(
            state("calls-failed", layer=failed.layer, phase=failed.phase, calls=failed.calls, said=failed.text)
            for failed in shadow.failed_calls
        ),
        against_truth=tuple(against_truth),
    )


def _depth(
    shadow: ShadowErrors,
    errors: Mapping[tuple[str, str], Floats],
    bounds: _Bounds,
    free: Mapping[int, tuple[float, float]],
    against_truth: Sequence[TruthRow],
) -> Iterable[DepthRow]:
    """Yield the error profile: the error of a layer is that of its worst finest cell, in the phase farthest beyond its bound."""
    whole = relative_l1(shadow.cells.distance(("layer",)))
    for layer in map(int, shadow.cells.observed("layer")):
        own: list[tuple[OwnError, float | None]] = []
        for phase in shadow.cells.observed("phase"):
            worst = np.concatenate([by_layer[layer].ravel() for (p, _), by_layer in errors.items() if p == phase])
            own.append((_own_error(float(_worst(worst))), _bound(bounds, layer, phase)))
        here = [row for row in against_truth if row.layer == layer]
        own = [(row.own, row.bound) for row in here] or own
        error, bound = max(own, key=lambda pair: excess(*pair))
        total, inherited = free.get(layer, (math.nan, math.nan))
        yield DepthRow(
            layer=layer,
            own=error,
            whole=_own_error(float(whole[layer])),
            total=_own_error(total),
            inherited=_own_error(inherited),
            bound=bound,
            out_of_bounds=any(row.out_of_bounds for row in here) if here else any(starmap(out_of_bounds, own)),
        )


def bounds_of(against: AgainstNoise) -> dict[tuple[int, str], float]:
    """Compute, by layer and phase, how far the candidate may be from the reference at the worst cell, given noise in both."""
    bounds = {}
    for layer, phase in against.places:
        bound = against.apart.of(layer, phase).bound.max(initial=0.0)
        if np.isfinite(bound) and bound:
            bounds[layer, phase] = float(bound)
    return bounds


def truth_rows(against: AgainstNoise) -> tuple[TruthRow, ...]:
    """Compare candidate and reference with the truth, by phase and layer."""
    rows = []
    for layer, phase in against.places:
        cells, gains, reference, queries = (
            measured.of(layer, phase) for measured in (against.cells, against.gains, against.reference, against.queries)
        )
        whole = gains.index[:, HEAD] < 0
        (own, bound), (served, served_bound) = _worst_of(cells), _worst_of(reference)
        gain, gain_bound = _worst_of(MeasuredCells(gains.index[whole], gains.observed[whole], gains.bound[whole]))
        rows.append(
            TruthRow(
                layer=layer,
                phase=phase,
                cells=len(cells.index),
                own=own,
                bound=bound,
                gain=gain,
                gain_bound=gain_bound,
                reference_own=served,
                reference_bound=served_bound,
                out_of_bounds=bool(cells.flagged.any() or gains.flagged.any() or queries.flagged.any()),
            )
        )
    return tuple(rows)


def _worst_of(measured: MeasuredCells) -> tuple[OwnError, float | None]:
    """Return the number that is nearest to its bound or farthest beyond it, and this bound, as JSON holds them."""
    if not len(measured.index):
        return None, None
    worst = int(np.argmax(measured.excess))
    bound = float(measured.bound[worst])
    return _own_error(float(measured.observed[worst])), float(f"{bound:.{_DIGITS}g}") if math.isfinite(bound) else None


def _own_error(value: float) -> OwnError:
    """Convert an error for JSON, to `_DIGITS` significant digits; NaN is "not observed", infinity "not finite"."""
    if math.isnan(value):
        return None
    return NOT_FINITE if math.isinf(value) else float(f"{value:.{_DIGITS}g}")


def _bound(bounds: _Bounds, layer: int, phase: str) -> float | None:
    return float(f"{bounds[layer, phase]:.{_DIGITS}g}") if (layer, phase) in bounds else None


def _worst(errors: Floats, axis: tuple[int, ...] | None = None) -> Floats:
    """Compute the largest along some axes, or NaN if all are."""
    worst: Floats = np.fmax.reduce(errors, axis=axis)
    return worst


def _grids(errors: dict[tuple[str, str], Floats], bounds: _Bounds) -> Iterable[ErrorGrid]:
    phases = [phase for phase in PHASES if any(p == phase for p, _ in errors)]

    def grid(phase: str, of: tuple[str, str], columns: _Columns, labels: Sequence[str], values: Floats) -> ErrorGrid:
        return ErrorGrid(
            id="-".join(filter(None, (phase, of[0], "by", columns))),
            where=", ".join(filter(None, (phase, of[1]))),
            columns=columns,
            row_labels=tuple(map(str, range(len(values)))),
            column_labels=tuple(labels),
            values=tuple(tuple(map(_own_error, row)) for row in values.tolist()),
            bounds=tuple(_bound(bounds, layer, phase) for layer in range(len(values))),
        )

    everywhere = ("", "")
    # [layers, heads, positions, places] are the axes of an array.
    for phase in phases:
        for of, array in _slices(errors, phase):
            heads = [str(head) for head in range(array.shape[1])]
            yield grid(phase, of, "head", heads, _worst(array, (2, 3)))
    for phase in phases:
        seen = {prefix: array for (p, prefix), array in errors.items() if p == phase}
        unseen = np.full(len(next(iter(seen.values()))), np.nan)
        by_prefix = [_worst(seen[prefix], (1, 2, 3)) if prefix in seen else unseen for prefix in CACHED_PREFIX.labels]
        yield grid(phase, everywhere, "prefix", CACHED_PREFIX.labels, np.stack(by_prefix, axis=1))
        # A decode call has one new token per sequence, so it has one position.
        for of, array in _slices(errors, phase) if phase != "decode" else ():
            yield grid(phase, of, "position", POSITION.labels, _worst(array, (1, 3)))
        yield grid(phase, everywhere, "batch", PLACE, _worst(np.stack([*seen.values()]), (0, 2, 3)))


def _slices(errors: dict[tuple[str, str], Floats], phase: str) -> Iterable[tuple[tuple[str, str], Floats]]:
    for id_, title, prefixes in _SLICES:
        if here := [errors[phase, prefix] for prefix in prefixes if (phase, prefix) in errors]:
            yield (id_, title), _worst(np.stack(here), (0,))


def _not_observed(
    shadow: ShadowErrors, errors: dict[tuple[str, str], Floats], layers: Sequence[int]
) -> Iterable[Statement]:
    header = shadow.headers[0]
    for phase in PHASES:
        seen = {prefix: array for (p, prefix), array in errors.items() if p == phase}
        if phase not in header.phases:
            yield state("phase-not-computed", phase=phase, candidate=header.candidate)
        elif not seen:
            yield state("phase-not-seen", phase=phase)
        else:
            for _, title, prefixes in _SLICES:
                # A decode call always has a prefix.
                if not seen.keys() & set(prefixes) and not (phase == "decode" and "0" in prefixes):
                    yield state("condition-not-seen", phase=phase, condition=title)
            array = _worst(np.stack([*seen.values()]), (0, 2, 3, 4))
            if missing := [layer for layer in layers if np.isnan(array[layer])]:
                yield state("layers-not-seen", phase=phase, layers=missing, of=layers)
    for header in shadow.headers:
        for layer, why in sorted(header.unrecorded.items()):
            yield state("calls-not-recorded", layer=layer, said=why)
