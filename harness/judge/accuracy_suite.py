"""Paired answers to multiple-choice questions -> the suite ``accuracy``, and the finding that says where the candidate is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.conditions import CACHED_PREFIX
from assay.harness.evidence.manifest import order_hash
from assay.harness.judge.answer_lengths import (
    AnswerEnd,
    AnswerLengths,
    check_ends,
    check_lengths,
    compare_lengths,
    lengths_finding,
    state_beyond,
)
from assay.harness.judge.answers import ConditionRow, Pair, by_condition, flips, most_telling, tally
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import LENGTH_RATIO, Metric, measure
from assay.harness.judge.paired_accuracy import Accuracy, state_accuracy
from assay.harness.judge.report import Flip, SuiteResult
from assay.harness.policy import Policy
from assay.harness.sides import ROLES, Role
from assay.harness.statement import state
from assay.harness.verdict import Check, Finding, Requirement

LOSS = "loss-of-accuracy"


_STEADY = 64  # questions that both roles got right, or wrong, to keep for reading


def claim(run: RunEvidence) -> Judged:
    """Judge the questions, and check that they were asked as planned and answered, or say that accuracy was not tested."""
    checks = []
    if "accuracy" not in run.spec.workload.suites:  # errors within bounds prove nothing about answers
        checks.append(Requirement("accuracy-tested").check("not checked", state("accuracy-not-requested")))
    if "accuracy" in run.compared:
        checks.append(_check_question_plan(run))
    if run.compared:
        mismatched = [item for suite in run.compared for item in run.pairings[suite].mismatched]
        asked = _asked(run)
        answered = {(a.suite, a.role, a.item, a.prompt_hash) for a in run.answers if a.repeat == 0}
        checks.append(_check_all_answered(len(asked), sum(key in answered for key in asked), mismatched))
    if not run.pairings["accuracy"].pairs:
        return Judged(checks=checks)
    policy = run.spec.policy
    ends = [(AnswerEnd.of(pair.reference), AnswerEnd.of(pair.candidate)) for pair in run.read]
    # Answers to questions about one passage are alike, so they count once.
    lengths = compare_lengths(ends, policy.alpha, policy.length_bound, [pair.item.unit for pair in run.read])
    findings = []
    if lengths.beyond:
        findings.append(lengths_finding(lengths, run.manifest.command))
    suite = _accuracy_suite(run, lengths)
    return Judged(suite=suite, checks=[*checks, check_lengths(lengths), check_ends(ends)], findings=findings)


def _asked(run: RunEvidence) -> list[tuple[str, Role, str, str]]:
    """List what both roles must have answered: suite, role, item and hash of the prompt."""
    needed = run.needed | {item.id for item in run.items if item.suite != "accuracy"}
    return [
        (item.suite, role, item.id, item.prompt_hash)
        for item in run.items
        if item.suite in run.compared and item.id in needed and item.id not in run.pairings[item.suite].repeated
        for role in ROLES
    ]


def _check_question_plan(run: RunEvidence) -> Check:
    """Check that order and stopping rule were recorded before the first question was asked, and match the run's."""
    plan, rule = run.question_plan, run.accuracy.rule
    expected = (run.spec.workload.order_seed, rule.margin, rule.alpha, rule.regression_alpha)
    required = Requirement("question-plan")
    if plan is None:
        differs = "no record"
    elif (plan.seed, plan.margin, plan.alpha, plan.regression_alpha) != expected:
        differs = "settings"
    elif plan.order_hash != order_hash(run.questions):
        differs = "questions"
    elif plan.population < len({item.unit or item.id for item in run.questions}):
        differs = "population"
    else:
        planned = {name: getattr(plan, name) for name in ("most", "seed", "margin", "alpha", "pairs", "stopped")}
        return required.check("ok", state("questions-planned", **planned))
    return required.check("missing", state("questions-not-planned", differs=differs))


def _check_all_answered(asked: int, answered: int, mismatched: Sequence[str]) -> Check:
    """Check that both roles answered every question."""
    numbers = {"answered": answered, "asked": asked}
    required = Requirement("all-answered")
    if mismatched:
        outcome = state("another-prompt-answered", mismatched=len(mismatched), first=mismatched[0], **numbers)
        return required.check("missing", outcome)
    return required.met(bool(asked) and answered == asked, state("all-answered", **numbers))


def _accuracy_suite(run: RunEvidence, lengths: AnswerLengths) -> SuiteResult:
    """Judge if the candidate's accuracy is non-inferior, within the policy's margin, at answers of the same length."""
    # Only the answers that the test read: one set for every number of the suite. Answers after the verdict are left out.
    pairs, result, policy, workload = run.read, run.accuracy, run.spec.policy, run.spec.workload
    lost, gained = flips(pairs)
    tallies = (tally(pairs, "reference"), tally(pairs, "candidate"))
    by_length = lengths.beyond and result.verdict != "regression"
    why = state_accuracy(result), state("policy", lines=[policy.line("margin")])
    return SuiteResult(
        id="accuracy",
        asked="" if workload.synthetic else workload.data,
        synthetic=workload.synthetic,
        verdict="regression" if by_length else result.verdict,
        why=(state_beyond(lengths), *why) if by_length else why,
        p_regression=None if by_length else result.p_regression,
        metrics=(
            *_metrics(run),
            _ratio_metric(lengths, policy),
        ),
        decided_by=LENGTH_RATIO if by_length else LOSS,
        tallies=tallies,
        conditions=tuple(by_condition(pairs)),
        flips=(*(_flip(pair, "lost") for pair in lost), *(_flip(pair, "gained") for pair in gained)),
        steady=tuple(
            _flip(pair, "both right" if pair.right("reference") else "both wrong") for pair in pairs if not pair.loss
        )[:_STEADY],
    )


def _metrics(run: RunEvidence) -> tuple[Metric, ...]:
    n, flips = len(run.read), sum(run.again)
    again = flips / len(run.again) if run.again else None
    return (
        _loss_metric(run.spec.policy, run.accuracy, questions=n),
        measure("flip-floor", again, flips=flips, questions=len(run.again)),
        measure("questions", n, most=len(run.questions)),
    )


def _ratio_metric(lengths: AnswerLengths, policy: Policy) -> Metric:
    """Make the metric of the ratio of lengths."""
    numbers = lengths.model_dump(exclude={"p_beyond", "p_cut"})
    return Metric(
        id=LENGTH_RATIO, quantity=LENGTH_RATIO, value=lengths.ratio, low=lengths.low, high=lengths.high, bound=1 + lengths.bound,
        policy=policy.line("length_bound"), values=numbers,
    )  # fmt: skip


def _loss_metric(policy: Policy, result: Accuracy, questions: int) -> Metric:
    """Make the metric of a loss of accuracy, in points."""
    interval = result.interval
    return measure(
        LOSS,
        100 * result.loss,
        low=100 * interval.low,
        high=100 * interval.high,
        bound=100 * policy.margin,
        policy=policy.line("margin"),
        level=interval.level,
        questions=questions,
    )


def _flip(pair: Pair, direction: Literal["lost", "gained", "both right", "both wrong"]) -> Flip:
    return Flip(
        item=pair.item.id,
        group=pair.item.group,
        direction=direction,
        prompt=pair.item.prompt,
        expected=pair.item.expected or "",
        reference_text=pair.reference.text,
        candidate_text=pair.candidate.text,
        reference_parsed=pair.reference.parsed,
        candidate_parsed=pair.candidate.parsed,
        candidate_cached_tokens=pair.candidate.cached_tokens,
    )


def accuracy_finding(pairs: Sequence[Pair], reproduce: str) -> Finding:
    """Find where a candidate that lost accuracy is wrong: the condition that separates right from wrong answers best."""
    telling = most_telling(by_condition(pairs))
    unparsed = tally(pairs, "candidate").unparsed
    lost, _ = flips(pairs)
    evidence = [state("questions-lost", count=len(lost), first=[pair.item.id for pair in lost[:3]])]
    if unparsed:
        evidence.append(state("candidate-unparsed", unparsed=unparsed, answers=len(pairs)))
    if telling is None:
        where, claim = "all observed conditions", state("no-telling-condition")
    else:
        broken = telling.broken
        where = f"{broken[0].title} {', '.join(row.bucket for row in broken)}"
        rows = {name: [_row(row) for row in getattr(telling, name)] for name in ("intact", "broken")}
        cached = broken[0].by == CACHED_PREFIX.id
        claim = state("telling-condition", split=broken[0].title, p=telling.p, cached_prefix=cached, **rows)
    return Finding(
        id="accuracy",
        title="loss of accuracy",
        severity="serious",
        where=where,
        claim=claim,
        shown_by=tuple(evidence),
        reproduce=reproduce,
    )


def _row(row: ConditionRow) -> tuple[str, int, int, int]:
    """Return the bucket of a condition, its right answers by the candidate and by the reference, and its questions."""
    return row.bucket, row.candidate_right, row.reference_right, row.items
