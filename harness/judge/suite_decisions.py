"""The numbers of a suite and its line of policy -> a verdict, with the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.compare.answers import flips
from assay.harness.compare.paired_accuracy import HEADROOM, MOST_UNPARSED, Outcome, Prefix, Rule, outcome_of, verdict_of
from assay.harness.judge.report import Metric
from assay.harness.policy import Policy
from assay.harness.sides import ROLES
from assay.harness.stats.betting import betting_interval
from assay.harness.stats.binomial import mcnemar
from assay.harness.stats.share import Interval, clopper_pearson, p_not_above
from assay.harness.verdict import Verdict


@dataclass(frozen=True)
class Decision:
    """The verdict on the number that decides a suite.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence with the numbers and the bound.
        value: the loss (the reference's accuracy minus the candidate's, negative for a gain; each unit counts once) or the share of
            bad items, as a share of 1; 0 if nothing was compared.
        interval: of a loss, those that no bets have rejected, which holds at every look; [-1, 1] if nothing was compared. Of a
            share, the exact interval of which each end has the error rate ``alpha``; its level is ``1 - 2 alpha``.
        p_regression: p value of "the number is within its limit"; of a loss anytime-valid.
    """

    verdict: Verdict
    why: str
    value: float
    interval: Interval
    p_regression: float


def decide_accuracy(prefix: Prefix, rule: Rule) -> Decision:
    """Decide by the paired answers to the questions, by the anytime-valid test of `assay.harness.compare.paired_accuracy`.

    - *pass*: non-inferior: the loss is shown to be below the margin. (A loss within it may be significant; the sentence says so.)
    - *regression*: the loss is shown to be above the margin.
    - *inconclusive*: neither; or nothing was compared; or too many answers are unparsed; or the reference is so near to guessing
      that a loss could not show.
    """
    outcome = outcome_of(prefix, rule)
    n, interval = len(prefix.pairs), betting_interval(prefix.losses, rule.alpha, -1, 1, rule.population)
    loss = float(prefix.losses.mean()) if n else 0.0
    why = _why(prefix, rule, outcome, loss, interval)
    return Decision(verdict_of(outcome.reason), why, loss, interval, outcome.p_regression)


def _why(prefix: Prefix, rule: Rule, outcome: Outcome, loss: float, interval: Interval) -> str:
    n = len(prefix.pairs)
    lost, gained = map(len, flips(prefix.pairs))
    p_mcnemar = mcnemar(lost, gained)
    if outcome.reason == "nothing":
        return "Nothing was compared: no question was answered by both roles."
    if outcome.reason == "unparsed":
        shares = " and ".join(f"{_percent(prefix.unparsed_share(role))} of the {role}'s" for role in ROLES)
        return (
            f"{shares} answers to {n} questions are unparsed, where {_percent(MOST_UNPARSED, 0)} is the most that allows a "
            "verdict: raise --max-tokens, or use questions that the model answers in the required form."
        )
    if outcome.reason == "no headroom":
        right = sum(pair.right("reference") for pair in prefix.pairs)
        lower = betting_interval(prefix.reference, rule.alpha, 0, 1, rule.population).low
        return (
            f"The reference is right on {right} of {n} questions, {_percent(lower)} or more: not shown to beat guessing "
            f"({_percent(prefix.chance, 0)}) by {HEADROOM:g} margins of {_points(rule.margin)} points, so a broken candidate could "
            "look no worse."
        )
    seen = f"{lost} lost and {gained} gained of {n} questions"
    ends = f"{_points(interval.low)} to {_points(interval.high)}"
    of = "" if loss > 0 else "loss of "
    measured = f"{_change(loss)} ({of}{ends} points with {_percent(interval.level, 0)} confidence; {seen})"
    bound = f"the margin of {_points(rule.margin)} points"
    if outcome.reason == "regression":
        return f"{measured}: above {bound} (anytime-valid p = {outcome.p_regression:.2g})."
    significant = loss > 0 and p_mcnemar < rule.alpha
    if outcome.reason == "non-inferior":
        but = f"; within it, the loss is significant (exact McNemar p = {p_mcnemar:.2g})" if significant else ""
        return f"{measured}: non-inferior, below {bound} (anytime-valid p = {outcome.p_inferior:.2g}){but}."
    known = f" A loss is shown (exact McNemar p = {p_mcnemar:.2g}), but not how large it is." if significant else ""
    return (
        f"{measured}: shown neither to be below {bound} (anytime-valid p = {outcome.p_inferior:.2g}) nor above it "
        f"(p = {outcome.p_regression:.2g}); to resolve: more questions.{known}"
    )


def decide_share(
    bad: int, n: int, limit: float, alpha: float, items: str = "items", bad_clause: str = "are bad"
) -> Decision:
    """Decide by the share of bad items.

    *regression*: the lower Clopper-Pearson bound is above the limit; *pass*: the upper bound is not; each bound one-sided,
    of level ``1 - alpha``; *inconclusive*: neither, or nothing was compared.

    Args:
        bad: number of bad items.
        n: number of items.
        limit: largest share of bad items that still passes.
        alpha: error rate of each bound.
        items: their name in the sentence, in the plural.
        bad_clause: what the sentence says of bad items, for example "are bad".

    Raises:
        ValueError: ``bad`` is negative or above ``n``.
    """
    interval = clopper_pearson(bad, n, 2 * alpha)
    share = bad / n if n else 0.0
    ends = f"{_percent(interval.low)} to {_percent(interval.high)}"
    measured = (
        f"{bad} of {n} {items} {bad_clause} ({_percent(share)}; {ends} with {_percent(interval.level, 0)} confidence)"
    )
    bound = f"the limit of {_percent(limit)}"
    verdict: Verdict = "inconclusive"
    if n == 0:
        why = f"Nothing was compared: there are no {items}."
    elif interval.high <= limit:
        verdict = "pass"
        why = f"{measured}, at most {bound}."
    elif interval.low > limit:
        verdict = "regression"
        why = f"{measured}, above {bound}."
    else:
        why = f"{measured}: neither shown to be at most {bound} nor above it; to resolve: more {items}."
    return Decision(verdict, why, share, interval, p_not_above(bad, n, limit) if n else 1.0)


def decision_metric(
    decision: Decision, id_: str, title: str, unit: str, policy: Policy, limit: str, explain: str
) -> Metric:
    """Express the number of a decision in hundredths, with its interval and its limit.

    Args:
        decision: on the number.
        id_: of the metric.
        title: of the metric.
        unit: "points" or "%".
        policy: whose line is the bound.
        limit: name of the line.
        explain: what the number is.
    """
    return Metric(
        id=id_,
        title=title,
        value=100 * decision.value,
        text=f"{100 * decision.value:.1f} {unit}",
        low=100 * decision.interval.low,
        high=100 * decision.interval.high,
        bound=100 * getattr(policy, limit),
        bound_is="most",
        policy=policy.line(limit),
        explain=explain,
    )


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # adding 0 turns -0.0 into 0.0


def _change(loss: float) -> str:
    """Describe the loss in points."""
    if _points(loss) == "0.0":
        return "No loss" if loss <= 0 else f"A loss of {100 * loss:.2g} points"
    return f"A loss of {_points(loss)} points" if loss > 0 else f"A gain of {_points(-loss)} points"
