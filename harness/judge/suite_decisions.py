"""The numbers of a suite and its line of policy -> a verdict, with the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.harness.stats.paired import mcnemar_exact, questions_needed, smallest_detectable, tango_interval
from assay.harness.stats.share import Interval, clopper_pearson, p_not_above
from assay.harness.verdict import Verdict

CHANCE = 0.25
"""Accuracy of guessing among four options."""
GUESSING_ALPHA = 0.01
"""The reference is better than guessing if the p value of "it guesses" is below this."""
MAX_NEEDED = 100_000
"""A larger number of items is not useful advice, and is not given."""


@dataclass(frozen=True)
class Decision:
    """The verdict on the accuracy of a candidate against a reference.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence with the numbers and the bound.
        n: questions that both roles answered.
        loss: the reference's accuracy minus the candidate's, as a share of 1; negative for a gain.
        interval: two-sided score interval of the loss; [-1, 1] if nothing was compared.
        p_two_sided: exact McNemar p value of "no difference".
        smallest_detectable: the loss that ``n`` questions would have detected with a power of 0.8; None if they could not have
            detected any.
    """

    verdict: Verdict
    why: str
    n: int
    loss: float
    interval: Interval
    p_two_sided: float
    smallest_detectable: float | None


def decide_accuracy(
    n: int, both_right: int, lost: int, gained: int, both_wrong: int, margin: float, alpha: float
) -> Decision:
    """Decide by the paired answers to ``n`` questions.

    - *pass*: non-inferior, that is, the upper end of the interval of the loss is below the margin. (A significant loss that
      is certainly smaller than the margin passes.)
    - *regression*: not non-inferior, and the loss is significant (McNemar's exact test, two-sided, below ``alpha``).
    - *inconclusive*: neither; or nothing was compared; or the reference is not clearly better than guessing, since a broken
      candidate looks no worse than a reference that cannot answer.

    Args:
        n: questions that both roles answered.
        both_right: right by both roles.
        lost: right by the reference only.
        gained: right by the candidate only.
        both_wrong: right by neither. An unparsed answer is not right.
        margin: largest loss that still passes, as a share of 1.
        alpha: error rate of the interval (of level ``1 - alpha``) and of the test.

    Raises:
        ValueError: counts that do not add up to ``n``.
    """
    if min(both_right, lost, gained, both_wrong) < 0 or both_right + lost + gained + both_wrong != n:
        raise ValueError(f"{both_right} + {lost} + {gained} + {both_wrong} is not {n}")
    tests = mcnemar_exact(lost, gained)
    interval = tango_interval(lost, gained, n, alpha) if n else Interval(-1.0, 1.0, 1 - alpha)
    loss = (lost - gained) / n if n else 0.0
    p_guesses = p_not_above(both_right + lost, n, CHANCE)
    seen = f"{lost} lost and {gained} gained of {n} questions"
    ends = f"{_points(interval.low)} to {_points(interval.high)}"
    of = "" if loss > 0 else "loss of "
    measured = f"{_change(loss)} ({of}{ends} points with {_percent(interval.level, 0)} confidence; {seen})"
    p = f"exact McNemar p = {tests.two_sided:.2g}"
    bound = f"the margin of {_points(margin)} points"
    verdict: Verdict = "inconclusive"
    if n == 0:
        why = "Nothing was compared: no question was answered by both roles."
    elif p_guesses >= GUESSING_ALPHA:
        why = (
            f"The reference is right on {both_right + lost} of {n} questions, not clearly better than guessing "
            f"({_percent(CHANCE, 0)}; p = {p_guesses:.2g}, not below {GUESSING_ALPHA:g}): a broken candidate would look no worse."
        )
    elif interval.high < margin:
        verdict = "pass"
        but = f", although significant ({p})" if loss > 0 and tests.two_sided < alpha else ""
        why = f"{measured}: non-inferior, below {bound}{but}."
    elif loss > 0 and tests.two_sided < alpha:
        verdict = "regression"
        beyond = "beyond" if interval.low >= margin else "not shown to stay below"
        why = f"{measured}: significant ({p}) and {beyond} {bound}."
    else:
        estimate = questions_needed(margin, (lost + gained + 0.5) / (n + 1), alpha / 2, loss=loss)
        needed = max(n + 1, estimate) if estimate <= MAX_NEEDED else None
        why = (
            f"{measured}: neither shown to stay below {bound} nor significant ({p}); "
            f"{_to_resolve(needed, 'questions')}, if answers keep flipping at this rate."
        )
    return Decision(
        verdict=verdict,
        why=why,
        n=n,
        loss=loss,
        interval=interval,
        p_two_sided=tests.two_sided,
        smallest_detectable=smallest_detectable(n, (lost + gained) / n, alpha / 2) if n else None,
    )


@dataclass(frozen=True)
class ShareDecision:
    """The verdict on a share of bad items.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence with the numbers and the bound.
        share: bad items, as a share of 1; 0 if nothing was compared.
        interval: exact interval of which each end has the error rate ``alpha``; its level is ``1 - 2 alpha``.
    """

    verdict: Verdict
    why: str
    share: float
    interval: Interval


def decide_share(
    bad: int, n: int, limit: float, alpha: float, items: str = "items", bad_clause: str = "are bad"
) -> ShareDecision:
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
        needed = _items_needed(bad / n, n, limit, alpha)
        why = (
            f"{measured}: neither shown to be at most {bound} nor above it; "
            f"{_to_resolve(needed, items)}, if the share stays the same."
        )
    return ShareDecision(verdict, why, share, interval)


def _items_needed(share: float, n: int, limit: float, alpha: float) -> int | None:
    """Number of items that would decide at the same share; None where no practical number would."""
    from scipy.special import bdtr, bdtrc  # costs 0.2 s to import, and only an undecided share needs it

    sizes = np.arange(n + 1, MAX_NEEDED + 1)
    # A Clopper-Pearson bound is beyond the limit where the binomial tail at the limit is below alpha.
    if share <= limit:
        decided = bdtr(np.ceil(share * sizes), sizes, limit) <= alpha
    else:
        decided = bdtrc(np.floor(share * sizes) - 1, sizes, limit) < alpha
    return int(sizes[decided.argmax()]) if decided.any() else None


def _to_resolve(needed: int | None, items: str) -> str:
    return f"to resolve: about {needed:,} {items}" if needed else f"no practical number of {items} would resolve this"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # adding 0 turns -0.0 into 0.0


def _change(loss: float) -> str:
    """The loss in points, in words."""
    if _points(loss) == "0.0":
        return "No loss" if loss <= 0 else f"A loss of {100 * loss:.2g} points"
    return f"A loss of {_points(loss)} points" if loss > 0 else f"A gain of {_points(-loss)} points"
