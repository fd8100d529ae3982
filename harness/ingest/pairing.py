"""Pairs two sides' answers to a task. Answers that cannot be paired are counted with the reason, never silently dropped."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from assay.harness.ingest.asked import Differences, differences
from assay.harness.ingest.comparison import SIDES, UNDECIDED, ComparedTask, Unpaired
from assay.harness.ingest.result_set import ResultItem, ResultSet, StatedScore, perplexity
from assay.harness.judge.paired_accuracy import Rule, Scores, accuracy, state_accuracy
from assay.harness.statement import Statement, state
from assay.harness.stats.bootstrap import bootstrap_t
from assay.harness.verdict import Verdict

ItemPair = tuple[ResultItem, ResultItem]
"""A's and B's answers to one document, asked with the same prompt."""
# A choice of a question, as the lm-eval reader writes it.
_LETTER = re.compile(r"([A-Z])(?:: |$)")
# Fewest documents for which a bootstrap decides.
_LEAST_DOCUMENTS = 20
# Largest logarithm of a ratio shown.
_LARGEST = 700.0
# Keys of unpaired documents given as examples.
_EXAMPLES = 3
# Largest share of repeated documents for which each answer counts separately: a data set may contain a question twice.
_FEW_AGAIN = 0.05


BEYOND_STOP = "beyond-stop"
"""Questions that one run asked after the other had stopped. They are not a gap, because stopping says nothing about the rest."""


@dataclass(eq=False)
class Pairing:
    """One score of a task on both sides.

    Attributes:
        differences: between both sides' tasks and settings.
        pairs: in A's order. Scores that are better when lower are inverted, so that a loss means the same for all.
        unpaired: the rest.
        again: repeated pairs, beyond each document's first. Both sides repeat a document equally often, and it counts once.
        unverified: pairs whose prompt is not recorded on both sides.
    """

    a: ResultSet
    b: ResultSet
    differences: Differences
    pairs: list[ItemPair] = field(default_factory=list)
    unpaired: list[Unpaired] = field(default_factory=list)
    again: int = 0
    unverified: int = 0

    @property
    def higher_is_better(self) -> bool | None:
        """True if a higher score is better, or None if neither side says so or the sides disagree."""
        told = {self.a.higher_is_better, self.b.higher_is_better} - {None}
        return told.pop() if len(told) == 1 else None

    @property
    def differs(self) -> tuple[Statement, ...]:
        """The differences that make it a different question in B, and differences of limits."""
        return (*self.differences.other, *self.differences.limits)

    @property
    def of_perplexity(self) -> bool:
        """True if the pairs have log-likelihoods instead of scores."""
        return bool(self.pairs) and self.pairs[0][0].loglikelihood is not None

    def decide(self, rule: Rule, adaptive: bool) -> ComparedTask:
        """Decide about this score alone. For `adaptive`, see `decide_pairs`."""
        differs = self.differs
        known: dict[str, object] = {
            "task": self.a.task, "metric": self.a.metric, "shots": self.a.asked.shots, "again": self.again, "differs": differs,
            "unpaired": tuple(self.unpaired),
        }  # fmt: skip
        if self.differences.other or any(gap.id in ("no-samples", *UNDECIDED) for gap in self.unpaired):
            decided = _decide_unpaired(self, rule)
            known["why"] = (*([state("not-same-question", differs=differs)] if differs else []), *decided.why)
        elif self.of_perplexity:
            decided = _decide_perplexity(self.pairs, rule)
        else:
            decided = decide_pairs(self.pairs, rule, adaptive)
            known |= {"a": 1 - decided.a, "b": 1 - decided.b} if self.higher_is_better is False else {}
        return decided.model_copy(update=known)

    def pair(self, a: Sequence[ResultItem], b: Sequence[ResultItem]) -> None:
        """Join the answers to the same document: same key, same repeat, same prompt, same expected answer."""
        left, right = _by_key(a), _by_key(b)
        reasons: dict[str, list[str]] = {}
        for key in dict.fromkeys((*left, *right)):
            mine, theirs = left.get(key, []), right.get(key, [])
            reason = "only-in-a" if not theirs else "only-in-b" if not mine else ""
            # A document that both sides have equally often is one repeated question. If one side has it more often, it is unknown
            # which answers belong together.
            if not reason and len(mine) != len(theirs):
                reason = "repeated"
            named = key[0] if not key[1] else f"{key[0]} (repeat {key[1]})"
            if reason:
                reasons.setdefault(reason, []).append(named)
                continue
            requests = (sorted(side, key=lambda item: (item.prompt_hash, item.target)) for side in (mine, theirs))
            for pair in zip(*requests, strict=True):
                if reason := _apart(*pair):
                    reasons.setdefault(reason, []).append(named)
                else:
                    self.pairs.append(pair)
        self.again = len(self.pairs) - len({mine.key for mine, _ in self.pairs})
        self.unverified = sum(not (mine.prompt_hash and theirs.prompt_hash) for mine, theirs in self.pairs)
        for reason, names in reasons.items():
            self.leave(reason, len(names), names)

    def leave(self, reason: str, count: int, names: Sequence[str] = ()) -> None:
        """Count unpaired documents."""
        self.unpaired.append(Unpaired(id=reason, count=count, examples=tuple(names[:_EXAMPLES])))


def pair_tasks(a: ResultSet, b: ResultSet) -> Pairing:
    """Pair the answers to a task. For runs that stop adaptively, only the beginning that both asked is paired."""
    prompts = bool(a.items and b.items) and all(item.prompt_hash for item in (*a.items, *b.items))
    pairing = Pairing(a, b, differences(a.asked, b.asked, prompts=prompts))
    top = max(a.top, b.top)
    if pairing.differences.other:
        return pairing
    if not (a.items and b.items) and (a.stated or b.stated):
        pairing.leave("no-samples", max(side.score.questions for side in (a, b) if side.score))
        return pairing
    if not all(0 <= score <= top for side in (a, b) for score in side.scores):
        pairing.leave("off-scale", len(a.items))
        return pairing
    if pairing.higher_is_better is None:
        pairing.leave("no-direction", len(a.items))
        return pairing
    lower = not pairing.higher_is_better
    mine, theirs = ([_as_share(item, top, turned=lower) for item in side.items] for side in (a, b))
    if a.adaptive and b.adaptive:
        shared = min(len(mine), len(theirs))
        pairing.pair(mine[:shared], theirs[:shared])
        if beyond := [item.key for item in (*mine[shared:], *theirs[shared:])]:
            pairing.leave(BEYOND_STOP, len(beyond), beyond)
        return pairing
    pairing.pair(mine, theirs)
    # Documents that one side skipped and the other has are counted already.
    alone = {gap.id: gap.count for gap in pairing.unpaired}
    for side, name, there in ((a, "skipped-in-a", "only-in-b"), (b, "skipped-in-b", "only-in-a")):
        if (skipped := side.asked.answers - len(side.items) - alone.get(there, 0)) > 0:
            pairing.leave(name, skipped)
    return pairing


def _as_share(item: ResultItem, top: int, *, turned: bool) -> ResultItem:
    if item.score is None or (top == 1 and not turned):
        return item
    share = item.score / top
    return item.model_copy(update={"score": 1 - share if turned else share})


def _by_key(items: Sequence[ResultItem]) -> dict[tuple[str, int], list[ResultItem]]:
    by_key: dict[tuple[str, int], list[ResultItem]] = {}
    for item in items:
        by_key.setdefault((item.key, item.repeat), []).append(item)
    return by_key


def _apart(a: ResultItem, b: ResultItem) -> str:
    """Return the reason why two answers to a document are not a pair, or "" if they are."""
    if a.prompt_hash and b.prompt_hash and a.prompt_hash != b.prompt_hash:
        return "other-prompt"
    # A question that follows an answer may depend on it.
    parted = next(((mine[0], theirs[0]) for mine, theirs in zip(a.turns, b.turns, strict=False) if mine != theirs), ())
    if parted and all(parted):
        return "other-prompt"
    if a.target != b.target or (a.units and b.units and a.units != b.units):
        return "other-target"
    return "" if a.scored and b.scored else "not-scored"


def _guessing(pairs: Sequence[ItemPair]) -> float:
    """Compute the accuracy of always giving the most frequent expected answer: 1/4 for 4 balanced letters, near 0 for numbers.

    For choices, compute the accuracy of always taking the same position: 1 if the first is always right, as in TruthfulQA's mc1.
    """
    letters = ((mine.target, _LETTER.match(mine.target)) for mine, _ in pairs)
    counted = Counter(letter[1] if letter else target for target, letter in letters)
    return max(counted.values()) / len(pairs) if counted and any(counted) else 0.0


def decide_pairs(pairs: Sequence[ItemPair], rule: Rule, adaptive: bool = False) -> ComparedTask:
    """Decide by paired scores where higher is better.

    Args:
        pairs: in the order of asking.
        rule: the rule of the test.
        adaptive: whether either side stopped asking because of its answers, as assay's own runs do.
    """
    again = len(pairs) - len({a.key for a, _ in pairs}) > _FEW_AGAIN * len(pairs)
    scores = [
        Scores(
            a.key if again else f"{a.key} {at}", a.score or 0.0, b.score or 0.0, (a.parsed is None, b.parsed is None)
        )
        for at, (a, b) in enumerate(pairs)
    ]
    if not adaptive:
        # Files are often sorted by subject, but the betting test needs values in random order.
        scores.sort(key=lambda each: hashlib.sha256(each.unit.encode()).digest())
    result = accuracy(scores, rule, _guessing(pairs), fixed=not adaptive)
    lost, gained = result.flips
    both = np.array([(each.reference, each.candidate) for each in scores] or [(0.0, 0.0)])
    mean_a, mean_b = both.mean(axis=0).tolist()
    error_a, error_b = (both.std(axis=0, ddof=1) / math.sqrt(len(both))).tolist() if len(both) > 1 else (None, None)
    return ComparedTask(
        task="", verdict=result.verdict, why=(state_accuracy(result, SIDES),),
        test="betting" if scores and not result.exact else "exact", pairs=len(scores), a=mean_a, b=mean_b, lost=lost, gained=gained,
        a_error=error_a, b_error=error_b,
        loss=result.loss, low=result.interval.low, high=result.interval.high, p_mcnemar=result.p_mcnemar,
        p_inferior=result.p_inferior, p_regression=result.p_regression,
    )  # fmt: skip


def _decide_perplexity(pairs: Sequence[ItemPair], rule: Rule) -> ComparedTask:
    """Decide by log-likelihoods of the same documents: to pass, the perplexity must be within the margin in both directions.

    log(B's perplexity / A's) is the sum of the losses in log-likelihood divided by the units. A ratio r is tested as a ratio of
    lengths is (Fieller; `assay.harness.judge.answer_lengths`): the mean of ``lost - log(r) * units`` over the documents is 0. If
    the perplexity fell by more than the margin, the model is a different one, or it sees the tokens that it should predict.

    Of 300 simulated sets of 20 or 62 documents (log-normal lengths, ratios that scatter by .5 to 5 %) at the margin, 6 to 9 % are
    called a regression at a level of 5 %, and 1 to 9 % pass. With 8 documents it is 11 %, so fewer than 20 decide nothing. Equal
    models pass in 92 % (20 documents) and 99 % (62) if ratios scatter by 2 %; a ratio of 1.35 is always a regression.
    """
    n, limit = len(pairs), math.log1p(rule.margin)
    before, after = (np.array([side.loglikelihood for side in each], np.float64) for each in zip(*pairs, strict=True))
    units, lost = np.array([a.units for a, _ in pairs], np.float64), before - after
    shift = lost.sum() / units.sum()
    above, below = (bootstrap_t(lost - bound * units, rule.alpha) for bound in (limit, -limit))
    reach = bootstrap_t((lost - shift * units) / units.mean(), rule.alpha)
    ratio, low, high = (math.exp(min(each, _LARGEST)) for each in (shift, shift + reach.low, shift + reach.high))
    outcome = "undecided"
    if n >= _LEAST_DOCUMENTS:
        tests = {
            "worse": above.p_not_above(0) <= rule.regression_alpha,
            "changed": below.p_not_below(0) <= rule.alpha,
            "within": max(above.p_not_below(0), below.p_not_above(0)) <= rule.alpha,
        }
        outcome = next((name for name, shown in tests.items() if shown), outcome)
    verdicts: dict[str, Verdict] = {"worse": "regression", "within": "pass"}
    of_a, of_b = (perplexity(each.sum(), units.sum()) for each in (before, after))
    why = state(
        "perplexity", outcome=outcome, a=of_a, b=of_b, ratio=ratio, low=low, high=high, level=1 - 2 * rule.alpha,
        margin=rule.margin, documents=n,
    )  # fmt: skip
    return ComparedTask(
        task="", verdict=verdicts.get(outcome, "inconclusive"), why=(why,), test="bootstrap", pairs=n, a=of_a, b=of_b,
        lost=int((lost > 0).sum()), gained=int((lost < 0).sum()), loss=ratio - 1, low=low - 1, high=high - 1,
        p_inferior=above.p_not_below(0), p_regression=above.p_not_above(0),
    )  # fmt: skip


def _decide_unpaired(pairing: Pairing, rule: Rule) -> ComparedTask:
    """Compare two scores whose answers cannot be paired. The verdict is a regression (for the same question) or inconclusive.

    The difference of two independent means has a normal interval. For two shares, the interval is Agresti and Caffo's, which adds
    one right and one wrong answer to each (The American Statistician 54, 280-288 (2000)). Since both sides were asked the same
    questions, the interval is conservative: its findings hold, but a pass needs pairs. Of 4,000 simulated results with a loss
    equal to the margin, each with 20 to 1,000 questions, at most 5.4 % were called a regression at a level of 5 % with independent
    answers, and at most 0.2 % with answers to the same questions.
    """
    before, after, higher = pairing.a.score, pairing.b.score, pairing.higher_is_better
    if before is None or after is None:
        return ComparedTask(task="", verdict="inconclusive", why=(state("nothing-compared"),), test="unpaired")
    # Scores above 1, such as BLEU, are in points already.
    margin = rule.margin * (100 if max(abs(before.value), abs(after.value)) > 1 else 1)
    sign = -1 if higher is False else 1
    of_a, of_b = _moments(before), _moments(after)
    shown: dict[str, float] = {}
    low = high = None
    if of_a and of_b:
        centre, error = sign * (of_a[0] - of_b[0]), math.sqrt(of_a[1] + of_b[1])
        reach = NormalDist().inv_cdf(1 - rule.alpha / 2) * error
        p = 1 - NormalDist().cdf((centre - margin) / error)
        shown = {"low": centre - reach, "high": centre + reach, "p_regression": p}
        low, high = sorted((-sign * shown["low"], -sign * shown["high"]))
    why = state(
        "scores-unpaired", a=before.value, b=after.value, low=low, high=high, level=1 - rule.alpha, margin=margin,
        either_way=higher is None,
    )  # fmt: skip
    worse = not pairing.differs and higher is not None and shown.get("p_regression", 1.0) <= rule.regression_alpha
    return ComparedTask(
        task="", verdict="regression" if worse else "inconclusive", why=(why,), test="unpaired", a=before.value, b=after.value,
        a_error=before.error, b_error=after.error, loss=sign * (before.value - after.value), **shown,
    )  # fmt: skip


def _moments(score: StatedScore) -> tuple[float, float] | None:
    """Return a score's mean and variance, or None if its standard error is missing, or is 0 for an unknown number of questions."""
    value, error, n = score.value, score.error, score.questions
    if error is None:
        return None
    if (
        n > 1
        and 0 <= value <= 1
        and math.isclose(error * error * (n - 1), value * (1 - value), rel_tol=0.05, abs_tol=1e-9)
    ):
        mean = (value * n + 1) / (n + 2)
        return mean, mean * (1 - mean) / (n + 2)
    return (value, error * error) if error > 0 else None
