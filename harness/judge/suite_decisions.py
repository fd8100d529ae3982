"""The numbers of a suite and its line of policy -> a verdict, with the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.judge.paired_accuracy import HEADROOM, MOST_UNPARSED, Accuracy
from assay.harness.judge.report import Metric
from assay.harness.policy import Policy
from assay.harness.stats.share import Interval, clopper_pearson, p_not_above
from assay.harness.verdict import Verdict


@dataclass(frozen=True)
class Decision:
    """The verdict on a share of bad items.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence with the numbers and the bound.
        value: the share of bad items; 0 if nothing was compared.
        interval: the exact one, of which each end has the error rate ``alpha``; its level is ``1 - 2 alpha``.
        p_regression: p value of "the share is within its limit".
    """

    verdict: Verdict
    why: str
    value: float
    interval: Interval
    p_regression: float


def accuracy_sentence(result: Accuracy, sides: tuple[str, str] = ("the reference", "the candidate")) -> str:
    """Explain the decision about a loss of accuracy: the numbers, and the margin."""
    n, rule, (lost, gained) = len(result.scores), result.rule, result.flips
    reference, candidate = sides
    if result.reason == "nothing":
        return "Nothing was compared: no question was answered by both roles."
    if result.reason == "unparsed":
        shares = " and ".join(
            f"{_percent(share)} of {side}'s" for side, share in zip(sides, result.unparsed, strict=True)
        )
        return (
            f"{shares} answers to {n:,} questions are unparsed, where {_percent(MOST_UNPARSED, 0)} is the most that allows a "
            "verdict. To resolve: raise the token limit, or use questions that the model answers in the required form."
        )
    if result.reason == "no headroom":
        return (
            f"{reference[0].upper()}{reference[1:]} scores {result.references.mean():.3f}, {_percent(result.least_reference)} or "
            f"more: not shown to beat guessing ({_percent(result.chance, 0)}) by {HEADROOM:g} margins of {_points(rule.margin)} "
            f"points, so a broken {candidate.removeprefix('the ')} could look no worse."
        )
    interval, loss = result.interval, result.loss
    seen = f"{lost:,} lost and {gained:,} gained of {n:,} questions"
    ends = f"{_points(interval.low)} to {_points(interval.high)}"
    of = "" if loss > 0 else "loss of "
    measured = f"{_change(loss)} ({of}{ends} points with {_percent(interval.level, 0)} confidence; {seen})"
    bound, test = f"the margin of {_points(rule.margin)} points", "exact" if result.exact else "anytime-valid"
    if result.reason == "regression":
        return f"{measured}: above {bound} ({test} p = {result.p_regression:.2g})."
    significant = loss > 0 and result.p_mcnemar < rule.alpha
    if result.reason == "non-inferior":
        but = f"; within it, the loss is significant (exact McNemar p = {result.p_mcnemar:.2g})" if significant else ""
        return f"{measured}: non-inferior, below {bound} ({test} p = {result.p_inferior:.2g}){but}."
    known = (
        f" A loss is shown (exact McNemar p = {result.p_mcnemar:.2g}), but not how large it is." if significant else ""
    )
    return (
        f"{measured}: shown neither to be below {bound} ({test} p = {result.p_inferior:.2g}) nor above it "
        f"(p = {result.p_regression:.2g}). To resolve: more questions.{known}"
    )


def decide_share(
    bad: int, n: int, limit: float, alpha: float, items: str = "items", bad_clause: str = "are bad"
) -> Decision:
    """Decide by the share of bad items.

    *regression*: the lower Clopper-Pearson bound is above the limit; *pass*: the upper bound is not; each bound one-sided,
    of level ``1 - alpha``; *inconclusive*: neither, or nothing was compared.

    Args:
        limit: largest share of bad items that still passes.

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


def bounded_metric(
    value: float, interval: Interval, id_: str, title: str, unit: str, policy: Policy, limit: str, explain: str
) -> Metric:
    """Express a number in hundredths, with its interval and its limit.

    Args:
        value: as a share of 1.
    """
    return Metric(
        id=id_,
        title=title,
        value=100 * value,
        text=f"{100 * value:.1f} {unit}",
        low=100 * interval.low,
        high=100 * interval.high,
        bound=100 * getattr(policy, limit),
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
