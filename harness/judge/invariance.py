"""Judging the arms of ``assay invariance``: which features change what they must not change, and what was not shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from assay.harness.engines.sglang.features import Feature, features_of
from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, InvarianceManifest
from assay.harness.fingerprint.differences import FingerprintDiff, compare_fingerprints
from assay.harness.judge.invariance_arms import BASE, Arm, base_of, closed, left_out
from assay.harness.judge.invariance_outcome import (
    ArmOutcome,
    State,
    bounds,
    drafted_by,
    floor_of,
    outcome_of,
    rounds_by_shape,
    smallest,
    widened,
)
from assay.harness.judge.invariance_parting import parting_of, place_of
from assay.harness.judge.invariance_result import ArmRow, FeatureRow, InvarianceResult, PairCell, PartingRow
from assay.harness.judge.probe_scores import (
    MEASURES,
    Bound,
    Distance,
    Measure,
    ProbePlace,
    accept_length,
    changed_probes,
    in_common,
    places,
)
from assay.harness.judge.traces import least_error
from assay.harness.text import counted, listed
from assay.harness.verdict import WORST_FIRST, Check, Finding, Requirement, Verdict

FINDING = "feature-changes-output"
"""Id of the finding that features change what they must not change."""
_VERDICTS: Mapping[State, Verdict] = {
    "same": "pass",
    "differs": "regression",
    "not shown": "inconclusive",
    "not run": "inconclusive",
}
_ENDED = Requirement("invariance-ended", "every arm was recorded, up to the last")
_ANSWERED = Requirement("probes-answered", "the base answered every probe to its end")
_AGREES = Requirement("base-agrees", "the base agrees with itself in other batches")
_SENSITIVE = Requirement("probes-sensitive", "the probes see a fault that was seeded in the running server")
_SHOWN = Requirement("features-on", "every feature was shown to be on in some arm")
_DECIDED = Requirement("arms-decided", "every arm decided")
_COVERED = Requirement("pairs-covered", "every two features were on together")
_DISAGREES = "the same tokens are scored differently without any feature: see which probes, alone and in batches"
_DECODES_OTHERWISE = (
    "decode is not what prefill computes of the same tokens: assay backends --honours compares both with the truth"
)


def judge_invariance(folder: InvarianceFolder) -> InvarianceResult:
    """Judge what a folder holds.

    Raises:
        EvidenceError: a file is damaged or of another run, or is not as it was when everything had been run, or the base is not
            complete.
    """
    folder.check_sealed()
    manifest, records = folder.manifest(), list(folder.arms())
    base = next((record for record in records if record.why == "base" and record.complete), None)
    again = [record for record in records if record.why in ("base again", "base longer") and record.complete]
    if base is None or len(again) != 1 + rounds_by_shape(manifest.dtype):
        raise EvidenceError(
            f"{folder.path} has no base that was run twice.", "a folder that assay invariance completed", "run it again"
        )
    known = _known(folder, manifest, records)
    limits = bounds(base, again, manifest.dtype)
    arms = [record for record in records if record.features and record.why != "sensitivity" and record.traced is None]
    outcomes = _outcomes(base, arms, limits, known, manifest)
    same, unlike = _same_servers(folder, arms, base, known)
    shown = [
        _served_alike(judged, unlike.get(record.number, "")) for record, judged in zip(arms, outcomes, strict=True)
    ]
    floor = floor_of(base, again)
    planned = [frozenset(arm) for arm in manifest.arms]
    done = [judged.arm for judged in shown if judged.state in ("same", "differs")]
    lost = left_out(planned, done, known)
    checks = (
        _ended(folder, records),
        _answered(manifest, base),
        _agrees(base, again, limits, manifest),
        _sensitive(base, records, limits),
        _shown(known, arms, manifest),
        same,
        _decided(outcomes, manifest),
        _covered(lost, manifest),
    )
    partings = _partings(folder, records, shown, limits, known)
    records_of = {frozenset(record.features): record for record in reversed(arms)} | {BASE: base}
    records_of |= {
        judged.arm: record for record, judged in [*zip(arms, shown, strict=True)][::-1] if judged.state == "differs"
    }
    changed = {arm: _changed(arm, records_of, limits, known, manifest) for arm in partings}
    findings = _findings(manifest, shown, known, partings, changed)
    verdict = _verdict(checks, shown)
    return InvarianceResult(
        verdict=verdict,
        headline=_headline(findings, checks, shown, lost, manifest),
        reasons=tuple(_reasons(findings, checks)),
        created=manifest.created,
        command=manifest.command,
        backend=manifest.backend,
        model=manifest.spec["reference"]["model"],
        device=manifest.spec["device"],
        dtype=manifest.dtype,
        hardware=manifest.hardware,
        git=manifest.git,
        packages=manifest.packages,
        mode=manifest.mode,
        minutes=manifest.minutes,
        seconds=sum(record.seconds + record.startup_s for record in records),
        servers=len({record.server for record in records}),
        probes=len(manifest.lengths),
        floor_kl=max(distance.mean for distance in floor.values()),
        bound_kl=max(bound.mean for bound in limits.values()),
        arms=tuple(_rows(base, again, limits, arms, shown)),
        features=tuple(_features(manifest, arms)),
        pairs=tuple(_pairs(known, shown)),
        partings=tuple(partings.values()),
        left_out=tuple(lost),
        checks=checks,
        findings=tuple(findings),
    )


def _known(folder: InvarianceFolder, manifest: InvarianceManifest, records: Sequence[ArmRecord]) -> dict[str, Feature]:
    """Return the features that arms switch, by id. Raises EvidenceError where an arm has another one."""
    every = features_of(manifest.spec["device"])
    switched = {id_ for record in records if record.why != "sensitivity" for id_ in record.features}
    if unknown := [id_ for id_ in manifest.features if id_ not in every] or sorted(switched - set(manifest.features)):
        raise EvidenceError(
            f"{folder.path} has an arm with {unknown[0]}, which is no feature of it.",
            f"some of {', '.join(every)}",
            "judge it with the version of assay that wrote it, or run it again",
        )
    return {id_: every[id_] for id_ in manifest.features}


def _outcomes(
    base: ArmRecord,
    arms: Sequence[ArmRecord],
    limits: Mapping[Measure, Bound],
    known: Mapping[str, Feature],
    manifest: InvarianceManifest,
) -> list[ArmOutcome]:
    flags = tuple(manifest.spec["reference"]["flags"])
    records = {frozenset(record.features): record for record in reversed(arms)} | {BASE: base}
    judged: list[ArmOutcome] = []
    for record in arms:
        arm = frozenset(record.features)
        own = base_of(arm, known)
        against = records.get(own)
        if against is None or not against.complete:
            judged.append(ArmOutcome(arm, "not run", {}, why=f"its base, {_name_of(own)}, was not run"))
        else:
            drafted = drafted_by(arm, records, known, flags)
            judged.append(outcome_of(against, record, limits, known, manifest.dtype, drafted))
    return judged


def _same_servers(
    folder: InvarianceFolder, arms: Sequence[ArmRecord], base: ArmRecord, known: Mapping[str, Feature]
) -> tuple[Check, dict[int, str]]:
    records = {frozenset(record.features): record for record in reversed(arms)} | {BASE: base}
    complete = [record for record in arms if record.complete]
    bases = [records.get(base_of(frozenset(record.features), known)) for record in complete]
    pairs = [(record, own) for record, own in zip(complete, bases, strict=True) if own is not None and own.complete]
    return other_than_features(folder, pairs, known)


def _served_alike(judged: ArmOutcome, unlike: str) -> ArmOutcome:
    """Return what an arm shows beside what else its server served: what is the same then shows nothing."""
    if not unlike or judged.state == "not run":
        return judged
    why = "; ".join(filter(None, [judged.why, unlike]))
    return replace(judged, state="not shown" if judged.state == "same" else judged.state, why=why)


def _name_of(arm: Iterable[str]) -> str:
    """Name an arm, such as "prefix-cache + page-size"."""
    return " + ".join(sorted(arm)) or "no feature"


def _ended(folder: InvarianceFolder, records: Sequence[ArmRecord]) -> Check:
    if not folder.complete:
        return _ENDED.check("missing", f"it ended early, after {counted(len(records), 'arm')}", "run it again")
    return _ENDED.check("ok", counted(len(records), "arm"))


def _answered(manifest: InvarianceManifest, base: ArmRecord) -> Check:
    """Demand all that was asked for of the base: an arm that stops where the base stopped is the same, and shows little."""
    written = {reply.probe: len(reply.decode.tokens) for reply in base.replies}
    asked = {probe: depth for probe, (_, _, depth) in manifest.lengths.items()}
    short = [probe for probe in {**asked, **written} if asked.get(probe) != written.get(probe)]
    if not short:
        return _ANSWERED.check("ok", f"{counted(len(asked), 'probe')}, {sum(asked.values()):,} tokens")
    said = f"{len(short)} were not, the first, {short[0]}, with {written.get(short[0], 0)} of {asked.get(short[0], 0)} tokens"
    return _ANSWERED.check("missing", said, "see why in the log of its server")


def _agrees(
    base: ArmRecord, again: Sequence[ArmRecord], limits: Mapping[Measure, Bound], manifest: InvarianceManifest
) -> Check:
    floor = floor_of(base, again)
    said = "; ".join(f"{measure}: mean KL {distance.mean:.2g} nats" for measure, distance in floor.items())
    apart = next((record for record in again if not _holds(floor_of(base, [record]), limits)), None)
    if apart is None:
        return _AGREES.check("ok", said)
    worst = max(floor_of(base, [apart]).values(), key=lambda distance: distance.worst)
    changed = in_common(changed_probes(base.replies, apart.replies, limits), manifest)
    at = f"at worst {worst.worst:.2g} at {_place(worst.at, manifest)}" if worst.at else ""
    do = _DECODES_OTHERWISE if apart.why == "base longer" else _DISAGREES
    return _AGREES.check("missing", "; ".join(filter(None, [said, at, changed])), do)


def _holds(distances: Mapping[Measure, Distance], limits: Mapping[Measure, Bound]) -> bool:
    return all(limits[measure].holds(distance) for measure, distance in distances.items())


def _sensitive(base: ArmRecord, records: Sequence[ArmRecord], limits: Mapping[Measure, Bound]) -> Check:
    record = next((record for record in records if record.why == "sensitivity"), None)
    if record is None:
        return _SENSITIVE.check("missing", "no fault was seeded", "run it again")
    if not record.complete:
        return _SENSITIVE.check("missing", record.problem or "the probes were not answered", "run it again")
    distances = {measure: Distance.of(places(base.replies, record.replies, measure)) for measure in MEASURES}
    said = "; ".join(f"{measure}: mean KL {distance.mean:.2g} nats" for measure, distance in distances.items())
    seen = all(not limits[measure].holds(distance) for measure, distance in distances.items())
    return _SENSITIVE.met(seen, said, "use real weights (without --load-format=dummy)")


def _shown(known: Mapping[str, Feature], arms: Sequence[ArmRecord], manifest: InvarianceManifest) -> Check:
    shown = {id_ for record in arms if record.complete for id_ in record.seen}
    if missing := [id_ for id_ in known if id_ not in shown]:
        whys = {id_: record.unseen.get(id_) or record.problem for record in arms for id_ in record.features}
        said = "; ".join(f"{id_}: {whys.get(id_) or 'in no arm'}" for id_ in missing)
        spent = manifest.minutes and not whys.keys() & set(missing)
        do = "give it more --minutes" if spent else "see why the server switched them off"
        return _SHOWN.check("missing", said, f"{do}, or leave them out with --features")
    return _SHOWN.check("ok", f"{counted(len(shown), 'feature')}: {', '.join(known)}")


def _decided(outcomes: Sequence[ArmOutcome], manifest: InvarianceManifest) -> Check:
    """Demand every planned arm; those that a budget leaves out of a covering array only leave pairs out."""
    ran = {judged.arm for judged in outcomes}
    unrun = [arm for arm in map(frozenset, manifest.arms) if arm not in ran]
    if unrun and not (outcomes and manifest.mode == "pairs" and manifest.minutes):
        said = f"{counted(len(unrun), 'planned arm')} without a record: {'; '.join(map(_name_of, unrun[:6]))}"
        return _DECIDED.check("missing", said, "give it more --minutes" if manifest.minutes else "run it again")
    open_ = [judged for judged in outcomes if _VERDICTS[judged.state] == "inconclusive"]
    if open_:
        said = "; ".join(f"{_name_of(judged.arm)}: {judged.why}" for judged in open_)
        return _DECIDED.check(
            "missing", said, "read the logs of their servers, or leave the features out with --features"
        )
    return _DECIDED.check("ok" if outcomes else "missing", counted(len(outcomes), "arm"), "give it more --minutes")


def _covered(lost: Sequence[tuple[str, str]], manifest: InvarianceManifest) -> Check:
    if manifest.mode != "pairs":
        return _COVERED.check(
            "not checked", f"features were not switched in pairs, but as --{manifest.mode}", "leave it out"
        )
    if lost:
        said = f"{counted(len(lost), 'pair')} left out: {listed([_name_of(pair) for pair in lost[:6]])}"
        return _COVERED.check("not checked", said, "give it more --minutes")
    return _COVERED.check("ok", "all that can be on together")


def _verdict(checks: Sequence[Check], outcomes: Sequence[ArmOutcome]) -> Verdict:
    states = {_VERDICTS[judged.state] for judged in outcomes}
    if "regression" in states:
        return "regression"
    unmet = any(check.status == "missing" for check in checks) or not outcomes
    return "inconclusive" if unmet or "inconclusive" in states else "pass"


def _partings(
    folder: InvarianceFolder, records: Sequence[ArmRecord], outcomes: Sequence[ArmOutcome], limits: Mapping[Measure, Bound],
    known: Mapping[str, Feature],
) -> dict[Arm, PartingRow]:  # fmt: skip
    """Say where in the model each smallest set of features that breaks parts from its base."""
    failing = _failing(outcomes)
    asked = {frozenset(record.features): record for record in reversed(records) if record.traced is None}
    asked[BASE] = next(record for record in records if record.why == "base")
    dtype = folder.manifest().dtype
    least = {arm: least_error(dtype, any(known[id_].cost == "another kernel" for id_ in arm)) for arm in failing}
    return {
        arm: parting_of(folder, records, failing[arm], asked[base_of(arm, known)], limits, least[arm])
        for arm in smallest(failing)
    }


def _changed(
    arm: Arm, records: Mapping[Arm, ArmRecord], limits: Mapping[Measure, Bound], known: Mapping[str, Feature],
    manifest: InvarianceManifest,
) -> list[str]:  # fmt: skip
    """Return the probes that an arm changes."""
    compared = records[base_of(arm, known)].replies, records[arm].replies
    bound = widened(limits, arm, known, manifest.dtype)
    return changed_probes(*compared, bound)


def _findings(
    manifest: InvarianceManifest, outcomes: Sequence[ArmOutcome], known: Mapping[str, Feature],
    partings: Mapping[Arm, PartingRow], changed: Mapping[Arm, Sequence[str]],
) -> list[Finding]:  # fmt: skip
    """One finding for each smallest set of features that breaks, with the arms that have it."""
    failing = _failing(outcomes)
    return [_finding(manifest, failing[arm], outcomes, known, parted, changed[arm]) for arm, parted in partings.items()]


def _failing(outcomes: Sequence[ArmOutcome]) -> dict[Arm, ArmOutcome]:
    """Return the first failure of each arm that failed."""
    return {judged.arm: judged for judged in reversed(outcomes) if judged.state == "differs"}


def _askings(arm: Arm, outcomes: Sequence[ArmOutcome]) -> str:
    """Say in how many askings an arm differed that did not differ each time; empty for others."""
    own = [judged.state for judged in outcomes if judged.arm == arm]
    return f" in {own.count('differs')} of {len(own)} askings" if "same" in own else ""


def _finding(
    manifest: InvarianceManifest, judged: ArmOutcome, outcomes: Sequence[ArmOutcome], known: Mapping[str, Feature],
    parted: PartingRow, changed: Sequence[str],
) -> Finding:  # fmt: skip
    states = {each.arm: each for each in reversed(outcomes)}
    unrun = [_name_of(each.arm) for each in outcomes if each.state == "not run" and each.arm < judged.arm]
    askings = _askings(judged.arm, outcomes)
    measure = max(judged.distances, key=lambda measure: judged.distances[measure].mean)
    # Of what was written, no position says what differs.
    what = f"mean KL {judged.distances[measure].mean:.2g} nats" if judged.first else f"{judged.why},"
    parts = [] if askings else _parts(judged.arm, known)
    alone = [f"{_name_of(arm)}: {_said(states.get(arm), outcomes, arm)}" for arm in parts]
    evidence = [
        f"{measure}: mean KL {distance.mean:.3g} nats over {distance.positions:,} positions, at worst {distance.worst:.3g}"
        for measure, distance in judged.distances.items()
    ]
    evidence += [f"probes that differ: {', '.join(changed)}"] if changed else []
    evidence += [f"each alone: {'; '.join(alone)}"] if alone else []
    evidence += [judged.why] if judged.why and judged.first else []
    evidence += [f"inside the model: {parted.says or f'not observed: {parted.not_observed}'}"]
    evidence += (
        [f"not in the command, which has no flag for it: {listed(beyond)}"] if (beyond := _beyond(manifest)) else []
    )
    evidence += [f"parts of it that were not run: {'; '.join(unrun)}"] if unrun else []
    evidence += ["not reduced, since it does not differ each time"] if askings else []
    evidence += [
        f"also in {_name_of(each.arm)}" for each in outcomes if each.state == "differs" and judged.arm < each.arm
    ][:4]
    titles = listed([known[id_].title for id_ in sorted(judged.arm)])
    return Finding(
        id=FINDING,
        title=f"{_name_of(judged.arm)} changes the output{askings}",
        severity="serious",
        where="; ".join(filter(None, [_where(judged, manifest), place_of(parted), in_common(changed, manifest)])),
        diagnosis=f"{_name_of(judged.arm)}: {what} where {titles}{askings and f',{askings}'}"
        + (f"; each alone: {'; '.join(alone)}" if alone else ""),
        evidence=tuple(evidence),
        reproduce=_command(manifest, judged.arm),
    )


def _parts(arm: Arm, known: Mapping[str, Feature]) -> list[Arm]:
    """Return each feature of an arm alone, with what it requires; none for what is already one."""
    parts = {closed([id_], known) for id_ in arm}
    return sorted(parts - {arm}, key=sorted)


def _said(own: ArmOutcome | None, outcomes: Sequence[ArmOutcome], arm: Arm) -> str:
    """Say what a feature does alone: as it was run, or since a larger arm is the same."""
    if own is not None and own.state in ("same", "differs"):
        return f"{max(distance.mean for distance in own.distances.values()):.2g}"
    failing = _failing(outcomes)
    if any(arm <= each.arm and each.state == "same" and each.arm not in failing for each in outcomes):
        return "no difference in larger arms"
    return "not run"


def _where(judged: ArmOutcome, manifest: InvarianceManifest) -> str:
    return f"first at {_place(judged.first, manifest)}" if judged.first else "what was written"


def _place(place: ProbePlace, manifest: InvarianceManifest) -> str:
    prompt, shared, _ = manifest.lengths[place.probe]
    if place.index >= prompt:
        return f"probe {place.probe}, generated token {place.index - prompt + 1}"
    behind = f" ({place.index - shared + 1} behind the shared prefix of {shared:,})" if shared else ""
    return f"probe {place.probe}, prompt token {place.index + 1:,} of {prompt:,}{behind}"


def _beyond(manifest: InvarianceManifest) -> list[str]:
    """Return what the library was given for the servers and no flag says. Values may be secret."""
    side = manifest.spec["reference"]
    return [*side.get("environment", ()), *([f"interpreter {side['interpreter']}"] if side.get("interpreter") else [])]


def _command(manifest: InvarianceManifest, arm: Arm) -> str:
    words = [
        word for word in shlex.split(manifest.command) if not word.startswith(("--features=", "--minutes=", "--arms="))
    ]
    return shlex.join([*words, f"--features={','.join(sorted(arm))}", "--arms=exactly"])


def _rows(
    base: ArmRecord, again: Sequence[ArmRecord], limits: Mapping[Measure, Bound],
    arms: Sequence[ArmRecord], outcomes: Sequence[ArmOutcome],
) -> Iterable[ArmRow]:  # fmt: skip
    yield _row(base, ArmOutcome(BASE, "same", {}))
    for record in again:
        floor = floor_of(base, [record])
        agrees = _holds(floor, limits)
        yield _row(record, ArmOutcome(BASE, "same" if agrees else "not shown", floor, why="" if agrees else _DISAGREES))
    for record, judged in zip(arms, outcomes, strict=True):
        yield _row(record, judged)


def _row(record: ArmRecord, judged: ArmOutcome) -> ArmRow:
    prefill, decode = (judged.distances.get(measure) for measure in MEASURES)
    return ArmRow(
        number=record.number,
        features=record.features,
        chosen_by=record.why,
        verdict=_VERDICTS[judged.state],
        why=judged.why,
        server=record.server,
        startup_s=record.startup_s,
        seconds=record.seconds,
        prefill_kl=prefill and prefill.mean,
        prefill_worst=prefill and prefill.worst,
        decode_kl=decode and decode.mean,
        decode_worst=decode and decode.worst,
        positions=sum(distance.positions for distance in judged.distances.values()),
        accepted=accept_length(record),
        seen=record.seen,
    )


def _features(manifest: InvarianceManifest, arms: Sequence[ArmRecord]) -> Iterable[FeatureRow]:
    for id_, feature in features_of(manifest.spec["device"]).items():
        on = [record for record in arms if record.complete and id_ in record.seen]
        why = manifest.not_covered.get(id_) or ("" if on else "in no arm that was run to its end")
        yield FeatureRow(
            id=id_, title=feature.title, arms=len(on), seen=on[0].seen[id_] if on else "", not_covered="" if on else why
        )


def _pairs(known: Mapping[str, Feature], outcomes: Sequence[ArmOutcome]) -> Iterable[PairCell]:
    # What differs at times is wrong.
    once = [judged for judged in outcomes if judged.state == "differs" or judged.arm not in _failing(outcomes)]
    for first, other in [*((id_, id_) for id_ in known), *combinations(known, 2)]:
        having = [judged for judged in once if {first, other} <= judged.arm]
        # A pair is wrong only if every arm that has it is: else another feature is what breaks.
        states = [_VERDICTS[judged.state] for judged in having]
        best = min(states, key=lambda verdict: -WORST_FIRST.index(verdict), default=None)
        means = [max(d.mean for d in judged.distances.values()) for judged in having if judged.distances]
        yield PairCell(first=first, other=other, verdict=best, kl=min(means, default=None))


def _headline(
    findings: Sequence[Finding], checks: Sequence[Check], outcomes: Sequence[ArmOutcome], lost: Sequence[tuple[str, str]],
    manifest: InvarianceManifest,
) -> str:  # fmt: skip
    if findings:
        more = f", and {counted(len(findings) - 1, 'further set')} of features" if len(findings) > 1 else ""
        return f"{findings[0].diagnosis}{more}."
    if unmet := next((check for check in checks if check.status == "missing"), None):
        return f"{unmet.title}: {unmet.found}."
    on = counted(len(manifest.features), "feature")
    but = f"; {counted(len(lost), 'pair')} left out" if lost else ""
    return f"{on} in {counted(len(outcomes), 'arm')} changed nothing in {manifest.backend}{but}."


def _reasons(findings: Sequence[Finding], checks: Sequence[Check]) -> Iterable[str]:
    yield from (finding.sentence for finding in findings)
    for check in checks:
        if check.status == "missing":
            yield f"{check.title}: {check.found}. {check.settles.capitalize()}."


_SAME = Requirement(
    "same-servers",
    "the arms' servers differed in their features and in nothing else",
    "the arms' servers did not differ in their features alone",
)
_SIZES = "arguments.cuda_graph_config"
"""The sizes of CUDA graphs follow chunks and drafts; whether there were any is shown by the passes that they served."""


def other_than_features(
    folder: InvarianceFolder, arms: Iterable[tuple[ArmRecord, ArmRecord]], known: Mapping[str, Feature]
) -> tuple[Check, dict[int, str]]:
    """Compare the fingerprints of the servers in which arms ran with those of their bases.

    Settings that a feature is switched with declare what they let differ; features say what an engine resolves besides.

    Args:
        folder: the folder.
        arms: each arm that was run to its end, and its base.
        known: features by id.

    Returns:
        The check, and in words what else differs or was not observed, by number of the arm.

    Raises:
        EvidenceError: a fingerprint is damaged, or of another run.
    """
    fingerprint = cache(folder.fingerprint)
    says: dict[int, str] = {}
    parts: set[str] = set()
    servers: set[int] = set()
    for record, base in arms:
        servers |= {record.server, base.server}
        served, beside = fingerprint(record.server), fingerprint(base.server)
        if served is None or beside is None:
            says[record.number] = "what its server served was not observed"
        elif record.server != base.server:
            diff = compare_fingerprints(beside, served, _declared(record.features, known))
            parts |= set(diff.compared)
            if not diff.compared:
                says[record.number] = "no part of what its server served was observed of both"
            elif diff.undeclared:
                says[record.number] = f"of what its server served (A its base's, B its own), {_sentences(diff)}"
    if says:
        first = next(iter(says.values()))
        said = f"{first}; {counted(len(says), 'arm')} in all"
        return _SAME.check(
            "missing", said, "see assay fingerprint diff of both servers' folders, and run it again"
        ), says
    agree = f"what {counted(len(servers), 'server')} served agrees in {counted(len(parts), 'part')}"
    return _SAME.check("ok", agree if parts else "every arm ran in the server of its base"), says


def _declared(features: Sequence[str], known: Mapping[str, Feature]) -> list[str]:
    """Return what may differ beside the settings with which features are switched, as ``--allow`` names it."""
    resolved = [f"arguments.{name}" for id_ in features for name in known[id_].resolved]
    return [_SIZES, *resolved, *(name for id_ in features for name in known[id_].declares)]


def _sentences(diff: FingerprintDiff) -> str:
    return "; ".join(difference.says for difference in diff.undeclared)
