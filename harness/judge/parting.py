"""Where in the model two servers, or a set of features and its base, diverge: layer, boundary and head, from traced requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from assay.harness.errors import EvidenceError
from assay.harness.evidence.probes import ProbePass, TracedPlace
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.probe_scores import MEASURES, Bound, Measure, places
from assay.harness.judge.traces import PartingRow, parting
from assay.harness.statement import state

Traced = tuple[ProbePass, Path]
"""A pass that was asked again with a trace, and the folder of its server."""


def parting_of(
    place: TracedPlace | None, traced: Sequence[Traced], base: ProbePass, limits: Mapping[Measure, Bound], least: float, nonce: str,
    *, features: Sequence[str] = (), differs: bool = True,
) -> PartingRow:  # fmt: skip
    """Find where a request diverges from the base's inside the model, or why that was not observed.

    Args:
        place: the token that differs, or None if none does.
        traced: the place asked again with a trace: of the base, of the base in another batch, and of the pass that differs; fewer
            if it was not asked.
        base: the pass without a trace.
        limits: bounds of the distances.
        least: see `assay.harness.judge.traces.least_error`.
        nonce: the run's nonce.
        features: those of the pass that differs.
        differs: whether the pass differs at the place; its repetition must then differ too.
    """
    asked: dict[str, Any] = {"features": tuple(features)}
    if place is None:
        return PartingRow(**asked, **_unobserved("texts"))
    asked |= {"probe": place.probe, "index": place.index}
    if len(traced) < 3:
        return PartingRow(**asked, **_unobserved("not asked"))
    other = traced[2][0]
    if any(reply.verifications for reply in other.replies):
        return PartingRow(**asked, **_unobserved("drafts"))
    if problem := next((record.problem for record, _ in traced if not record.complete), ""):
        return PartingRow(**asked, **_unobserved("said", problem))
    if differs and not _differs_at(base, other, place, {measure: bound.mean for measure, bound in limits.items()}):
        return PartingRow(**asked, **_unobserved("same"))
    try:
        first, again, own = (read_trace(folder, record.label, nonce) for record, folder in traced)
        # A base that differs from itself in another batch is not a floor: then nothing but `least` is rounding.
        worst = {measure: bound.worst for measure, bound in limits.items()}
        floor = first if _differs_at(base, traced[1][0], place, worst) else again
        return parting(first, floor, own, least).model_copy(update=asked)
    except (EvidenceError, ValueError) as error:
        said = error.found.rstrip(".") if isinstance(error, EvidenceError) else str(error)
        return PartingRow(**asked, **_unobserved("said", said))


def traced_passes(
    records: Sequence[ProbePass], place: TracedPlace | None, of: Sequence[tuple[Sequence[str], str]]
) -> list[ProbePass]:
    """Return the passes that were asked again for a place, each by its features and why; one that was not asked is missing."""
    return [
        record
        for features, why in of
        for record in [
            next(
                (
                    each
                    for each in records
                    if each.traced == place and each.why == why and set(each.features) == set(features)
                ),
                None,
            )
        ]
        if record is not None
    ]


def _differs_at(base: ProbePass, record: ProbePass, place: TracedPlace, limits: Mapping[Measure, float]) -> bool:
    """Return True if a traced pass differs from the base at the place by more than so many nats."""
    return any(
        (at.probe, at.index) == (place.probe, place.index) and at.kl > limits[measure]
        for measure in MEASURES
        for at in places(base.replies, record.replies, measure)
    )


def _unobserved(why: Literal["texts", "not asked", "drafts", "same", "said"], said: str = "") -> dict[str, Any]:
    """Return the fields of a row that was not observed, with the reason."""
    return {"not_observed": state("inside-not-observed", why=why, said=said)}
