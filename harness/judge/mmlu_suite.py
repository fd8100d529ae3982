"""Paired answers to multiple-choice questions -> the suite ``mmlu``, and the finding that says where the candidate is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.compare.answer_conditions import by_condition, most_telling
from assay.harness.compare.answers import Flips, Pair, Tally, flips, tally
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.config import RunSpec
from assay.harness.judge.report import Flip, Metric, SuiteResult
from assay.harness.judge.suite_decisions import Decision, decide_accuracy
from assay.harness.verdict import Finding

_LOSS = "loss-of-accuracy"


def accuracy_suite(spec: RunSpec, pairs: Sequence[Pair]) -> SuiteResult:
    """Whether the candidate's accuracy is non-inferior, within the policy's margin."""
    flipped = flips(pairs)
    decision = decide_accuracy(
        n=len(pairs),
        both_right=flipped.both_right,
        lost=len(flipped.lost),
        gained=len(flipped.gained),
        both_wrong=flipped.both_wrong,
        margin=spec.margin,
        alpha=spec.alpha,
    )
    tallies = (tally(pairs, "reference"), tally(pairs, "candidate"))
    return SuiteResult(
        id="mmlu",
        title="Multiple-choice questions" if spec.synthetic else f"Multiple-choice questions of {spec.data}",
        synthetic=spec.synthetic,
        verdict=decision.verdict,
        why=f"{decision.why} Policy: {spec.policy_line('margin')}.",
        metrics=_metrics(spec, decision, tallies, flipped),
        decided_by=_LOSS,
        tallies=tallies,
        conditions=tuple(by_condition(pairs)),
        flips=(*(_flip(one, "lost") for one in flipped.lost), *(_flip(one, "gained") for one in flipped.gained)),
    )


def _metrics(spec: RunSpec, decision: Decision, tallies: tuple[Tally, Tally], flipped: Flips) -> tuple[Metric, ...]:
    n, least = decision.n, decision.smallest_detectable
    accuracies = [
        Metric(
            id=f"{one.role}-accuracy",
            title=f"{one.role} accuracy",
            value=one.right / n,
            text=f"{one.right / n:.3f}",
            explain=f"{one.right} of {n}",
        )
        for one in tallies
    ]
    return (
        *accuracies,
        loss_metric(spec, decision, _LOSS, "loss of accuracy", "Reference minus candidate"),
        Metric(
            id="flips",
            title="flips",
            value=len(flipped.lost) + len(flipped.gained),
            text=f"{len(flipped.lost)} lost, {len(flipped.gained)} gained",
            explain=f"Exact McNemar p = {decision.p_two_sided:.2g}",
        ),
        Metric(
            id="smallest-detectable-loss",
            title="smallest detectable loss",
            value=None if least is None else 100 * least,
            text="none" if least is None else f"{100 * least:.1f} points",
            explain=f"Loss that {n} questions detect with a power of 0.8",
        ),
    )


def loss_metric(spec: RunSpec, decision: Decision, id_: str, title: str, difference: str) -> Metric:
    """A loss of accuracy in percentage points, with its interval and the margin.

    Args:
        spec: whose margin is the bound.
        decision: on the paired answers.
        id_: of the metric.
        title: of the metric.
        difference: what is subtracted from what; starts a sentence.
    """
    return Metric(
        id=id_,
        title=title,
        value=100 * decision.loss,
        text=f"{100 * decision.loss:.1f} points",
        low=100 * decision.interval.low,
        high=100 * decision.interval.high,
        bound=100 * spec.margin,
        bound_is="most",
        policy=spec.policy_line("margin"),
        explain=f"{difference}, with its {100 * decision.interval.level:.0f} % Tango score interval",
    )


def _flip(one: Pair, direction: Literal["lost", "gained"]) -> Flip:
    return Flip(
        item=one.item.id,
        group=one.item.group,
        direction=direction,
        prompt=one.item.prompt,
        expected=one.item.expected or "",
        reference_text=one.reference.text,
        candidate_text=one.candidate.text,
        reference_parsed=one.reference.parsed,
        candidate_parsed=one.candidate.parsed,
        candidate_cached_tokens=one.candidate.cached_tokens,
    )


def accuracy_finding(pairs: Sequence[Pair], reproduce: str) -> Finding:
    """Where a candidate that lost accuracy is wrong: the condition that separates right from wrong answers best.

    Args:
        pairs: the answers.
        reproduce: the command that repeats the run.
    """
    telling = most_telling(by_condition(pairs))
    unparsed = tally(pairs, "candidate").unparsed
    lost = flips(pairs).lost
    evidence = [f"{len(lost)} questions lost; the first: {', '.join(one.item.id for one in lost[:3])}"]
    if unparsed:
        evidence.append(f"{unparsed} of the candidate's {len(pairs)} answers could not be parsed")
    if telling is None:
        where, diagnosis = "all observed conditions", "No condition separates right from wrong answers."
    else:
        where = f"{telling.title} {', '.join(row.bucket for row in telling.broken)}"
        diagnosis = f"{telling.summary}."
        if telling.by == CACHED_PREFIX.id:
            diagnosis += (
                " The kernel is correct without a cached prefix: check how its causal mask is aligned when there are more keys"
                " than queries (query i must see keys j <= i + len_k - len_q)."
            )
    return Finding(
        id="accuracy",
        title="loss of accuracy",
        severity="serious",
        where=where,
        diagnosis=diagnosis,
        evidence=tuple(evidence),
        reproduce=reproduce,
    )
