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

import numpy as np

from assay.harness.compare.paired_accuracy import HEADROOM, MOST_UNPARSED, Rule, reason_of, verdict_of
from assay.harness.ingest.comparison import ComparedTask
from assay.harness.ingest.results.pairing import ItemPair, guessing, loss
from assay.harness.stats.betting import betting_interval, log_wealth, log_wealth_below, p_value
from assay.harness.stats.binomial import mcnemar
from assay.harness.stats.paired_margin import loss_interval, p_not_above, p_not_below
from assay.harness.stats.share import clopper_pearson
from assay.harness.text import percent
from assay.harness.verdict import Verdict


def decide_pairs(pairs: Sequence[ItemPair], rule: Rule, adaptive: bool = False) -> ComparedTask:
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
        why = "Nothing was compared: no document could be paired."
        return ComparedTask(task="", verdict="inconclusive", why=why)
    n = len(pairs)
    losses = [loss(pair) for pair in pairs]
    lost, gained = sum(each > 0 for each in losses), sum(each < 0 for each in losses)
    binary = all(item.score in (0, 1) for pair in pairs for item in pair)
    exact = binary and not adaptive and len({mine.key for mine, _ in pairs}) == n
    if exact:
        interval, mean = loss_interval(lost, gained, n, rule.alpha), (lost - gained) / n
        p_inferior, p_regression = p_not_below(lost, gained, n, rule.margin), p_not_above(lost, gained, n, rule.margin)
    else:
        values = _units(pairs, adaptive)
        interval, mean = betting_interval(values, rule.alpha, -1, 1), float(np.mean(values))
        p_inferior = p_value(log_wealth_below(values, rule.margin, -1, 1))
        p_regression = p_value(log_wealth(values, rule.margin, -1, 1))
    a, b = (float(np.mean([item.score for item in side])) for side in zip(*pairs, strict=True))
    compared = ComparedTask(
        task="", verdict="inconclusive", why="", test="exact" if exact else "betting", pairs=n, a=a, b=b, lost=lost,
        gained=gained, loss=mean, low=interval.low, high=interval.high, p_mcnemar=mcnemar(lost, gained),
        p_inferior=p_inferior, p_regression=p_regression,
    )  # fmt: skip
    verdict, why = _verdict(pairs, rule, compared)
    return compared.model_copy(update={"verdict": verdict, "why": why})


def _units(pairs: Sequence[ItemPair], adaptive: bool) -> np.ndarray:
    """Compute the mean loss of each document: in the order of a run, which is random; otherwise in the order of the keys' hashes.

    Files are often sorted by subject, and bets win or lose on values that come in a random order.
    """
    units: dict[str, list[float]] = {}
    for pair in pairs:
        units.setdefault(pair[0].key, []).append(loss(pair))
    keys = list(units) if adaptive else sorted(units, key=lambda key: hashlib.sha256(key.encode()).digest())
    return np.array([sum(units[key]) / len(units[key]) for key in keys])


def _verdict(pairs: Sequence[ItemPair], rule: Rule, task: ComparedTask) -> tuple[Verdict, str]:
    points, n = 100 * rule.margin, len(pairs)
    ends = f"{100 * task.low:.1f} to {100 * task.high:.1f} with {percent(1 - 2 * rule.alpha)} confidence"
    measured = (
        f"Loss {100 * task.loss + 0.0:.1f} points ({ends}; {task.lost:,} lost and {task.gained:,} gained of {n:,})"
    )
    name = "exact" if task.test == "exact" else "anytime-valid"
    unparsed = [sum(item.parsed is None for item in side) / n for side in zip(*pairs, strict=True)]
    guess = guessing(pairs)
    headroom = clopper_pearson(int(task.a * n), n, 2 * rule.alpha).low > guess + HEADROOM * rule.margin
    reason = reason_of(
        rule, task.p_regression, task.p_inferior, (unparsed[0], unparsed[1]), headroom, always_regresses=True
    )
    side, share = max(zip("AB", unparsed, strict=True), key=lambda item: item[1] > MOST_UNPARSED)
    if reason == "regression":
        why = f"{measured}: above the margin of {points:g} points ({name} p = {task.p_regression:.2g})."
    elif share > MOST_UNPARSED:
        why = (
            f"{measured}, but {percent(share)} of {side}'s answers are unparsed, where {percent(MOST_UNPARSED)} is the most that "
            "allows a pass. To resolve: raise the token limit, or use a filter that finds the answers."
        )
    elif reason == "no headroom":
        why = (
            f"{measured}, but A scores {task.a:.3f}, which is not shown to beat guessing ({guess:.3f}) by {HEADROOM:g} margins, "
            "so a broken B could look no worse. To resolve: a task that the model can do, or more documents."
        )
    elif reason == "non-inferior":
        why = f"{measured}: non-inferior, below the margin of {points:g} points ({name} p = {task.p_inferior:.2g})."
    else:
        why = (
            f"{measured}: shown neither to be below the margin of {points:g} points ({name} p = {task.p_inferior:.2g}) nor above "
            f"it (p = {task.p_regression:.2g}). To resolve: more documents, or a margin that the claim allows."
        )
    return verdict_of(reason), why
