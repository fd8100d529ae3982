"""Where in the model two servers, or a set of features and its base, diverge: layer, boundary and head, from traced requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, TracedPlace
from assay.harness.evidence.trace import read_trace
from assay.harness.evidence.traced_sequence import AGAIN, FIRST, TRACED_SEQUENCE
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.invariance_outcome import ArmOutcome
from assay.harness.judge.probe_scores import MEASURES, Bound, Measure, places
from assay.harness.judge.traces import PartingRow, least_error, part
from assay.harness.sides import ROLES
from assay.harness.statement import state


def claim(run: RunEvidence) -> Judged:
    """Say where the candidate's own server first parts from the reference's, where both were traced."""
    traced = {role: run.folder.read(TRACED_SEQUENCE, role) for role in ROLES}
    reference, candidate = traced["reference"], traced["candidate"]
    if reference is None or candidate is None:
        return Judged()
    row = PartingRow(probe=reference.item)
    dtypes = {str(server.arguments.get("dtype", "")) for server in run.servers.values()}
    coarsest = dtypes.pop() if len(dtypes) == 1 else ""  # of two dtypes, the sides may differ by the coarser
    try:
        ours, nonce = run.folder.server_folder("reference"), run.folder.nonce
        base, again = (read_trace(ours, label, nonce) for label in (FIRST, AGAIN))
        other = read_trace(run.folder.server_folder("candidate"), FIRST, nonce)
        least = least_error(coarsest, "backend" in run.spec.treatment)
        row = row.model_copy(update=part(base, again, other, least))
    except (EvidenceError, ValueError) as error:
        row = row.model_copy(update=_failed(error))
    return Judged(parts={"parting": row})


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
        return row.model_copy(update=_failed(error))


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
    return part(base_trace, again, own, least)


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


def _failed(error: EvidenceError | ValueError) -> dict[str, Any]:
    return _unobserved("said", error.found.rstrip(".") if isinstance(error, EvidenceError) else str(error))


def _unobserved(why: Literal["texts", "not asked", "drafts", "same", "said"], said: str = "") -> dict[str, Any]:
    """Return the fields of a row that was not observed, with the reason."""
    return {"not_observed": state("inside-not-observed", why=why, said=said)}
