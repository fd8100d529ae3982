"""Judge the variants of ``assay invariance``: which features change outputs, and which were not tested."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from assay.harness.engines import registry
from assay.harness.engines.features import Feature
from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import InvarianceFolder, InvarianceManifest
from assay.harness.evidence.probes import ProbePass, passes_of
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.judge.invariance_arms import BASE, Arm, ArmJudge, base_of, closed, name_of, smallest
from assay.harness.judge.invariance_result import ArmRow, InvarianceResult
from assay.harness.judge.parting import parting_of, traced_passes
from assay.harness.judge.probe_outcome import PassOutcome, State
from assay.harness.judge.probe_scores import (
    BASE_AGAIN,
    MEASURES,
    Bound,
    Distance,
    Measure,
    ProbePlace,
    bounds,
    changed_probes,
    distances_of,
    floor_of,
    hold,
    rounds_by_shape,
)
from assay.harness.judge.traces import PartingRow, least_error
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Finding, Requirement, Verdict

_FINDING = "feature-changes-output"
_VERDICTS: Mapping[State, Verdict] = {
    "same": "pass",
    "differs": "regression",
    "not shown": "inconclusive",
    "not run": "inconclusive",
}
_FROM_MANIFEST = ("created", "command", "backend", "dtype", "hardware", "git", "packages")


@dataclass(frozen=True)
class _Arms:
    """The evidence of an invariance run, read once.

    Attributes:
        base: the arm without a feature.
        again: the base again, in other batches.
        arms: the others, without those that ask a second time for a trace, or under a seeded fault.
        judge: judges each arm against its base.
        derived: differences between servers that follow from features.
    """

    folder: InvarianceFolder
    manifest: InvarianceManifest
    records: Sequence[ProbePass]
    base: ProbePass
    again: Sequence[ProbePass]
    arms: Sequence[ProbePass]
    judge: ArmJudge
    derived: tuple[str, ...]

    @classmethod
    def of(cls, folder: InvarianceFolder) -> _Arms:
        manifest, records = folder.manifest(), passes_of(folder.path, folder.nonce)
        base = next((record for record in records if record.why == "base" and record.complete), None)
        again = [record for record in records if record.why in BASE_AGAIN and record.complete]
        if base is None or len(again) < (len(BASE_AGAIN) if rounds_by_shape(manifest.dtype) else 1):
            raise EvidenceError(
                f"{folder.path} has no base that was run twice.",
                "a folder that assay invariance completed",
                "run it again",
            )
        engine = manifest.spec["reference"].get("engine", "sglang")
        every = registry.features(engine).features_of(manifest.spec["device"])
        switched = {id_ for record in records if record.why != "sensitivity" for id_ in record.features}
        if unknown := [id_ for id_ in manifest.features if id_ not in every] or sorted(
            switched - set(manifest.features)
        ):
            raise EvidenceError(
                f"{folder.path} has a variant with {unknown[0]}, which is not one of its features.",
                f"some of {', '.join(every)}",
                "judge it with the version of assay that wrote it, or run it again",
            )
        arms = [each for each in records if each.features and each.why != "sensitivity" and each.traced is None]
        judge = ArmJudge(
            records={frozenset(record.features): record for record in reversed(arms)} | {BASE: base},
            limits=bounds(base, again, manifest.dtype),
            known={id_: every[id_] for id_ in manifest.features},
            dtype=manifest.dtype,
            flags=tuple(manifest.spec["reference"]["flags"]),
        )
        return cls(folder, manifest, records, base, again, arms, judge, registry.features(engine).DERIVED)

    @property
    def known(self) -> Mapping[str, Feature]:
        """The features that arms toggle, by id."""
        return self.judge.known

    @property
    def limits(self) -> Mapping[Measure, Bound]:
        """Bounds of the distances, without the cost of a feature."""
        return self.judge.limits

    def count(self, changed: Sequence[str]) -> str:
        """Say in how many probes a variant differs, or return an empty string."""
        return f"in {len(changed)} of {len(self.manifest.lengths)} probes" if changed else ""

    def place(self, place: ProbePlace) -> str:
        prompt, shared, _ = self.manifest.lengths[place.probe]
        if place.index >= prompt:
            return f"probe {place.probe}, generated token {place.index - prompt + 1}"
        behind = f" ({place.index - shared + 1} after the shared prefix of {shared:,})" if shared else ""
        return f"probe {place.probe}, prompt token {place.index + 1:,} of {prompt:,}{behind}"


def judge_invariance(folder: InvarianceFolder) -> InvarianceResult:
    """Judge the evidence in a folder."""
    folder.check_sealed()
    ran = _Arms.of(folder)
    manifest, records = ran.manifest, ran.records
    outcomes = [ran.judge.outcome(record) for record in ran.arms]
    same, unlike = _same_servers(ran)
    shown = [
        _served_alike(judged, unlike.get(record.number)) for record, judged in zip(ran.arms, outcomes, strict=True)
    ]
    checks = (
        _ended(ran),
        _answered(ran),
        _agrees(ran),
        _sensitive(ran),
        _shown(ran),
        same,
        _decided(outcomes, manifest),
    )
    failing = _failing(shown)
    partings = {arm: _parting(ran, failing[arm]) for arm in smallest(failing)}
    findings = [_finding(ran, failing[arm], shown, parted) for arm, parted in partings.items()]
    return InvarianceResult(
        verdict=_verdict(checks, shown),
        **{name: getattr(manifest, name) for name in _FROM_MANIFEST},
        model=manifest.spec["reference"]["model"],
        device=manifest.spec["device"],
        seconds=sum(record.seconds + record.startup_s for record in records),
        servers=len({record.server for record in records}),
        probes=len(manifest.lengths),
        floor_kl=max(distance.mean for distance in floor_of(ran.base, ran.again).values()),
        bound_kl=max(bound.mean for bound in ran.limits.values()),
        arms=tuple(_rows(ran, shown)),
        features={id_: feature.title for id_, feature in ran.known.items()},
        not_covered=manifest.not_covered,
        partings=tuple(partings.values()),
        checks=checks,
        findings=tuple(findings),
    )


def _same_servers(ran: _Arms) -> tuple[Check, dict[int, Statement]]:
    """Compare the fingerprints of the arms' servers with those of their bases; also return the differences by number of the arm."""
    fingerprint = cache(ran.folder.fingerprint)
    unlike: dict[int, Statement] = {}
    parts: set[str] = set()
    servers: set[int] = set()
    complete = [(record, ran.judge.base_of(frozenset(record.features))) for record in ran.arms if record.complete]
    for record, base in complete:
        if base is None:
            continue
        servers |= {record.server, base.server}
        served, beside = fingerprint(record.server), fingerprint(base.server)
        if served is None or beside is None:
            unlike[record.number] = state("shows-nothing", why="server")
        elif record.server != base.server:
            diff = compare_fingerprints(beside, served, _declared(ran, record.features))
            parts |= set(diff.compared)
            if not diff.compared:
                unlike[record.number] = state("shows-nothing", why="parts")
            elif diff.undeclared:
                unlike[record.number] = state("arm-served-otherwise", differs=[each.says for each in diff.undeclared])
    required = Requirement("same-servers")
    if unlike:
        first = next(iter(unlike.values()))
        return required.check("missing", state("arms-served-otherwise", first=first, arms=len(unlike))), unlike
    return required.check("ok", state("arms-served-alike", servers=len(servers), parts=len(parts))), unlike


def _declared(ran: _Arms, features: Sequence[str]) -> list[str]:
    """Return the allowed differences in addition to the settings that toggle features, as ``--allow`` names them."""
    resolved = [f"arguments.{name}" for id_ in features for name in ran.known[id_].resolved]
    return [*ran.derived, *resolved, *(name for id_ in features for name in ran.known[id_].declares)]


def _served_alike(judged: PassOutcome, unlike: Statement | None) -> PassOutcome:
    """Combine a variant's outcome with other differences of its server: equal outputs then show nothing."""
    if unlike is None or judged.state == "not run":
        return judged
    return replace(judged, state="not shown" if judged.state == "same" else judged.state, why=(*judged.why, unlike))


def _ended(ran: _Arms) -> Check:
    ended = ran.folder.complete
    return Requirement("invariance-ended").met(ended, state("arms-recorded", arms=len(ran.records), ended=ended))


def _answered(ran: _Arms) -> Check:
    """Demand complete answers from the base: an arm that stops where the base stopped is equal to it, but shows little."""
    written = {reply.probe: len(reply.decode.tokens) for reply in ran.base.replies}
    asked = {probe: depth for probe, (_, _, depth) in ran.manifest.lengths.items()}
    short = [probe for probe in {**asked, **written} if asked.get(probe) != written.get(probe)]
    required = Requirement("probes-answered")
    if not short:
        return required.check("ok", state("probes-answered", probes=len(asked), tokens=sum(asked.values())))
    numbers = {"tokens": written.get(short[0], 0), "asked": asked.get(short[0], 0)}
    return required.check("missing", state("probes-cut-short", probes=len(short), first=short[0], **numbers))


def _means(distances: Mapping[Measure, Distance]) -> list[tuple[str, float]]:
    return [(measure, distance.mean) for measure, distance in distances.items()]


def _agrees(ran: _Arms) -> Check:
    means, required = _means(floor_of(ran.base, ran.again)), Requirement("base-agrees")
    apart = next((record for record in ran.again if not hold(distances_of(ran.base, record), ran.limits)), None)
    if apart is None:
        return required.check("ok", state("base-agrees", means=means))
    worst = max(distances_of(ran.base, apart).values(), key=lambda distance: distance.worst)
    changed = ran.count(changed_probes(ran.base.replies, apart.replies, ran.limits))
    at, decode = ran.place(worst.at) if worst.at else "", apart.why == "base longer"
    outcome = state("base-disagrees", means=means, worst=worst.worst, at=at, changed=changed, decode=decode)
    return required.check("missing", outcome)


def _sensitive(ran: _Arms) -> Check:
    record = next((record for record in ran.records if record.why == "sensitivity"), None)
    required = Requirement("probes-sensitive")
    uncached = record is not None and record.features and not any(reply.cached_tokens for reply in record.replies)
    if record is None or not record.complete or uncached:
        said = record and (record.problem or "no prefix came from the cache, and the fault needs a cached prefix")
        return required.check("missing", state("probes-not-under-fault", said=said))
    distances = distances_of(ran.base, record)
    seen = all(not ran.limits[measure].holds(distance) for measure, distance in distances.items())
    return required.met(seen, state("probes-under-fault", means=_means(distances)))


def _shown(ran: _Arms) -> Check:
    shown = {id_ for record in ran.arms if record.complete for id_ in record.seen}
    required = Requirement("features-on")
    if missing := [id_ for id_ in ran.known if id_ not in shown]:
        whys = {id_: record.unseen.get(id_) or record.problem for record in ran.arms for id_ in record.features}
        said = [(id_, whys.get(id_, "")) for id_ in missing]
        return required.check("missing", state("features-not-on", features=said))
    return required.check("ok", state("features-on", features=list(ran.known)))


def _decided(outcomes: Sequence[PassOutcome], manifest: InvarianceManifest) -> Check:
    """Demand every planned arm."""
    required = Requirement("arms-decided")
    ran = {judged.arm for judged in outcomes}
    unrun = [arm for arm in map(frozenset, manifest.arms) if arm not in ran]
    if unrun:
        return required.check("missing", state("arms-not-recorded", arms=[*map(name_of, unrun)]))
    if open_ := [(name_of(judged.arm), judged.why) for judged in outcomes if _VERDICTS[judged.state] == "inconclusive"]:
        return required.check("missing", state("arms-undecided", arms=open_))
    return required.met(bool(outcomes), state("arms-decided", arms=len(outcomes)))


def _verdict(checks: Sequence[Check], outcomes: Sequence[PassOutcome]) -> Verdict:
    states = {_VERDICTS[judged.state] for judged in outcomes}
    if "regression" in states:
        return "regression"
    unmet = any(check.status == "missing" for check in checks)
    return "inconclusive" if unmet or not outcomes or "inconclusive" in states else "pass"


def _parting(ran: _Arms, failed: PassOutcome) -> PartingRow:
    """Find where in the model a breaking set of features diverges from its base."""
    own, features = ran.judge.records[base_of(failed.arm, ran.known)], tuple(sorted(failed.arm))
    least = least_error(ran.manifest.dtype, any(ran.known[id_].cost == "another kernel" for id_ in failed.arm))
    asked = [(own.features, "trace"), (own.features, "trace again"), (features, "trace")]
    traced = [(each, ran.folder.server_folder(each.server)) for each in traced_passes(ran.records, failed.place, asked)]
    return parting_of(failed.place, traced, own, ran.limits, least, ran.folder.nonce, features=features)


def _failing(outcomes: Sequence[PassOutcome]) -> dict[Arm, PassOutcome]:
    """Return the first failure of each arm that failed."""
    return {judged.arm: judged for judged in reversed(outcomes) if judged.state == "differs"}


def _changed(ran: _Arms, judged: PassOutcome, outcomes: Sequence[PassOutcome]) -> list[str]:
    """Return the probes that an arm changes, in the first asking in which it differed."""
    record = next(record for record, each in zip(ran.arms, outcomes, strict=True) if each is judged)
    base = ran.judge.records[base_of(judged.arm, ran.known)]
    return changed_probes(base.replies, record.replies, ran.judge.limits_of(judged.arm))


def _finding(ran: _Arms, judged: PassOutcome, outcomes: Sequence[PassOutcome], parted: PartingRow) -> Finding:
    """Make a finding for a smallest breaking set of features, with the arms that contain it."""
    manifest, name, changed = ran.manifest, name_of(judged.arm), _changed(ran, judged, outcomes)
    states = {each.arm: each for each in reversed(outcomes)}
    own = [each.state for each in outcomes if each.arm == judged.arm]
    askings = (own.count("differs"), len(own)) if "same" in own else None
    # Each feature of the arm, with the features that it requires.
    parts = [] if askings else sorted({closed([id_], ran.known) for id_ in judged.arm} - {judged.arm}, key=sorted)
    alone = [(name_of(arm), _alone(states.get(arm), outcomes, arm)) for arm in parts]
    # Settings of the servers that were given to the library and have no flag. Values may be secret.
    side = manifest.spec["reference"]
    beyond = {"environment": [*side.get("environment", ())], "interpreter": side.get("interpreter")}
    shown_by = [
        *(
            (True, state("arm-distance", measure=measure, mean=each.mean, positions=each.positions, worst=each.worst))
            for measure, each in judged.distances.items()
        ),
        (changed, state("seen-besides", what="probes", names=changed)),
        (alone, state("each-alone", alone=alone)),
        *((judged.first, each) for each in judged.why),
        (True, parted.inside),
        (any(beyond.values()), state("not-in-command", **beyond)),
        (askings, state("seen-besides", what="unsteady", names=[])),
    ]
    first = f"first at {ran.place(judged.first)}" if judged.first else "in the generated text"
    words = shlex.split(manifest.command)
    words = [word for word in words if not word.startswith(("--features=", "--together"))]
    return Finding(
        id=_FINDING,
        title=f"{name} changes the output{f' in {askings[0]} of {askings[1]} askings' if askings else ''}",
        severity="serious",
        where="; ".join(filter(None, [first, parted.where, ran.count(changed)])),
        claim=state(
            "feature-changes-output", arm=name, titles=[ran.known[id_].title for id_ in sorted(judged.arm)], askings=askings,
            # Generated texts have no position that shows the difference.
            kl=max(each.mean for each in judged.distances.values()) if judged.first else None,
            why=() if judged.first else judged.why, alone=alone,
        ),
        shown_by=tuple(each for holds, each in shown_by if holds),
        reproduce=shlex.join([*words, f"--features={','.join(sorted(judged.arm))}", "--together"]),
    )  # fmt: skip


def _alone(own: PassOutcome | None, outcomes: Sequence[PassOutcome], arm: Arm) -> float | str:
    """Return the distance of a feature alone; without one, whether larger arms are the same or it was not run."""
    if own is not None and own.state in ("same", "differs"):
        return max(distance.mean for distance in own.distances.values())
    failing = _failing(outcomes)
    if any(arm <= each.arm and each.state == "same" and each.arm not in failing for each in outcomes):
        return "larger same"
    return "not run"


def _rows(ran: _Arms, outcomes: Sequence[PassOutcome]) -> Iterator[ArmRow]:
    yield _row(ran.base, PassOutcome(BASE, "same", {}))
    for record in ran.again:
        floor = distances_of(ran.base, record)
        why = () if hold(floor, ran.limits) else (state("shows-nothing", why="floor"),)
        yield _row(record, PassOutcome(BASE, "not shown" if why else "same", floor, why=why))
    for record, judged in zip(ran.arms, outcomes, strict=True):
        yield _row(record, judged)


def _row(record: ProbePass, judged: PassOutcome) -> ArmRow:
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
