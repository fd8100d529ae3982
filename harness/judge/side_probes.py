"""Both servers' answers to the probes -> their part of the suite ``logits``, and the place in the model where the servers part.

It decides where the sides differ in more than a backend, so that no kernel can be put into a shadow: the same tokens, in
prefill and decode, under each of `CONDITIONS`, within a bound from the reference's distance from itself under the other conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from assay.harness.engines import registry
from assay.harness.evidence.probes import CONDITIONS, ProbePass, TracedPlace, passes_of
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.noise_limits import kl_limit, swing_limit
from assay.harness.judge.parting import parting_of, traced_passes
from assay.harness.judge.probe_outcome import PassOutcome, outcome
from assay.harness.judge.probe_scores import (
    FALSE_ALARMS,
    MEASURES,
    Bound,
    Distance,
    Measure,
    ProbePlace,
    bounds,
    distances_of,
    kernel_cost,
    places,
)
from assay.harness.judge.report import FaultSeen, SuiteResult
from assay.harness.judge.traces import least_error
from assay.harness.policy import Policy
from assay.harness.sides import ROLES, Role
from assay.harness.statement import Statement, state
from assay.harness.verdict import CheckStatus, Requirement, Verdict

# Multiple of the largest divergence of prefill above which that of decode is the place to trace.
_DECODE_OVER_PREFILL = 10.0
_Passes = Mapping[str, ProbePass]
"""A server's passes by condition."""


def probed(run: RunEvidence) -> Judged:
    """Judge the probes, and say where the servers part; demand them if the sides differ in more than a backend."""
    asked = "logits" in run.spec.workload.suites and run.compares_servers and set(run.measured) == set(ROLES)
    if not asked or run.urls or not set(run.spec.treatment) - {"backend"}:
        return Judged()
    records, required = _records(run), Requirement("probes-compared")
    both = {role: _by_condition(made) for role, made in records.items()}
    if any(len(passes) < len(CONDITIONS) for passes in both.values()):
        said = next((each.problem for made in records.values() for each in made if each.problem), "")
        probed = all(registry.probed(side.engine) for side in run.spec.sides.values())
        status: CheckStatus = "missing" if probed else "not checked"
        return Judged(checks=[required.check(status, state("probes-not-asked", said=said))])
    limits = _limits(run, both["reference"])
    for role, server in run.servers.items():
        if (
            not registry.arguments(server.kind).limits_of(server.arguments, 1).prefix_cache
        ):  # as asked: the same tokens are compared, computed anew
            both[role] = {condition: _without_cache(made) for condition, made in both[role].items()}
    suite = judge_probes(both["reference"], both["candidate"], limits, run.noise)
    if suite.verdict == "regression" and (unknown := run.rounding) is not None and unknown.not_measured:
        # What differs may be the declared rounding, whose cost nothing bounds here.
        why = state("rounding-not-measured", declared=unknown.declared, said=unknown.not_measured)
        suite = suite.model_copy(update={"verdict": "inconclusive", "p_regression": None, "why": (why, *suite.why)})
    parts = {}
    if traced := [each for each in records["reference"] if each.traced]:
        place, features = traced[0].traced, traced[0].features
        base = next(each for each in both["reference"].values() if each.features == features)
        wanted: dict[Role, list[str]] = {"reference": ["trace", "trace again"], "candidate": ["trace"]}
        passes = [
            (each, run.folder.server_folder(role))
            for role, whys in wanted.items()
            for each in traced_passes(records[role], place, [(features, why) for why in whys])
        ]
        # Where fewer bits are declared, each layer may round as in bfloat16.
        least = least_error("" if any(run.noise) else run.dtype, another_kernel=True)
        differs = suite.verdict == "regression"
        parts["parting"] = parting_of(place, passes, base, limits, least, run.folder.nonce, differs=differs)
    return Judged(suite=suite, checks=[required.check("ok", suite.why[-1])], parts=parts)


def _without_cache(made: ProbePass) -> ProbePass:
    """Return a pass of a server without a prefix cache, which cannot meet the conditions that need one."""
    return made.model_copy(update={"unseen": {}, "seen": dict.fromkeys(made.features, "") | made.seen})


def faults_seen(run: RunEvidence, place: Path) -> list[FaultSeen]:
    """Say if the probes detected a fault, from a faulty server's folder; an empty list if it was not asked any."""
    reference, faulty = _by_condition(_records(run)["reference"]), passes_of(place, run.folder.nonce)
    if len(reference) < len(CONDITIONS) or not faulty:
        return []
    limits = _limits(run, reference)
    distances = distances_of(reference["cached"], faulty[0])
    mean, bound = max((distances[which].mean, limits[which].mean) for which in MEASURES)
    seen = all(not limits[which].holds(distance) for which, distance in distances.items())
    return [FaultSeen(suite="logits", seen=seen, numbers=state("fault-in-probes", mean=mean, bound=bound))]


def _records(run: RunEvidence) -> dict[Role, list[ProbePass]]:
    return {role: passes_of(run.folder.server_folder(role), run.folder.nonce) for role in ROLES}


def _limits(run: RunEvidence, reference: _Passes) -> dict[Measure, Bound]:
    return limits_of(reference, run.dtype, [*filter(None, run.noise)], run.spec.policy)


def _by_condition(made: Sequence[ProbePass]) -> dict[str, ProbePass]:
    """Return the passes of a server that were not traced, by condition."""
    return {
        condition: each
        for condition, features in CONDITIONS.items()
        for each in made
        if each.traced is None and each.complete and set(each.features) == features
    }


def limits_of(reference: _Passes, dtype: str, noise: Sequence[str], policy: Policy) -> dict[Measure, Bound]:
    """Compute the bounds of a candidate's distances from the reference.

    The floor is the reference's distance from itself under the other conditions; beyond it, another honest kernel may cost
    something, or the declared noise of both roles, or what the policy allows.
    """
    base, *others = (reference[condition] for condition in CONDITIONS)
    cost = policy.logits_limit or (kl_limit(noise) if noise else kernel_cost(dtype))
    return {measure: bound.widened(cost) for measure, bound in bounds(base, others, dtype).items()}


def judge_probes(
    reference: _Passes, candidate: _Passes, limits: Mapping[Measure, Bound], noise: Sequence[str] = ()
) -> SuiteResult:
    """Judge a candidate's passes: a regression if one differs, and a pass if all are the same and every condition was met."""
    declared = [*filter(None, noise)]
    outcomes = {
        condition: outcome(reference[condition], candidate[condition], limits, swing_limit(declared))
        for condition in CONDITIONS
    }
    unmet = [
        (condition, said)
        for condition in CONDITIONS
        for passes in (reference, candidate)
        for said in passes[condition].unseen.values()
    ]
    differing = {condition: judged for condition, judged in outcomes.items() if judged.state == "differs"}
    undecided = {condition: judged for condition, judged in outcomes.items() if judged.state not in ("differs", "same")}
    verdict: Verdict = "regression" if differing else "inconclusive" if undecided or unmet else "pass"
    excess = {condition: _excess(judged.distances, limits) for condition, judged in outcomes.items()}
    covered, metrics = _covered(reference, candidate), _metrics(outcomes, limits)
    if differing:
        condition = max(differing, key=lambda each: (excess[each], each == "cold"))
        why = [_differs(condition, differing[condition], reference[condition], limits, sorted(differing)), covered]
    elif undecided:
        why = [state("probes-undecided", parts=[(name, list(each.why)) for name, each in undecided.items()]), covered]
    else:
        most = max(bound.mean for bound in limits.values())
        why = [
            state("probes-unmet", parts=unmet) if unmet else state("probes-within", bound=most, noise=declared),
            covered,
        ]
    # A larger excess is rarer: see `assay.harness.judge.probe_scores.factor`.
    worst = max(excess.values(), default=0.0)
    p = min(1.0, len(CONDITIONS) * FALSE_ALARMS / max(worst, 1.0) ** 2) if differing and worst > 1 else None
    return SuiteResult(
        id="logits",
        synthetic=True,
        verdict=verdict,
        why=tuple(why),
        p_regression=p,
        metrics=tuple(metrics),
        decided_by=max(metrics, key=lambda each: (each.value or 0.0) / (each.bound or 1.0)).id if metrics else "",
    )


def _excess(distances: Mapping[Measure, Distance], limits: Mapping[Measure, Bound]) -> float:
    return max((limits[measure].excess(distance) for measure, distance in distances.items()), default=0.0)


def _differs(
    condition: str, judged: PassOutcome, base: ProbePass, limits: Mapping[Measure, Bound], conditions: Sequence[str]
) -> Statement:
    """State where, and by how much, a candidate differs."""
    if judged.first is None:
        return state("probes-differ-otherwise", condition=condition, conditions=list(conditions), why=list(judged.why))
    which = max(MEASURES, key=lambda each: limits[each].excess(judged.distances[each]))
    prompt = next(reply.prompt_tokens for reply in base.replies if reply.probe == judged.first.probe)
    written = judged.first.index >= prompt
    return state(
        "probes-differ", condition=condition, measure=which, mean=judged.distances[which].mean, bound=limits[which].mean,
        worst=judged.distances[which].worst, probe=judged.first.probe, token=judged.first.index - (prompt if written else 0) + 1,
        written=written, prompt=prompt, conditions=list(conditions), why=list(judged.why),
    )  # fmt: skip


def _covered(reference: _Passes, candidate: _Passes) -> Statement:
    """State what the probes covered."""
    replies = reference["cold"].replies
    chunks = next(
        (said for role in (candidate, reference) for each in role.values() if (said := each.seen.get("chunks"))), ""
    )
    return state(
        "probes-covered", probes=len(replies), shortest=min(reply.prompt_tokens for reply in replies),
        longest=max(reply.prompt_tokens for reply in replies), depth=max(len(reply.decode.tokens) for reply in replies),
        cached=candidate["cached"].seen.get("prefix-cache", ""), batched=candidate["batched"].seen.get("batch", ""), chunks=chunks,
    )  # fmt: skip


def _metrics(outcomes: Mapping[str, PassOutcome], limits: Mapping[Measure, Bound]) -> list[Metric]:
    return [
        measure(
            "probe-kl", distance.mean, part=f"{condition}-{which}", bound=limits[which].mean, condition=condition, measure=which,
            worst=distance.worst, positions=distance.positions,
        )
        for condition, judged in outcomes.items()
        for which, distance in judged.distances.items()
    ]  # fmt: skip


def farthest(reference: Sequence[ProbePass], candidate: Sequence[ProbePass]) -> tuple[tuple[str, ...], TracedPlace]:
    """Return the features and the place at which a candidate is farthest from the reference.

    It is in prefill, unless decode is `_DECODE_OVER_PREFILL` times as far: decode inherits errors of prefill, and a step in a CUDA
    graph cannot be traced. If the candidate was not asked yet, it is the last token of the deepest answer after a cached prefix.
    """
    ours, theirs = _by_condition(reference), _by_condition(candidate)
    far: dict[Measure, list[tuple[ProbePlace, tuple[str, ...]]]] = {
        which: [
            (place, made.features)
            for condition, made in ours.items()
            if condition in theirs
            for place in places(made.replies, theirs[condition].replies, which)
        ]
        for which in MEASURES
    }
    worst = {which: max(compared, key=lambda each: each[0].kl) for which, compared in far.items() if compared}
    if worst:
        decode_alone = "prefill" not in worst or (
            "decode" in worst and worst["decode"][0].kl > _DECODE_OVER_PREFILL * worst["prefill"][0].kl
        )
        at, features = worst["decode" if decode_alone else "prefill"]
        return features, TracedPlace(probe=at.probe, index=at.index)
    deepest = max(ours["cached"].replies, key=lambda reply: (len(reply.decode.tokens), reply.prompt_tokens))
    return ours["cached"].features, TracedPlace(probe=deepest.probe, index=deepest.decode.end - 1)
