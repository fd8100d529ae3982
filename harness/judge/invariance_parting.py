"""Where a set of features diverges from its base inside the model: layer, boundary and head, from passes that were asked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, TracedPlace
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.invariance_outcome import ArmOutcome
from assay.harness.judge.invariance_result import PartingRow
from assay.harness.judge.probe_scores import MEASURES, Bound, Measure, places
from assay.harness.judge.traces import parting
from assay.harness.statement import state


def parting_of(
    folder: InvarianceFolder,
    records: Sequence[ArmRecord],
    judged: ArmOutcome,
    base: ArmRecord,
    limits: Mapping[Measure, Bound],
    least: float,
) -> PartingRow:
    """Find where a differing arm diverges from its base inside the model, or why that was not observed."""
    features = tuple(sorted(judged.arm))
    if judged.first is None:
        return PartingRow(features=features, **_unobserved("texts"))
    place = TracedPlace(probe=judged.first.probe, index=judged.first.index)
    row = PartingRow(features=features, probe=place.probe, index=place.index)
    try:
        return row.model_copy(update=_observed(folder, records, features, place, base, limits, least))
    except (EvidenceError, ValueError) as error:
        said = error.found.rstrip(".") if isinstance(error, EvidenceError) else str(error)
        return row.model_copy(update=_unobserved("said", said))


def _unobserved(why: Literal["texts", "not asked", "drafts", "same", "said"], said: str = "") -> dict[str, Any]:
    return {"not_observed": state("inside-not-observed", why=why, said=said)}


def _observed(
    folder: InvarianceFolder, records: Sequence[ArmRecord], features: Sequence[str], place: TracedPlace, base: ArmRecord,
    limits: Mapping[Measure, Bound], least: float,
) -> dict[str, Any]:  # fmt: skip
    """Compare the traces of a place; return the fields of its row."""
    known = [
        record
        for of, why in ((base.features, "trace"), (base.features, "trace again"), (features, "trace"))
        if (record := _record_of(records, of, place, why)) is not None
    ]
    if len(known) < 3:
        return _unobserved("not asked")
    if any(reply.verifications for reply in known[2].replies):
        return _unobserved("drafts")
    if problem := next((record.problem for record in known if not record.complete), ""):
        return _unobserved("said", problem)
    if not _differs_again(base, known[2], place, limits):
        return _unobserved("same")
    base_trace, again, own = (
        read_trace(folder.server_folder(record.server), record.label, folder.nonce) for record in known
    )
    at = parting(base_trace, again, own, least)
    # A layer of another kind, such as a recurrent one, has no attention.
    before = max((layer for layer in own.outputs if layer < at.layer), default=None)
    return vars(at) | {"before": before, "layers": len(own.outputs)}


def _record_of(records: Sequence[ArmRecord], features: Sequence[str], place: TracedPlace, why: str) -> ArmRecord | None:
    wanted = set(features)
    return next(
        (each for each in records if each.traced == place and each.why == why and set(each.features) == wanted), None
    )


def _differs_again(base: ArmRecord, record: ArmRecord, place: TracedPlace, limits: Mapping[Measure, Bound]) -> bool:
    """Return True if the traced pass differs from the base at the place, as the arm did."""
    return any(
        (at.probe, at.index) == (place.probe, place.index) and at.kl > limits[measure].mean
        for measure in MEASURES
        for at in places(base.replies, record.replies, measure)
    )


def place_of(row: PartingRow) -> str:
    """Name the place in a few words, such as "layer 1, before attention, head 3", or return an empty string."""
    if not row.place:
        return ""
    words = {"input": "before attention", "cache": "KV cache", "attention": "attention"}
    if row.place not in words:
        return f"after the attention of layer {row.layer}"
    return f"layer {row.layer}, {words[row.place]}, {'KV head' if row.names[0] in 'kv' else 'head'} {row.head}"
