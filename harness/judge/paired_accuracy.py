"""The decision about a loss of accuracy, from paired answers: for the judge, for `compare`, and for when to stop asking.

The estimate is the *loss*: the share of questions that the reference gets right minus the candidate's, over the questions of the
set, or of the source that they were drawn from, each unit counted once. A *unit* is a question, or all questions about one
passage, whose mean loss is one value between -1 and 1: questions about one passage are answered alike, so they are not
independent, but passages are drawn in random order. Subjects are not units: the set has all of them, so a random order of its
questions is fair to each.

Two wagers run side by side (`assay.harness.stats.betting`). One bets that the loss is above the margin, on every unit. The other
bets that it is below, on the questions that were asked with the shared header in the cache; those with an empty cache are too few
to show anything alone, and their share falls as more are asked, so they can lose a pass but not win one. Both are evaluated
over the longest beginning of the order in which both roles answered every question: answers arrive out of order, and whether a
question is slow to answer may depend on whether the answer is right. The order alone thus decides the first unit at which a wager
has won, and the error rates hold at every look:

- an equal candidate, or any whose loss is at most the margin, is called a regression with a probability of at most
  ``regression_alpha``;
- a candidate whose loss is the margin or more passes with a probability of at most ``alpha``.

Further answers cannot turn a regression into a pass. They can turn a pass into a regression, for as long as someone asks.

Complete results, such as the logs of two finished evaluations, are looked at once. If their answers are right or wrong, the
exact test of a fixed number of pairs needs fewer of them (`assay.harness.stats.paired_margin`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from assay.evals.questions import LETTERS
from assay.harness.evidence.records import Item
from assay.harness.judge.answers import Pair
from assay.harness.statement import Statement, state
from assay.harness.stats import paired_margin
from assay.harness.stats.betting import Array, betting_interval, log_wealth, log_wealth_below, p_value
from assay.harness.stats.share import Interval, clopper_pearson, mcnemar
from assay.harness.verdict import Verdict

CHANCE = 0.25
"""Accuracy of guessing among four options; a number cannot be guessed."""
# The reference must be shown to beat guessing by this multiple of the margin: a smaller loss would not be visible.
_HEADROOM = 2.0
# Largest share of answers without a letter: beyond it, the comparison is one of formats.
_MOST_UNPARSED = 0.05

_Reason = Literal["regression", "non-inferior", "nothing", "no headroom", "unparsed", "undecided"]
_VERDICTS: dict[_Reason, Verdict] = {"regression": "regression", "non-inferior": "pass"}


@dataclass(frozen=True)
class Rule:
    """The parameters of the test.

    Attributes:
        margin: largest loss that still passes, as a share of 1.
        alpha: level of the test that the loss is below the margin.
        regression_alpha: level of the test that it is above.
        population: units of the set from which the order was drawn, or None for an unlimited one.
        loss_suffices: whether a loss above the margin is a regression also if the reference is not fit to compare with.
    """

    margin: float
    alpha: float
    regression_alpha: float
    population: int | None = None
    loss_suffices: bool = False


class Scores(NamedTuple):
    """The scores of both sides on one question, from 0 to 1.

    Attributes:
        unit: the questions of one unit count as one value.
        reference: score of the reference, or of A.
        candidate: score of the candidate, or of B.
        unparsed: whether the answer of the reference, and of the candidate, has no letter.
        cold: whether it was asked with an empty cache.
    """

    unit: str
    reference: float
    candidate: float
    unparsed: tuple[bool, bool]
    cold: bool = False

    @property
    def loss(self) -> float:
        """The reference's score minus the candidate's."""
        return self.reference - self.candidate


@dataclass(frozen=True)
class Accuracy:
    """The result of the test, from which every number and sentence about accuracy is made.

    Attributes:
        scores: the scores so far.
        losses: mean loss of each unit.
        references: mean score of the reference in each unit.
        exact: whether the test was the exact one of a fixed number of pairs.
        reason: "regression" and "non-inferior" are verdicts; the others say why the verdict is missing.
        hopeless: whether no number of questions is likely to give a verdict.
        p_regression: p value of "the loss is at most the margin".
        p_inferior: p value of "the loss is at least the margin".
    """

    rule: Rule
    scores: tuple[Scores, ...]
    chance: float
    losses: Array
    references: Array
    exact: bool
    reason: _Reason
    hopeless: bool
    p_regression: float
    p_inferior: float

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return _VERDICTS.get(self.reason, "inconclusive")

    @property
    def over(self) -> bool:
        """True if further questions are pointless."""
        return self.hopeless or self.reason in _VERDICTS

    @property
    def loss(self) -> float:
        """Return the mean loss, each unit counted once, or 0 if nothing was compared."""
        return float(self.losses.mean()) if self.losses.size else 0.0

    @cached_property
    def flips(self) -> tuple[int, int]:
        """Questions that were lost, and gained."""
        losses = [each.loss for each in self.scores]
        return sum(loss > 0 for loss in losses), sum(loss < 0 for loss in losses)

    @property
    def p_mcnemar(self) -> float:
        """The p value of "as many are lost as gained", which decides nothing."""
        return mcnemar(*self.flips)

    @property
    def unparsed(self) -> tuple[float, float]:
        """Shares of the reference's and of the candidate's answers without a letter."""
        return _unparsed(self.scores)

    # Found by a search, so not computed while a run asks.
    @cached_property
    def interval(self) -> Interval:
        """Losses that the test does not reject, each end with the error rate `Rule.alpha`; [-1, 1] if nothing was compared."""
        if self.exact:
            return paired_margin.loss_interval(*self.flips, len(self.scores), self.rule.alpha)
        return betting_interval(self.losses, self.rule.alpha, -1, 1, self.rule.population)

    @cached_property
    def least_reference(self) -> float:
        """The lower bound of the reference's accuracy."""
        if self.exact:
            return clopper_pearson(round(self.references.sum()), len(self.scores), 2 * self.rule.alpha).low
        return betting_interval(self.references, self.rule.alpha, 0, 1, self.rule.population).low


def beginning(items: Iterable[Item], pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Return the pairs of the longest beginning of the order in which both roles answered every question of each unit."""
    by_item = {pair.item.id: pair for pair in pairs}
    inside: list[Pair] = []
    for _, unit in groupby(items, key=lambda item: item.unit or item.id):
        asked = [item.id for item in unit]
        if any(id_ not in by_item for id_ in asked):
            break
        inside += [by_item[id_] for id_ in asked]
    return tuple(inside)


def accuracy_of(pairs: Sequence[Pair], rule: Rule) -> Accuracy:
    """Decide by the answers to a beginning of the questions of a run."""
    scores = [
        Scores(
            unit=pair.item.unit or pair.item.id,
            reference=float(pair.right("reference")),
            candidate=float(pair.right("candidate")),
            unparsed=(pair.reference.parsed is None, pair.candidate.parsed is None),
            cold=pair.item.cold,
        )
        for pair in pairs
    ]
    letters = not pairs or any(pair.item.expected in LETTERS for pair in pairs)
    return accuracy(scores, rule, CHANCE if letters else 0.0)


def accuracy(scores: Sequence[Scores], rule: Rule, chance: float, *, fixed: bool = False) -> Accuracy:
    """Decide by paired scores.

    - *regression*: the loss is above the margin. Unparsed answers are wrong ones, so a candidate that only stops answering in the
      required form has regressed.
    - *non-inferior*: the loss is below the margin, no more than `_MOST_UNPARSED` of either side's answers are unparsed, and the
      reference is so much better than guessing that a loss would show.

    Unless `Rule.loss_suffices`, there is neither if the reference has no headroom or too many unparsed answers: it is not
    fit to compare with.

    Args:
        scores: in the random order in which the questions were asked, or in another that does not depend on the answers.
        fixed: whether their number was fixed before any was asked. Then there is one look, by the exact test if it is defined.
    """
    units: dict[str, list[Scores]] = {}
    for each in scores:
        units.setdefault(each.unit, []).append(each)
    losses = np.array([_mean(each.loss for each in unit) for unit in units.values()])
    references = np.array([_mean(each.reference for each in unit) for unit in units.values()])
    exact = fixed and len(units) == len(scores) and all({each.reference, each.candidate} <= {0, 1} for each in scores)
    floor = chance + _HEADROOM * rule.margin
    # If the same answer to every question scores (nearly) 1, nothing shows that an answer was more than that.
    beatable = floor < 1
    hopeless, p_regression, p_inferior = False, 1.0, 1.0
    reason: _Reason = "nothing"
    if scores:
        if exact:
            lost, gained = int((losses > 0).sum()), int((losses < 0).sum())
            p_regression = paired_margin.p_not_above(lost, gained, len(losses), rule.margin)
            p_inferior = paired_margin.p_not_below(lost, gained, len(losses), rule.margin)
            right = round(references.sum())
            headroom = clopper_pearson(right, len(losses), 2 * rule.alpha).low > floor
        else:
            cached = [[each.loss for each in unit if not each.cold] for unit in units.values()]
            bets = np.array([_mean(unit) for unit in cached if unit])
            p_regression = p_value(log_wealth(losses, rule.margin, -1, 1, rule.population))
            p_inferior = p_value(log_wealth_below(bets, rule.margin, -1, 1, rule.population))
            headroom = beatable and p_value(log_wealth(references, floor, 0, 1, rule.population)) <= rule.alpha
        reason = _reason(rule, p_regression, p_inferior, _unparsed(scores), headroom)
        if reason == "unparsed":
            hopeless = _more_than(sum(each.unparsed[0] for each in scores), len(scores), rule.alpha)
        elif reason == "no headroom":
            hopeless = not beatable or p_value(log_wealth_below(references, floor, 0, 1, rule.population)) <= rule.alpha
    return Accuracy(rule, tuple(scores), chance, losses, references, exact, reason, hopeless, p_regression, p_inferior)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _unparsed(scores: Sequence[Scores]) -> tuple[float, float]:
    n = max(len(scores), 1)
    return sum(each.unparsed[0] for each in scores) / n, sum(each.unparsed[1] for each in scores) / n


def _reason(
    rule: Rule, p_regression: float, p_inferior: float, unparsed: tuple[float, float], headroom: bool
) -> _Reason:
    """Decide about paired answers by the p values, the shares of unparsed answers, and whether the reference has headroom."""
    above = p_regression <= rule.regression_alpha
    if above and rule.loss_suffices:
        return "regression"
    if unparsed[0] > _MOST_UNPARSED:
        return "unparsed"
    if not headroom:
        return "no headroom"
    if above:
        return "regression"
    if unparsed[1] > _MOST_UNPARSED:
        return "unparsed"
    return "non-inferior" if p_inferior <= rule.alpha else "undecided"


def state_accuracy(result: Accuracy, sides: tuple[str, str] = ("the reference", "the candidate")) -> Statement:
    """State the decision about a loss of accuracy: the numbers, and the margin."""
    n, rule, (reference, candidate) = len(result.scores), result.rule, sides
    names = {"reference": reference, "candidate": candidate}
    if result.reason == "nothing":
        return state("nothing-compared")
    if result.reason == "unparsed":
        return state("answers-unparsed", questions=n, unparsed=result.unparsed, most=_MOST_UNPARSED, **names)
    if result.reason == "no headroom":
        return state(
            "no-headroom", accuracy=result.references.mean(), least=result.least_reference, chance=result.chance,
            margins=_HEADROOM, margin=rule.margin, **names,
        )  # fmt: skip
    (lost, gained), interval = result.flips, result.interval
    measured = {
        "loss": result.loss, "low": interval.low, "high": interval.high, "level": interval.level, "lost": lost, "gained": gained,
        "questions": n, "margin": rule.margin, "test": "exact" if result.exact else "anytime-valid",
    }  # fmt: skip
    if result.reason == "regression":
        return state("accuracy-lost", p=result.p_regression, **measured)
    shown = result.p_mcnemar if result.loss > 0 and result.p_mcnemar < rule.alpha else None
    if result.reason == "non-inferior":
        return state("accuracy-kept", p=result.p_inferior, p_mcnemar=shown, **measured)
    return state(
        "accuracy-undecided", p=result.p_inferior, p_regression=result.p_regression, p_mcnemar=shown, **measured
    )


def soonest_pass(items: Sequence[Item], pairs: Sequence[Pair], rule: Rule) -> int:
    """Count the questions of the order that a pass needs at least, if all open ones show no difference.

    Returns:
        At most the number of `items`, even if they can no longer show a pass.
    """
    losses = {pair.item.id: pair.loss for pair in pairs}
    units = [list(unit) for _, unit in groupby(items, key=lambda item: item.unit or item.id)]
    cached = [[losses.get(item.id, 0) for item in unit if not item.cold] for unit in units]
    bets = np.array([sum(unit) / len(unit) for unit in cached if unit], dtype=float)
    won = log_wealth_below(bets, rule.margin, -1, 1, rule.population) >= math.log(1 / rule.alpha)
    if not won.any():
        return len(items)
    places = [number for number, unit in enumerate(cached) if unit]
    return sum(len(unit) for unit in units[: places[int(won.argmax())] + 1])


def _more_than(unparsed: int, of: int, alpha: float) -> bool:
    """Return True if the share of unparsed answers is clearly above the limit, in whatever order they came."""
    odds = unparsed * math.log(0.5 / _MOST_UNPARSED) + (of - unparsed) * math.log(0.5 / (1 - _MOST_UNPARSED))
    return odds >= math.log(1 / alpha)
