"""Judging the arms of ``assay invariance``: which features change what they must not change, and what was not shown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations

from assay.harness.engines.sglang.features import Feature, features_of
from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, InvarianceManifest, invariance_folder
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.judge.evidence import Judged, RunEvidence
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
from assay.harness.judge.judgement import INVARIANCE, Metric
from assay.harness.judge.probe_scores import (
    MEASURES,
    Bound,
    Distance,
    Measure,
    ProbePlace,
    changed_probes,
    in_common,
    places,
)
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.traces import least_error
from assay.harness.text import counted, listed
from assay.harness.verdict import WORST_FIRST, Check, Finding, Requirement, Verdict

_FINDING = "feature-changes-output"
_VERDICTS: Mapping[State, Verdict] = {
    "same": "pass",
    "differs": "regression",
    "not shown": "inconclusive",
    "not run": "inconclusive",
}
_DISAGREES = "the same tokens are scored differently without any feature: see which probes, alone and in batches"
_DECODES_OTHERWISE = (
    "decode is not what prefill computes of the same tokens: assay backends --honours compares both with the truth"
)
# The sizes of CUDA graphs follow chunks and drafts; whether there were any is shown by the passes that they served.
_SIZES = "arguments.cuda_graph_config"
_LARGEST = "largest-divergence"


def claim(run: RunEvidence) -> Judged:
    """Judge the features that the policy names, and check that they were switched; nothing if it names none."""
    wanted, line = run.spec.policy.invariance, run.spec.policy.line("invariance")
    if not wanted:
        return Judged()
    required, again = Requirement("features-switched"), "repeat the command, which switches them again"
    folder = invariance_folder(run.folder)
    try:
        if not folder.complete:
            return Judged(checks=[required.check("missing", f"it was not done, or not to its end; {line}", again)])
        result = judge_invariance(folder)
    except EvidenceError as error:
        return Judged(checks=[required.check("missing", str(error), again)])
    on = {feature.id for feature in result.features if feature.arms}
    arms = f"{counted(len(result.arms), 'arm')} of {counted(result.servers, 'server')}"
    missing = [id_ for id_ in wanted if id_ not in on]
    said = (
        f"{listed(missing)} in no arm that was run to its end; {line}"
        if missing
        else f"{counted(len(wanted), 'feature')} in {arms}"
    )
    largest = max((kl for arm in result.arms for kl in (arm.prefill_kl, arm.decode_kl) if kl is not None), default=None)
    metric = Metric(
        id=_LARGEST,
        title="largest mean divergence with features on",
        value=largest,
        text="not measured" if largest is None else f"{largest:.2g} nats",
        explain="Mean KL of the arm that is farthest from the candidate without any feature, on the same tokens",
    )
    suite = SuiteResult(
        id=INVARIANCE,
        synthetic=False,
        verdict=result.verdict,
        why=f"{result.said} Policy: {line}.",
        metrics=(metric,),
        decided_by=_LARGEST,
    )
    check = required.met(not missing, said, again)
    return Judged(suite=suite, checks=[check], findings=result.findings, parts={"invariance": result})


@dataclass(frozen=True)
class _Arms:
    """What was run, read once.

    Attributes:
        base: the arm without a feature.
        again: the base again, in other batches.
        arms: the others, without those that ask a second time for a trace, or under a seeded fault.
        known: the features that arms switch, by id.
        limits: bounds of the distances, without what a feature costs.
    """

    folder: InvarianceFolder
    manifest: InvarianceManifest
    records: Sequence[ArmRecord]
    base: ArmRecord
    again: Sequence[ArmRecord]
    arms: Sequence[ArmRecord]
    known: Mapping[str, Feature]
    limits: Mapping[Measure, Bound]

    @classmethod
    def of(cls, folder: InvarianceFolder) -> _Arms:
        manifest, records = folder.manifest(), list(folder.arms())
        base = next((record for record in records if record.why == "base" and record.complete), None)
        again = [record for record in records if record.why in ("base again", "base longer") and record.complete]
        if base is None or len(again) != 1 + rounds_by_shape(manifest.dtype):
            raise EvidenceError(
                f"{folder.path} has no base that was run twice.",
                "a folder that assay invariance completed",
                "run it again",
            )
        every = features_of(manifest.spec["device"])
        switched = {id_ for record in records if record.why != "sensitivity" for id_ in record.features}
        if unknown := [id_ for id_ in manifest.features if id_ not in every] or sorted(
            switched - set(manifest.features)
        ):
            raise EvidenceError(
                f"{folder.path} has an arm with {unknown[0]}, which is no feature of it.",
                f"some of {', '.join(every)}",
                "judge it with the version of assay that wrote it, or run it again",
            )
        return cls(
            folder=folder,
            manifest=manifest,
            records=records,
            base=base,
            again=again,
            arms=[each for each in records if each.features and each.why != "sensitivity" and each.traced is None],
            known={id_: every[id_] for id_ in manifest.features},
            limits=bounds(base, again, manifest.dtype),
        )

    @cached_property
    def first(self) -> Mapping[Arm, ArmRecord]:
        """The first record of each arm."""
        return {frozenset(record.features): record for record in reversed(self.arms)} | {BASE: self.base}

    def base_of(self, arm: Arm) -> ArmRecord | None:
        """Return the record that an arm is compared with; None if that was not run to its end."""
        own = self.first.get(base_of(arm, self.known))
        return own if own is not None and own.complete else None

    def place(self, place: ProbePlace) -> str:
        prompt, shared, _ = self.manifest.lengths[place.probe]
        if place.index >= prompt:
            return f"probe {place.probe}, generated token {place.index - prompt + 1}"
        behind = f" ({place.index - shared + 1} behind the shared prefix of {shared:,})" if shared else ""
        return f"probe {place.probe}, prompt token {place.index + 1:,} of {prompt:,}{behind}"


def judge_invariance(folder: InvarianceFolder) -> InvarianceResult:
    """Judge what a folder holds.

    Raises:
        EvidenceError: a file is damaged or of another run, or is not as it was when everything had been run, or the base is not
            complete.
    """
    folder.check_sealed()
    ran = _Arms.of(folder)
    manifest, records = ran.manifest, ran.records
    outcomes = [_outcome(ran, record) for record in ran.arms]
    same, unlike = _same_servers(ran)
    shown = [
        _served_alike(judged, unlike.get(record.number, "")) for record, judged in zip(ran.arms, outcomes, strict=True)
    ]
    done = [judged.arm for judged in shown if judged.state in ("same", "differs")]
    lost = left_out([frozenset(arm) for arm in manifest.arms], done, ran.known)
    checks = (
        _ended(ran),
        _answered(ran),
        _agrees(ran),
        _sensitive(ran),
        _shown(ran),
        same,
        _decided(outcomes, manifest),
        _covered(lost, manifest),
    )
    failing = _failing(shown)
    partings = {arm: _parting(ran, failing[arm]) for arm in smallest(failing)}
    findings = [_finding(ran, failing[arm], shown, parted) for arm, parted in partings.items()]
    unmet = [check for check in checks if check.status == "missing"]
    return InvarianceResult(
        verdict=_verdict(unmet, shown),
        said=_headline(findings, unmet, shown, lost, manifest),
        because=(
            *(finding.sentence for finding in findings),
            *(f"{check.id}: {check.outcome.values}" for check in unmet),
        ),
        created=manifest.created,
        command=manifest.command,
        backend=manifest.backend,
        model=manifest.spec["reference"]["model"],
        device=manifest.spec["device"],
        dtype=manifest.dtype,
        hardware=manifest.hardware,
        git=manifest.git,
        packages=manifest.packages,
        seconds=sum(record.seconds + record.startup_s for record in records),
        servers=len({record.server for record in records}),
        probes=len(manifest.lengths),
        floor_kl=max(distance.mean for distance in floor_of(ran.base, ran.again).values()),
        bound_kl=max(bound.mean for bound in ran.limits.values()),
        arms=tuple(_rows(ran, shown)),
        features=tuple(_features(ran)),
        pairs=tuple(_pairs(ran.known, shown)),
        partings=tuple(partings.values()),
        left_out=tuple(lost),
        checks=checks,
        findings=tuple(findings),
    )


def _outcome(ran: _Arms, record: ArmRecord) -> ArmOutcome:
    arm = frozenset(record.features)
    if (against := ran.base_of(arm)) is None:
        why = f"its base, {_name_of(base_of(arm, ran.known))}, was not run"
        return ArmOutcome(arm, "not run", {}, why=why)
    drafted = drafted_by(arm, ran.first, ran.known, tuple(ran.manifest.spec["reference"]["flags"]))
    return outcome_of(against, record, ran.limits, ran.known, ran.manifest.dtype, drafted)


def _same_servers(ran: _Arms) -> tuple[Check, dict[int, str]]:
    """Compare what the servers of arms served with what those of their bases did; return what differs by number of the arm, too."""
    fingerprint = cache(ran.folder.fingerprint)
    says: dict[int, str] = {}
    parts: set[str] = set()
    servers: set[int] = set()
    complete = [(record, ran.base_of(frozenset(record.features))) for record in ran.arms if record.complete]
    for record, base in complete:
        if base is None:
            continue
        servers |= {record.server, base.server}
        served, beside = fingerprint(record.server), fingerprint(base.server)
        if served is None or beside is None:
            says[record.number] = "what its server served was not observed"
        elif record.server != base.server:
            diff = compare_fingerprints(beside, served, _declared(record.features, ran.known))
            parts |= set(diff.compared)
            if not diff.compared:
                says[record.number] = "no part of what its server served was observed of both"
            elif diff.undeclared:
                differs = "; ".join(difference.says for difference in diff.undeclared)
                says[record.number] = f"of what its server served (A its base's, B its own), {differs}"
    required = Requirement("same-servers")
    if says:
        said = f"{next(iter(says.values()))}; {counted(len(says), 'arm')} in all"
        return required.check("missing", said, "see assay compare of both servers' folders, and run it again"), says
    agree = f"what {counted(len(servers), 'server')} served agrees in {counted(len(parts), 'part')}"
    return required.check("ok", agree if parts else "every arm ran in the server of its base"), says


def _declared(features: Sequence[str], known: Mapping[str, Feature]) -> list[str]:
    """Return what may differ beside the settings with which features are switched, as ``--allow`` names it."""
    resolved = [f"arguments.{name}" for id_ in features for name in known[id_].resolved]
    return [_SIZES, *resolved, *(name for id_ in features for name in known[id_].declares)]


def _served_alike(judged: ArmOutcome, unlike: str) -> ArmOutcome:
    """Return what an arm shows beside what else its server served: what is the same then shows nothing."""
    if not unlike or judged.state == "not run":
        return judged
    why = "; ".join(filter(None, [judged.why, unlike]))
    return replace(judged, state="not shown" if judged.state == "same" else judged.state, why=why)


def _name_of(arm: Iterable[str]) -> str:
    """Name an arm, such as "prefix-cache + page-size"."""
    return " + ".join(sorted(arm)) or "no feature"


def _ended(ran: _Arms) -> Check:
    arms = counted(len(ran.records), "arm")
    if not ran.folder.complete:
        return Requirement("invariance-ended").check("missing", f"it ended early, after {arms}", "run it again")
    return Requirement("invariance-ended").check("ok", arms)


def _answered(ran: _Arms) -> Check:
    """Demand all that was asked for of the base: an arm that stops where the base stopped is the same, and shows little."""
    written = {reply.probe: len(reply.decode.tokens) for reply in ran.base.replies}
    asked = {probe: depth for probe, (_, _, depth) in ran.manifest.lengths.items()}
    short = [probe for probe in {**asked, **written} if asked.get(probe) != written.get(probe)]
    if not short:
        said = f"{counted(len(asked), 'probe')}, {sum(asked.values()):,} tokens"
        return Requirement("probes-answered").check("ok", said)
    said = f"{len(short)} were not, the first, {short[0]}, with {written.get(short[0], 0)} of {asked.get(short[0], 0)} tokens"
    return Requirement("probes-answered").check("missing", said, "see why in the log of its server")


def _means(distances: Mapping[Measure, Distance]) -> str:
    return "; ".join(f"{measure}: mean KL {distance.mean:.2g} nats" for measure, distance in distances.items())


def _agrees(ran: _Arms) -> Check:
    said = _means(floor_of(ran.base, ran.again))
    apart = next((record for record in ran.again if not _holds(floor_of(ran.base, [record]), ran.limits)), None)
    if apart is None:
        return Requirement("base-agrees").check("ok", said)
    worst = max(floor_of(ran.base, [apart]).values(), key=lambda distance: distance.worst)
    changed = in_common(changed_probes(ran.base.replies, apart.replies, ran.limits), ran.manifest)
    at = f"at worst {worst.worst:.2g} at {ran.place(worst.at)}" if worst.at else ""
    do = _DECODES_OTHERWISE if apart.why == "base longer" else _DISAGREES
    return Requirement("base-agrees").check("missing", "; ".join(filter(None, [said, at, changed])), do)


def _holds(distances: Mapping[Measure, Distance], limits: Mapping[Measure, Bound]) -> bool:
    return all(limits[measure].holds(distance) for measure, distance in distances.items())


def _sensitive(ran: _Arms) -> Check:
    record = next((record for record in ran.records if record.why == "sensitivity"), None)
    if record is None or not record.complete:
        why = "no fault was seeded" if record is None else record.problem or "the probes were not answered"
        return Requirement("probes-sensitive").check("missing", why, "run it again")
    distances = {measure: Distance.of(places(ran.base.replies, record.replies, measure)) for measure in MEASURES}
    seen = all(not ran.limits[measure].holds(distance) for measure, distance in distances.items())
    return Requirement("probes-sensitive").met(
        seen, _means(distances), "use real weights (without --load-format=dummy)"
    )


def _shown(ran: _Arms) -> Check:
    shown = {id_ for record in ran.arms if record.complete for id_ in record.seen}
    if missing := [id_ for id_ in ran.known if id_ not in shown]:
        whys = {id_: record.unseen.get(id_) or record.problem for record in ran.arms for id_ in record.features}
        said = "; ".join(f"{id_}: {whys.get(id_) or 'in no arm'}" for id_ in missing)
        spent = ran.manifest.minutes and not whys.keys() & set(missing)
        do = "give it more --minutes" if spent else "see why the server switched them off"
        return Requirement("features-on").check("missing", said, f"{do}, or leave them out with --features")
    return Requirement("features-on").check("ok", f"{counted(len(shown), 'feature')}: {', '.join(ran.known)}")


def _decided(outcomes: Sequence[ArmOutcome], manifest: InvarianceManifest) -> Check:
    """Demand every planned arm; those that a budget leaves out of a covering array only leave pairs out."""
    required = Requirement("arms-decided")
    ran = {judged.arm for judged in outcomes}
    unrun = [arm for arm in map(frozenset, manifest.arms) if arm not in ran]
    if unrun and not (outcomes and manifest.mode == "pairs" and manifest.minutes):
        said = f"{counted(len(unrun), 'planned arm')} without a record: {'; '.join(map(_name_of, unrun[:6]))}"
        return required.check("missing", said, "give it more --minutes" if manifest.minutes else "run it again")
    if open_ := [judged for judged in outcomes if _VERDICTS[judged.state] == "inconclusive"]:
        said = "; ".join(f"{_name_of(judged.arm)}: {judged.why}" for judged in open_)
        return required.check(
            "missing", said, "read the logs of their servers, or leave the features out with --features"
        )
    return required.met(bool(outcomes), counted(len(outcomes), "arm"), "give it more --minutes")


def _covered(lost: Sequence[tuple[str, str]], manifest: InvarianceManifest) -> Check:
    required = Requirement("pairs-covered")
    if manifest.mode != "pairs":
        said = f"features were not switched in pairs, but as --{manifest.mode}"
        return required.check("not checked", said, "leave it out")
    if lost:
        said = f"{counted(len(lost), 'pair')} left out: {listed([_name_of(pair) for pair in lost[:6]])}"
        return required.check("not checked", said, "give it more --minutes")
    return required.check("ok", "all that can be on together")


def _verdict(unmet: Sequence[Check], outcomes: Sequence[ArmOutcome]) -> Verdict:
    states = {_VERDICTS[judged.state] for judged in outcomes}
    if "regression" in states:
        return "regression"
    return "inconclusive" if unmet or not outcomes or "inconclusive" in states else "pass"


def _parting(ran: _Arms, failed: ArmOutcome) -> PartingRow:
    """Say where in the model a set of features that breaks parts from its base."""
    own = base_of(failed.arm, ran.known)
    least = least_error(ran.manifest.dtype, any(ran.known[id_].cost == "another kernel" for id_ in failed.arm))
    return parting_of(ran.folder, ran.records, failed, ran.first[own], ran.limits, least)


def _failing(outcomes: Sequence[ArmOutcome]) -> dict[Arm, ArmOutcome]:
    """Return the first failure of each arm that failed."""
    return {judged.arm: judged for judged in reversed(outcomes) if judged.state == "differs"}


def _changed(ran: _Arms, judged: ArmOutcome, outcomes: Sequence[ArmOutcome]) -> list[str]:
    """Return the probes that an arm changes, in the first asking in which it differed."""
    record = next(record for record, each in zip(ran.arms, outcomes, strict=True) if each is judged)
    base = ran.first[base_of(judged.arm, ran.known)]
    return changed_probes(base.replies, record.replies, widened(ran.limits, judged.arm, ran.known, ran.manifest.dtype))


def _finding(ran: _Arms, judged: ArmOutcome, outcomes: Sequence[ArmOutcome], parted: PartingRow) -> Finding:
    """One finding for a smallest set of features that breaks, with the arms that have it."""
    manifest, name, changed = ran.manifest, _name_of(judged.arm), _changed(ran, judged, outcomes)
    states = {each.arm: each for each in reversed(outcomes)}
    own = [each.state for each in outcomes if each.arm == judged.arm]
    askings = f" in {own.count('differs')} of {len(own)} askings" if "same" in own else ""
    measure = max(judged.distances, key=lambda measure: judged.distances[measure].mean)
    # Of what was written, no position says what differs.
    what = f"mean KL {judged.distances[measure].mean:.2g} nats" if judged.first else f"{judged.why},"
    # Each feature of the arm, with what it requires: none for what is already one.
    parts = [] if askings else sorted({closed([id_], ran.known) for id_ in judged.arm} - {judged.arm}, key=sorted)
    alone = "; ".join(f"{_name_of(arm)}: {_alone(states.get(arm), outcomes, arm)}" for arm in parts)
    unrun = [_name_of(each.arm) for each in outcomes if each.state == "not run" and each.arm < judged.arm]
    wider = [_name_of(each.arm) for each in outcomes if each.state == "differs" and judged.arm < each.arm]
    # What the library was given for the servers and no flag says. Values may be secret.
    side = manifest.spec["reference"]
    beyond = [
        *side.get("environment", ()),
        *([f"interpreter {side['interpreter']}"] if side.get("interpreter") else []),
    ]
    evidence = {
        **{
            f"{measure}: mean KL {each.mean:.3g} nats over {each.positions:,} positions, at worst {each.worst:.3g}": True
            for measure, each in judged.distances.items()
        },
        f"probes that differ: {', '.join(changed)}": changed,
        f"each alone: {alone}": alone,
        judged.why: judged.why and judged.first,
        f"inside the model: {parted.says or f'not observed: {parted.not_observed}'}": True,
        f"not in the command, which has no flag for it: {listed(beyond)}": beyond,
        f"parts of it that were not run: {'; '.join(unrun)}": unrun,
        "not reduced, since it does not differ each time": askings,
        **{f"also in {each}": True for each in wider[:4]},
    }
    titles = listed([ran.known[id_].title for id_ in sorted(judged.arm)])
    first = f"first at {ran.place(judged.first)}" if judged.first else "what was written"
    words = shlex.split(manifest.command)
    words = [word for word in words if not word.startswith(("--features=", "--minutes=", "--arms="))]
    return Finding(
        id=_FINDING,
        title=f"{name} changes the output{askings}",
        severity="serious",
        where="; ".join(filter(None, [first, place_of(parted), in_common(changed, manifest)])),
        diagnosis=f"{name}: {what} where {titles}{askings and f',{askings}'}{alone and f'; each alone: {alone}'}",
        evidence=tuple(line for line, holds in evidence.items() if holds),
        reproduce=shlex.join([*words, f"--features={','.join(sorted(judged.arm))}", "--arms=exactly"]),
    )


def _alone(own: ArmOutcome | None, outcomes: Sequence[ArmOutcome], arm: Arm) -> str:
    """Say what a feature does alone: as it was run, or since a larger arm is the same."""
    if own is not None and own.state in ("same", "differs"):
        return f"{max(distance.mean for distance in own.distances.values()):.2g}"
    failing = _failing(outcomes)
    if any(arm <= each.arm and each.state == "same" and each.arm not in failing for each in outcomes):
        return "no difference in larger arms"
    return "not run"


def _rows(ran: _Arms, outcomes: Sequence[ArmOutcome]) -> Iterator[ArmRow]:
    yield _row(ran.base, ArmOutcome(BASE, "same", {}))
    for record in ran.again:
        floor = floor_of(ran.base, [record])
        agrees = _holds(floor, ran.limits)
        yield _row(record, ArmOutcome(BASE, "same" if agrees else "not shown", floor, why="" if agrees else _DISAGREES))
    for record, judged in zip(ran.arms, outcomes, strict=True):
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
        seen=record.seen,
    )


def _features(ran: _Arms) -> Iterator[FeatureRow]:
    for id_, feature in features_of(ran.manifest.spec["device"]).items():
        on = [record for record in ran.arms if record.complete and id_ in record.seen]
        why = "" if on else ran.manifest.not_covered.get(id_) or "in no arm that was run to its end"
        yield FeatureRow(id=id_, title=feature.title, arms=len(on), seen=on[0].seen[id_] if on else "", not_covered=why)


def _pairs(known: Mapping[str, Feature], outcomes: Sequence[ArmOutcome]) -> Iterator[PairCell]:
    # What differs at times is wrong.
    failing = _failing(outcomes)
    once = [judged for judged in outcomes if judged.state == "differs" or judged.arm not in failing]
    for first, other in [*((id_, id_) for id_ in known), *combinations(known, 2)]:
        having = [judged for judged in once if {first, other} <= judged.arm]
        # A pair is wrong only if every arm that has it is: else another feature is what breaks.
        states = [_VERDICTS[judged.state] for judged in having]
        best = min(states, key=lambda verdict: -WORST_FIRST.index(verdict), default=None)
        means = [max(d.mean for d in judged.distances.values()) for judged in having if judged.distances]
        yield PairCell(first=first, other=other, verdict=best, kl=min(means, default=None))


def _headline(
    findings: Sequence[Finding], unmet: Sequence[Check], outcomes: Sequence[ArmOutcome], lost: Sequence[tuple[str, str]],
    manifest: InvarianceManifest,
) -> str:  # fmt: skip
    if findings:
        more = f", and {counted(len(findings) - 1, 'further set')} of features" if len(findings) > 1 else ""
        return f"{findings[0].diagnosis}{more}."
    if unmet:
        return f"{unmet[0].title}: {unmet[0].found}."
    on = counted(len(manifest.features), "feature")
    but = f"; {counted(len(lost), 'pair')} left out" if lost else ""
    return f"{on} in {counted(len(outcomes), 'arm')} changed nothing in {manifest.backend}{but}."
