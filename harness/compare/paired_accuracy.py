"""The test of a loss of accuracy, paired and anytime-valid; it decides for judge and ingest, and for collect when to stop asking.

What is estimated is the *loss*: the share of questions that the reference gets right minus the candidate's, where the questions are
those of the set, or of the source that they were drawn from, each unit counted once. A *unit* is a question, or all questions about
one passage, whose mean loss is one value between -1 and 1: questions about one passage are answered alike, so they are not
independent, but passages are drawn in random order. Subjects are no units: all of them are in the set, so a random order of its
questions is fair to each.

Two wagers run side by side (`assay.harness.stats.betting`). One bets that the loss is above the margin, on every unit. The other
bets that it is below, on the questions that were asked with the shared header in the cache; those with an empty cache are too few
to show anything of their own, and their share falls as more are asked, so they can lose a pass but not win one. Both are looked at
over the longest beginning of the order in which both roles answered every question: answers arrive out of order, and whether a
question is slow to answer may depend on whether the answer is right. The first unit at which a wager has won is thus decided by the
order alone, and the error rates hold at every look:

- an equal candidate, or any whose loss is at most the margin, is called a regression with a probability of at most
  ``regression_alpha``;
- a candidate whose loss is the margin or more passes with a probability of at most ``alpha``.

Further answers cannot turn a regression into a pass. They can, as long as someone asks, turn a pass into a regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from assay.evals.questions import LETTERS
from assay.harness.compare.answers import Pair
from assay.harness.evidence.records import Item
from assay.harness.sides import ROLES, Role
from assay.harness.stats.betting import Array, log_wealth, log_wealth_below, p_value
from assay.harness.verdict import Verdict

CHANCE = 0.25
"""Accuracy of guessing among four options; a number or a text cannot be guessed."""
HEADROOM = 2.0
"""The reference must be shown to beat guessing by this multiple of the margin: less could not be lost visibly."""
MOST_UNPARSED = 0.05
"""Largest share of answers without a letter: a comparison of more is one of formats."""

Reason = Literal["regression", "non-inferior", "nothing", "no headroom", "unparsed", "undecided"]


@dataclass(frozen=True)
class Rule:
    """The parameters of the test.

    Attributes:
        margin: largest loss that still passes, as a share of 1.
        alpha: level of the test that the loss is below the margin.
        regression_alpha: level of the test that it is above.
        population: units of the set from which the order was drawn; None for one without end.
    """

    margin: float
    alpha: float
    regression_alpha: float
    population: int | None = None


@dataclass(frozen=True)
class Prefix:
    """The longest beginning of the order in which both roles answered every question.

    Attributes:
        pairs: of its questions.
        losses: mean loss of each unit.
        cached: mean loss of each unit over its questions that found the shared header in the cache, where it has any.
        reference: the reference's accuracy in each unit.
        unparsed: questions without a letter in the answer, by role.
        complete: whether it holds all questions that were planned.
    """

    pairs: tuple[Pair, ...]
    losses: Array
    cached: Array
    reference: Array
    unparsed: Mapping[Role, int]
    complete: bool

    @property
    def chance(self) -> float:
        """Accuracy of guessing: `CHANCE` if any answer is a letter."""
        return CHANCE if not self.pairs or any(pair.item.expected in LETTERS for pair in self.pairs) else 0.0

    def unparsed_share(self, role: Role) -> float:
        """Compute the share of a role's answers without a letter."""
        return self.unparsed[role] / len(self.pairs) if self.pairs else 0.0


def prefix_of(items: Sequence[Item], pairs: Sequence[Pair]) -> Prefix:
    """Cut the pairs at the first unit that is not complete.

    Args:
        items: the questions in their order, each prompt once.
        pairs: those that both roles answered.
    """
    by_item = {pair.item.id: pair for pair in pairs}
    units: list[list[Pair]] = []
    complete = True
    for _, unit in groupby(items, key=lambda item: item.unit or item.id):
        asked = [item.id for item in unit]
        if any(id_ not in by_item for id_ in asked):
            complete = False
            break
        units.append([by_item[id_] for id_ in asked])
    inside = tuple(pair for unit in units for pair in unit)
    return Prefix(
        pairs=inside,
        losses=_means(units, lambda pair: pair.loss),
        cached=_means([[pair for pair in unit if not pair.item.cold] for unit in units], lambda pair: pair.loss),
        reference=_means(units, lambda pair: pair.right("reference")),
        unparsed={role: sum(pair.of(role).parsed is None for pair in inside) for role in ROLES},
        complete=complete,
    )


def _means(units: Sequence[Sequence[Pair]], value: Callable[[Pair], int]) -> Array:
    """Compute the mean of a value in each unit that has a pair, [units]."""
    return np.array([sum(map(value, unit)) / len(unit) for unit in units if unit], dtype=float)


def soonest_pass(items: Sequence[Item], pairs: Sequence[Pair], rule: Rule) -> int:
    """Count the questions of the order that a pass needs at least: those it takes if all that is still open shows no difference.

    Args:
        items: the questions in their order, each prompt once.
        pairs: those that both roles answered, in any order.
        rule: of the test.

    Returns:
        At most the number of `items`, also if they cannot show a pass any more.
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


@dataclass(frozen=True)
class Outcome:
    """The result of the test on a prefix.

    Attributes:
        reason: "regression" and "non-inferior" are verdicts; the others say why there is none.
        hopeless: whether no number of questions is likely to give a verdict.
        p_regression: anytime-valid p value of "the loss is at most the margin".
        p_inferior: anytime-valid p value of "the loss is at least the margin".
    """

    reason: Reason
    hopeless: bool
    p_regression: float
    p_inferior: float

    @property
    def decided(self) -> bool:
        """True if there is a verdict."""
        return self.reason in ("regression", "non-inferior")

    @property
    def over(self) -> bool:
        """True if asking on is pointless."""
        return self.decided or self.hopeless


def reason_of(
    rule: Rule,
    p_regression: float,
    p_inferior: float,
    unparsed: tuple[float, float],
    headroom: bool,
    always_regresses: bool = False,
) -> Reason:
    """Decide about paired answers, of which there are some.

    Args:
        rule: of the test.
        p_regression: p value of "the loss is at most the margin".
        p_inferior: p value of "the loss is at least the margin".
        unparsed: shares of the reference's and of the candidate's answers that are unparsed.
        headroom: whether the reference is shown to beat guessing by `HEADROOM` margins.
        always_regresses: whether a loss above the margin is a regression also if the reference is not fit to compare with.
    """
    above = p_regression <= rule.regression_alpha
    of_reference, of_candidate = unparsed
    if above and always_regresses:
        return "regression"
    if of_reference > MOST_UNPARSED:
        return "unparsed"
    if not headroom:
        return "no headroom"
    if above:
        return "regression"
    if of_candidate > MOST_UNPARSED:
        return "unparsed"
    return "non-inferior" if p_inferior <= rule.alpha else "undecided"


def verdict_of(reason: Reason) -> Verdict:
    """Return the verdict of a decision."""
    if reason == "regression":
        return "regression"
    return "pass" if reason == "non-inferior" else "inconclusive"


def outcome_of(prefix: Prefix, rule: Rule) -> Outcome:
    """Test a prefix.

    - *regression*: the loss is above the margin. Unparsed answers are wrong ones, so a candidate that only stops answering in the
      required form has regressed.
    - *non-inferior*: the loss is below the margin, no more than `MOST_UNPARSED` of either role's answers are unparsed, and the
      reference is so much better than guessing that a loss would show.

    There is neither where the reference has no headroom or too many unparsed answers: it is not fit to compare with.
    """
    if not prefix.pairs:
        return Outcome("nothing", False, 1.0, 1.0)
    above = log_wealth(prefix.losses, rule.margin, -1, 1, rule.population)
    below = log_wealth_below(prefix.cached, rule.margin, -1, 1, rule.population)
    floor = prefix.chance + HEADROOM * rule.margin
    headroom = p_value(log_wealth(prefix.reference, floor, 0, 1, rule.population)) <= rule.alpha
    p_regression, p_inferior = p_value(above), p_value(below)

    unparsed = (prefix.unparsed_share("reference"), prefix.unparsed_share("candidate"))
    reason = reason_of(rule, p_regression, p_inferior, unparsed, headroom)
    hopeless = False
    if reason == "unparsed" and unparsed[0] > MOST_UNPARSED:
        hopeless = _more_than(prefix.unparsed["reference"], len(prefix.pairs), rule.alpha)
    elif reason == "no headroom":
        hopeless = p_value(log_wealth_below(prefix.reference, floor, 0, 1, rule.population)) <= rule.alpha
    return Outcome(reason, hopeless, p_regression, p_inferior)


def _more_than(unparsed: int, of: int, alpha: float) -> bool:
    """Return True if the share of unparsed answers is clearly above the limit, in whatever order they came.

    The wealth after `of` bets with a stake chosen for a share of a half (a likelihood ratio): it only ends asking, which claims
    nothing.
    """
    odds = unparsed * math.log(0.5 / MOST_UNPARSED) + (of - unparsed) * math.log(0.5 / (1 - MOST_UNPARSED))
    return odds >= math.log(1 / alpha)
