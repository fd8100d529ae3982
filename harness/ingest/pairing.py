"""Two tasks' answers -> pairs, and what cannot be paired, with the reason: counted, never dropped in silence."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from assay.harness.ingest.comparison import SIDES, ComparedTask, Unpaired
from assay.harness.ingest.result_set import ResultItem, ResultSet
from assay.harness.judge.paired_accuracy import Rule, Scores, accuracy, state_accuracy
from assay.harness.statement import Statement, state

ItemPair = tuple[ResultItem, ResultItem]
"""The answers of A and of B to one document, asked with the same prompt."""
# What must be the same of two tasks, where both tools record it.
_IDENTIFYING = ("shots", "tokenizer", "template", "task_version", "metric")
# Keys that are named of what cannot be paired.
_EXAMPLES = 3


@dataclass
class ItemPairing:
    """The pairs of a task.

    Attributes:
        pairs: in A's order.
        unpaired: the rest.
        again: documents that the set holds more than once, in both sides alike; each counts once.
        unverified: pairs of which a side does not record its prompt.
        refused: why the task cannot be compared at all.
    """

    pairs: list[ItemPair] = field(default_factory=list)
    unpaired: list[Unpaired] = field(default_factory=list)
    again: int = 0
    unverified: int = 0
    refused: tuple[Statement, ...] = ()


BEYOND_STOP = "beyond-stop"
"""Questions that one run asked after the other had stopped: they are no gap, since stopping decides nothing about the rest."""


def pair_tasks(a: ResultSet, b: ResultSet) -> ItemPairing:
    """Pair the answers of a task; of runs that stop as their answers decide, those of the beginning that both asked."""
    if refused := _refusals(a, b):
        return ItemPairing(refused=tuple(refused))
    if not (a.adaptive and b.adaptive):
        return _pair_items(a.items, b.items)
    shared = min(len(a.items), len(b.items))
    pairing = _pair_items(a.items[:shared], b.items[:shared])
    if beyond := (*a.items[shared:], *b.items[shared:]):
        pairing.unpaired.append(_unpaired(BEYOND_STOP, [item.key for item in beyond]))
    return pairing


def _refusals(a: ResultSet, b: ResultSet) -> list[Statement]:
    """State why two tasks cannot be compared at all; empty if they can. What a tool does not record refuses nothing."""
    compared = ((name, getattr(a, name), getattr(b, name)) for name in _IDENTIFYING)
    refused = [
        state("tasks-differ", what=name, a=x, b=y) for name, x, y in compared if x != y and not {x, y} & {"", None}
    ]
    for name in sorted({*a.sampling, *b.sampling}):
        x, y = a.sampling.get(name), b.sampling.get(name)
        if a.sampling and b.sampling and x != y:
            refused.append(state("sampling-differs", setting=name, a=x, b=y))
    return refused


def _pair_items(a: Sequence[ResultItem], b: Sequence[ResultItem]) -> ItemPairing:
    """Join the answers to the same document: same key, same repeat, same prompt, same expected answer."""
    left, right = _by_key(a), _by_key(b)
    pairs: list[ItemPair] = []
    reasons: dict[str, list[str]] = {}
    again = 0
    for key in dict.fromkeys((*left, *right)):
        mine, theirs = left.get(key, []), right.get(key, [])
        reason = "only-in-a" if not theirs else "only-in-b" if not mine else ""
        # A document that both hold equally often is one question asked again: the first answers count. Held more often by one
        # side, it is unknown which answer belongs to which.
        if not reason and len(mine) != len(theirs):
            reason = "repeated"
        if not reason:
            again += len(mine) - 1
            reason = _apart(mine[0], theirs[0])
        if reason:
            reasons.setdefault(reason, []).append(key[0] if not key[1] else f"{key[0]} (repeat {key[1]})")
        else:
            pairs.append((mine[0], theirs[0]))
    unpaired = [_unpaired(reason, names) for reason, names in reasons.items()]
    unverified = sum(not (mine.prompt_hash and theirs.prompt_hash) for mine, theirs in pairs)
    return ItemPairing(pairs, unpaired, again, unverified)


def _unpaired(reason: str, names: Sequence[str]) -> Unpaired:
    return Unpaired(id=reason, count=len(names), examples=tuple(names[:_EXAMPLES]))


def _by_key(items: Sequence[ResultItem]) -> dict[tuple[str, int], list[ResultItem]]:
    by_key: dict[tuple[str, int], list[ResultItem]] = {}
    for item in items:
        by_key.setdefault((item.key, item.repeat), []).append(item)
    return by_key


def _apart(a: ResultItem, b: ResultItem) -> str:
    """Return why two answers to a document are no pair; empty if they are one."""
    if a.prompt_hash and b.prompt_hash and a.prompt_hash != b.prompt_hash:
        return "other-prompt"
    if a.target != b.target:
        return "other-target"
    return "not-scored" if a.score is None or b.score is None else ""


def loss(pair: ItemPair) -> float:
    """Return A's score minus B's, from -1 to 1."""
    a, b = (item.score for item in pair)
    assert a is not None
    assert b is not None
    return a - b


def _guessing(pairs: Sequence[ItemPair]) -> float:
    """Compute the accuracy of always giving the most frequent expected answer: 1/4 for 4 balanced letters, near 0 for numbers."""
    counted = Counter(mine.target for mine, _ in pairs)
    return max(counted.values()) / len(pairs) if counted and any(counted) else 0.0


def decide_pairs(pairs: Sequence[ItemPair], rule: Rule, adaptive: bool = False) -> ComparedTask:
    """Decide by the paired scores.

    Args:
        pairs: in the order in which they were asked.
        rule: of the test.
        adaptive: whether either side stopped asking because of its answers, as assay's own runs do.
    """
    scores = [Scores(a.key, a.score or 0.0, b.score or 0.0, (a.parsed is None, b.parsed is None)) for a, b in pairs]
    if not adaptive:
        # Files are often sorted by subject, and bets win or lose on values that come in a random order.
        scores.sort(key=lambda each: hashlib.sha256(each.unit.encode()).digest())
    result = accuracy(scores, rule, _guessing(pairs), fixed=not adaptive)
    lost, gained = result.flips
    means = [float(np.mean(side)) for side in zip(*((each.reference, each.candidate) for each in scores), strict=True)]
    mean_a, mean_b = means or (0.0, 0.0)
    return ComparedTask(
        task="", verdict=result.verdict, why=(state_accuracy(result, SIDES),),
        test="betting" if scores and not result.exact else "exact", pairs=len(scores), a=mean_a, b=mean_b, lost=lost, gained=gained,
        loss=result.loss, low=result.interval.low, high=result.interval.high, p_mcnemar=result.p_mcnemar,
        p_inferior=result.p_inferior, p_regression=result.p_regression,
    )  # fmt: skip
