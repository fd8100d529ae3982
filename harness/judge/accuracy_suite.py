"""Paired answers to multiple-choice questions -> the suite ``accuracy``, and the finding that says where the candidate is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.conditions import CACHED_PREFIX
from assay.harness.evidence.manifest import order_hash
from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.judge.answer_lengths import (
    LENGTH_RATIO,
    AnswerEnd,
    AnswerLengths,
    beyond_words,
    check_ends,
    check_lengths,
    compare_lengths,
    lengths_finding,
)
from assay.harness.judge.answers import Pair, by_condition, flips, most_telling, tally
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.paired_accuracy import Accuracy, accuracy_sentence
from assay.harness.judge.report import Flip, Metric, SuiteResult
from assay.harness.judge.requirements import REQUIRED
from assay.harness.policy import Policy
from assay.harness.sides import ROLES, Role
from assay.harness.verdict import Check, Finding
from assay.harness.workload import Workload

LOSS = "loss-of-accuracy"


def claim(run: RunEvidence) -> Judged:
    """Judge the questions, and check that they were asked as planned and answered, or say that accuracy was not tested."""
    checks = []
    if "accuracy" not in run.spec.workload.suites:  # own errors within bounds prove nothing about answers
        settles = "assay run, or add accuracy to --suites"
        checks.append(REQUIRED["accuracy-tested"].check("not checked", "the suite accuracy was not requested", settles))
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
        findings.append(
            lengths_finding(lengths, run.manifest.command, "every answer costs as much more or less.", serious=True)
        )
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
    """Check that order and stopping rule were recorded before the first question was asked, and are those of the run."""
    plan, rule = run.question_plan, run.accuracy.rule
    expected = (run.spec.workload.order_seed, rule.margin, rule.alpha, rule.regression_alpha)
    if plan is None:
        observed = "no record"
    elif (plan.seed, plan.margin, plan.alpha, plan.regression_alpha) != expected:
        observed = "a record of another seed, margin or alpha than the run's"
    elif plan.order_hash != order_hash(run.questions):
        observed = "a record of other questions, or of another order"
    elif plan.population < len({item.unit or item.id for item in run.questions}):
        observed = "a record of a smaller set of questions"
    else:
        at_most = f"at most {plan.most:,} questions in the random order of seed {plan.seed}"
        stop = f"; stopped after {plan.pairs:,}: {plan.stopped}" if plan.stopped else ""
        return REQUIRED["question-plan"].check("ok", f"{at_most}, margin {plan.margin:g}, alpha {plan.alpha:g}{stop}")
    return REQUIRED["question-plan"].check("missing", observed, RUN_AGAIN)


def _check_all_answered(asked: int, answered: int, mismatched: Sequence[str]) -> Check:
    """Check that both roles answered every question."""
    observed, settles = f"{answered} of {asked}", "repeat the command, which resumes where it stopped"
    if mismatched:
        observed += f"; answers to another prompt: {len(mismatched)}, the first to {mismatched[0]}"
        settles = "run again with a new --out: these answers do not belong to this run's questions"
    return REQUIRED["all-answered"].met(bool(asked) and answered == asked and not mismatched, observed, settles)


def _accuracy_suite(run: RunEvidence, lengths: AnswerLengths) -> SuiteResult:
    """Judge if the candidate's accuracy is non-inferior, within the policy's margin, at answers of the same length."""
    # Only what the test read: one set of answers for every number of the suite. Answers that arrived after the verdict are in none.
    pairs, result, policy, workload = run.read, run.accuracy, run.spec.policy, run.spec.workload
    lost, gained = flips(pairs)
    tallies = (tally(pairs, "reference"), tally(pairs, "candidate"))
    by_length = lengths.beyond and result.verdict != "regression"
    why = f"{accuracy_sentence(result)} Policy: {policy.line('margin')}."
    return SuiteResult(
        id="accuracy",
        title=_title(workload),
        synthetic=workload.synthetic,
        verdict="regression" if by_length else result.verdict,
        why=f"{beyond_words(lengths)} {why}" if by_length else why,
        p_regression=None if by_length else result.p_regression,
        metrics=(
            *_metrics(run),
            _ratio_metric(lengths, policy),
        ),
        decided_by=LENGTH_RATIO if by_length else LOSS,
        tallies=tallies,
        conditions=tuple(by_condition(pairs)),
        flips=(*(_flip(pair, "lost") for pair in lost), *(_flip(pair, "gained") for pair in gained)),
    )


def _title(workload: Workload) -> str:
    if workload.synthetic:
        return "Multiple-choice questions"
    named = any(workload.data.partition(":")[0] == name for name in ("gsm8k", "retrieval", "lm-eval"))
    return f"Questions of {workload.data}" if named else f"Multiple-choice questions of {workload.data}"


def _metrics(run: RunEvidence) -> tuple[Metric, ...]:
    n, most, result = len(run.read), len(run.questions), run.accuracy
    return (
        loss_metric(
            run.spec.policy,
            result,
            LOSS,
            "loss of accuracy",
            f"Over the first {n:,} questions: reference minus candidate",
        ),
        Metric(
            id="flip-floor",
            title="reference's own flips",
            value=sum(run.again) / len(run.again) if run.again else None,
            text=f"{sum(run.again)} of {len(run.again)}" if run.again else "not measured",
            explain="Questions that the reference, asked twice, got right only once",
        ),
        Metric(
            id="questions",
            title="questions until the verdict",
            value=n,
            text=f"{n:,} of at most {most:,}",
            explain="The test looks after each question, in random order, and asking stops when it has decided",
        ),
    )


def _ratio_metric(lengths: AnswerLengths, policy: Policy) -> Metric:
    """Express the ratio with its interval and its bound."""
    return Metric(
        id=LENGTH_RATIO,
        title="length of answers, candidate over reference",
        value=lengths.ratio,
        text="not measured" if lengths.ratio is None else f"{lengths.ratio:.3f}",
        low=lengths.low,
        high=lengths.high,
        bound=1 + lengths.bound,
        policy=policy.line("length_bound"),
        explain=f"{lengths.text[0].upper()}{lengths.text[1:]}; as far below 1 is out of bounds too",
    )


def loss_metric(policy: Policy, result: Accuracy, id_: str, title: str, difference: str) -> Metric:
    """Express a loss of accuracy; `difference` says what is subtracted from what, and starts a sentence."""
    level = f"{100 * result.interval.level:.0f} %"
    return Metric(
        id=id_,
        title=title,
        value=100 * result.loss,
        text=f"{100 * result.loss:.1f} points",
        low=100 * result.interval.low,
        high=100 * result.interval.high,
        bound=100 * policy.margin,
        policy=policy.line("margin"),
        explain=f"{difference}, with its {level} interval by betting, which holds at every look",
    )


def _flip(pair: Pair, direction: Literal["lost", "gained"]) -> Flip:
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
    evidence = [f"{len(lost)} questions lost; the first: {', '.join(pair.item.id for pair in lost[:3])}"]
    if unparsed:
        evidence.append(f"{unparsed} of the candidate's {len(pairs)} answers could not be parsed")
    if telling is None:
        where, diagnosis = "all observed conditions", "No condition separates right from wrong answers."
    else:
        _, broken, summary = telling
        where = f"{broken[0].title} {', '.join(row.bucket for row in broken)}"
        diagnosis = f"{summary}."
        if broken[0].by == CACHED_PREFIX.id:
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
