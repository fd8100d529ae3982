"""Pairs of scores and a margin -> a decision: the test that fits how the answers came about, and the sentence that explains it.

Which test:

- *exact*, for right or wrong answers of complete results: the set was fixed beforehand, so one look is made, and
  the test of a fixed number of pairs is valid and needs fewer of them (`assay.harness.stats.paired_margin`).
- *betting*, for results that stopped because of their answers, as assay's own runs do, and for scores that are not 0 or 1: valid
  whenever one stopped, and for any bounded score (`assay.harness.stats.betting`). Repeats of a document are not independent, so
  their mean is one value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.harness.compare.paired_accuracy import HEADROOM, MOST_UNPARSED, Rule, reason_of, verdict_of
from assay.harness.ingest.results.pairing import ItemPair, guessing
from assay.harness.stats.betting import betting_interval, log_wealth, log_wealth_below, p_value
from assay.harness.stats.paired import mcnemar_exact
from assay.harness.stats.paired_margin import loss_interval, p_not_above, p_not_below
from assay.harness.stats.share import Interval, clopper_pearson
from assay.harness.text import percent
from assay.harness.verdict import Verdict

Test = Literal["exact", "betting"]


@dataclass(frozen=True)
class PairDecision:
    """The verdict on paired scores.

    Attributes:
        verdict: "pass", "regression" or "inconclusive".
        why: one sentence.
        test: which one was made.
        a, b: mean scores.
        lost, gained: pairs in which B's score is lower, and higher.
        loss: A's mean score minus B's, each document once.
        interval: of the loss; its level is ``1 - 2 alpha``.
        p_two_sided: exact McNemar p value of "no difference"; it decides nothing.
        p_inferior: p value of "the loss is at least the margin".
        p_regression: p value of "the loss is at most the margin".
    """

    verdict: Verdict
    why: str
    test: Test
    a: float
    b: float
    lost: int
    gained: int
    loss: float
    interval: Interval
    p_two_sided: float
    p_inferior: float
    p_regression: float


def decide_pairs(pairs: Sequence[ItemPair], rule: Rule, adaptive: bool = False) -> PairDecision:
    """Decide by the paired scores.

    - *regression*: the loss is shown to be above the margin.
    - *pass*: the loss is shown to be below it, no more than `MOST_UNPARSED` of either side's answers are unparsed, and A is
      shown to beat guessing by `HEADROOM` margins: where nothing can be lost, an equal score shows nothing.
    - *inconclusive*: neither.

    Args:
        pairs: in the order in which they were asked.
        rule: of the test.
        adaptive: whether either side stopped asking because of its answers.
    """
    if not pairs:
        nothing = "Nothing was compared: no document could be paired."
        return PairDecision(
            "inconclusive", nothing, "exact", 0, 0, 0, 0, 0, Interval(-1, 1, 1 - 2 * rule.alpha), 1, 1, 1
        )
    lost, gained = (sum(pair.loss * sign > 0 for pair in pairs) for sign in (1, -1))
    binary = all(pair.a.score in (0, 1) and pair.b.score in (0, 1) for pair in pairs)
    alone = len({pair.a.key for pair in pairs}) == len(pairs)
    test: Test = "exact" if binary and alone and not adaptive else "betting"
    if test == "exact":
        n = len(pairs)
        interval = loss_interval(lost, gained, n, rule.alpha)
        p_inferior, p_regression = p_not_below(lost, gained, n, rule.margin), p_not_above(lost, gained, n, rule.margin)
        loss = (lost - gained) / n
    else:
        values = _units(pairs, adaptive)
        interval = betting_interval(values, rule.alpha, -1, 1)
        p_inferior = p_value(log_wealth_below(values, rule.margin, -1, 1))
        p_regression = p_value(log_wealth(values, rule.margin, -1, 1))
        loss = float(np.mean(values))
    a, b = (float(np.mean([getattr(pair, side).score for pair in pairs])) for side in ("a", "b"))
    p_two_sided = mcnemar_exact(lost, gained).two_sided
    found = PairDecision(
        "inconclusive", "", test, a, b, lost, gained, loss, interval, p_two_sided, p_inferior, p_regression
    )
    verdict, why = _verdict(pairs, rule, found)
    return PairDecision(**{**found.__dict__, "verdict": verdict, "why": why})


def _units(pairs: Sequence[ItemPair], adaptive: bool) -> np.ndarray:
    """Compute the mean loss of each document: in the order of a run, which is random; otherwise in the order of the keys' hashes.

    Files are often sorted by subject, and bets win or lose on values that come in a random order.
    """
    units: dict[str, list[float]] = {}
    for pair in pairs:
        units.setdefault(pair.a.key, []).append(pair.loss)
    keys = list(units) if adaptive else sorted(units, key=lambda key: hashlib.sha256(key.encode()).digest())
    return np.array([sum(units[key]) / len(units[key]) for key in keys])


def _verdict(pairs: Sequence[ItemPair], rule: Rule, found: PairDecision) -> tuple[Verdict, str]:
    points = 100 * rule.margin
    seen = f"{found.lost:,} lost and {found.gained:,} gained of {len(pairs):,}"
    ends = f"{100 * found.interval.low:.1f} to {100 * found.interval.high:.1f}"
    level = percent(found.interval.level)
    measured = f"Loss {100 * found.loss + 0.0:.1f} points ({ends} with {level} confidence; {seen})"
    name = "exact" if found.test == "exact" else "anytime-valid"
    shares = [sum(getattr(pair, side).parsed is None for pair in pairs) / len(pairs) for side in ("a", "b")]
    guess, right = guessing(pairs), found.a
    lower = clopper_pearson(int(right * len(pairs)), len(pairs), 2 * rule.alpha).low
    reason = reason_of(
        rule,
        found.p_regression,
        found.p_inferior,
        (shares[0], shares[1]),
        lower > guess + HEADROOM * rule.margin,
        always_regresses=True,
    )
    unparsed = [(side, share) for side, share in zip("AB", shares, strict=True) if share > MOST_UNPARSED]
    if reason == "regression":
        why = f"{measured}: above the margin of {points:g} points ({name} p = {found.p_regression:.2g})."
    elif unparsed:
        side, share = unparsed[0]
        why = (
            f"{measured}, but {percent(share)} of {side}'s answers are unparsed, where {percent(MOST_UNPARSED)} is the most that "
            "allows a pass. To resolve: raise the token limit, or use a filter that finds the answers."
        )
    elif reason == "no headroom":
        why = (
            f"{measured}, but A scores {right:.3f}, which is not shown to beat guessing ({guess:.3f}) by {HEADROOM:g} margins, "
            "so a broken B could look no worse. To resolve: a task that the model can do, or more documents."
        )
    elif reason == "non-inferior":
        why = f"{measured}: non-inferior, below the margin of {points:g} points ({name} p = {found.p_inferior:.2g})."
    else:
        why = (
            f"{measured}: shown neither to be below the margin of {points:g} points ({name} p = {found.p_inferior:.2g}) nor above "
            f"it (p = {found.p_regression:.2g}). To resolve: more documents, or a margin that the claim allows."
        )
    return verdict_of(reason), why
