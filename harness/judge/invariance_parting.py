"""Where a set of features parts from its base inside the model: layer, boundary and head, of passes that were asked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, TracedPlace
from assay.harness.evidence.trace import Trace, read_trace
from assay.harness.judge.invariance_outcome import ArmOutcome
from assay.harness.judge.invariance_result import PartingRow
from assay.harness.judge.probe_scores import MEASURES, Bound, Measure, places
from assay.harness.judge.traces import Parting, parting
from assay.harness.text import counted, listed

_NAMES = {"q": "q", "k": "K", "v": "V", "output": "the output"}
_NOT_ASKED = "it was not asked again with a trace"
_DRAFTS = "its passes verify drafts, and attention is not traced there"


def parting_of(
    folder: InvarianceFolder,
    records: Sequence[ArmRecord],
    judged: ArmOutcome,
    base: ArmRecord,
    limits: Mapping[Measure, Bound],
    least: float,
) -> PartingRow:
    """Say where an arm that differs parts from its base inside the model, or why that was not observed."""
    features = tuple(sorted(judged.arm))
    if judged.first is None:
        return PartingRow(features=features, not_observed="no token of a probe differs, only what was written")
    place = TracedPlace(probe=judged.first.probe, index=judged.first.index)
    row = PartingRow(features=features, probe=place.probe, index=place.index)
    try:
        at, own = _observed(folder, records, features, place, base, limits, least)
    except (EvidenceError, ValueError) as error:
        why = error.found.rstrip(".") if isinstance(error, EvidenceError) else str(error)
        return row.model_copy(update={"not_observed": why})
    return row.model_copy(update=vars(at) | {"says": _said(at, own)})


def _observed(
    folder: InvarianceFolder, records: Sequence[ArmRecord], features: Sequence[str], place: TracedPlace, base: ArmRecord,
    limits: Mapping[Measure, Bound], least: float,
) -> tuple[Parting, Trace]:  # fmt: skip
    """Compare the traces of a place, and return the arm's too. Raises ValueError, with why, where there is none to compare."""
    known = [
        record
        for of, why in ((base.features, "trace"), (base.features, "trace again"), (features, "trace"))
        if (record := _record_of(records, of, place, why)) is not None
    ]
    if len(known) < 3:
        raise ValueError(_NOT_ASKED)
    if any(reply.verifications for reply in known[2].replies):
        raise ValueError(_DRAFTS)
    if problem := next((record.problem for record in known if not record.complete), ""):
        raise ValueError(problem)
    if not _differs_again(base, known[2], place, limits):
        raise ValueError("asked again with the trace on, it did not differ there")
    base_trace, again, own = (
        read_trace(folder.server_folder(record.server), record.label, folder.nonce) for record in known
    )
    return parting(base_trace, again, own, least), own


def _record_of(records: Sequence[ArmRecord], features: Sequence[str], place: TracedPlace, why: str) -> ArmRecord | None:
    wanted = set(features)
    return next(
        (each for each in records if each.traced == place and each.why == why and set(each.features) == wanted), None
    )


def _differs_again(base: ArmRecord, record: ArmRecord, place: TracedPlace, limits: Mapping[Measure, Bound]) -> bool:
    """Return True if the pass that was traced differs from the base at the place, as the arm did."""
    return any(
        (at.probe, at.index) == (place.probe, place.index) and at.kl > limits[measure].mean
        for measure in MEASURES
        for at in places(base.replies, record.replies, measure)
    )


def place_of(row: PartingRow) -> str:
    """Name the place in a few words, such as "layer 1, before attention, head 3"; empty where it was not observed."""
    if not row.place:
        return ""
    words = {"input": "before attention", "cache": "KV cache", "attention": "attention"}
    if row.place not in words:
        return f"behind the attention of layer {row.layer}"
    return f"layer {row.layer}, {words[row.place]}, {'KV head' if _of_keys(row.names) else 'head'} {row.head}"


def _of_keys(names: Sequence[str]) -> bool:
    return bool(names) and names[0] in ("k", "v")


def _said(at: Parting, own: Trace) -> str:
    """Say where a request parts from the base's, and what that leaves as the cause."""
    what = listed([_NAMES[name] for name in at.names])
    differ = "differ" if len(at.names) > 1 else "differs"
    head = f"{'KV head' if _of_keys(at.names) else 'head'} {at.head}"
    size = f"a relative error of {at.error:.2g}, most in {head}; up to {at.bound:.2g} is rounding"
    # A layer of another kind, such as a recurrent one, has no attention.
    last = max((layer for layer in own.outputs if layer < at.layer), default=None)
    before = "" if last is None else f", and the output of attention in layer {last} is the same"
    if at.place == "input":
        unless = ": V is the same, so it is their positions, or RoPE" if at.names == ("q", "k") else before
        return f"layer {at.layer}: {what} {differ} as they are computed ({size}){unless}"
    if at.place == "cache":
        many, first = counted(at.positions, "token"), (at.position or 0) + 1
        as_read = f"{what} in the KV cache {differ} in {many}, first in token {first:,} ({size})"
        return f"layer {at.layer}: {as_read}, and what this request computes is the same"
    if at.place == "attention":
        return f"layer {at.layer}: the output of attention differs ({size}), and q, K and V are the same"
    layers = counted(len(own.outputs), "layer")
    return f"behind the last layer's attention: in all {layers} q, K, V and the output are the same"
