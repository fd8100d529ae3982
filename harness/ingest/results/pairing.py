"""Two tasks' answers -> pairs, and what cannot be paired, with the reason: counted, never dropped in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from assay.harness.ingest.results.result_set import ResultItem, ResultSet
from assay.harness.schema import Part

_EXAMPLES = 3
"""Keys that are named of what cannot be paired."""


class Unpaired(Part):
    """Items of one task that were not compared, for one reason."""

    id: str = Field(description="stable: other-prompt, other-target, only-in-a, only-in-b, repeated, not-scored")
    title: str
    count: int
    examples: tuple[str, ...] = Field(description="keys of the first of them")


@dataclass(frozen=True)
class ItemPair:
    """One document that both answered, asked with the same prompt."""

    a: ResultItem
    b: ResultItem

    @property
    def loss(self) -> float:
        """A's score minus B's, from -1 to 1."""
        assert self.a.score is not None
        assert self.b.score is not None
        return self.a.score - self.b.score


@dataclass
class ItemPairing:
    """The pairs of a task.

    Attributes:
        pairs: in A's order.
        unpaired: the rest.
        again: documents that the set holds more than once, in both sides alike; each counts once.
        unverified: pairs of which a side does not record its prompt.
    """

    pairs: list[ItemPair] = field(default_factory=list)
    unpaired: list[Unpaired] = field(default_factory=list)
    again: int = 0
    unverified: int = 0


_TITLES = {
    "other-prompt": "asked with another prompt",
    "other-target": "with another expected answer",
    "only-in-a": "in A alone",
    "only-in-b": "in B alone",
    "repeated": "more often in one than in the other",
    "not-scored": "without a score in A or in B: the request failed, or the tool gave none",
}


def refusals(a: ResultSet, b: ResultSet) -> list[str]:
    """Explain why two tasks cannot be compared at all; empty if they can. What a tool does not record refuses nothing."""
    compared = {
        "the number of worked examples (n-shot)": (_text(a.shots), _text(b.shots)),
        "the tokenizer": (a.tokenizer, b.tokenizer),
        "the chat template or prompt template": (a.template, b.template),
        "the version of the task": (a.task_version, b.task_version),
        "the metric": (a.metric, b.metric),
    }
    found = [f"{what} is {x} in A and {y} in B" for what, (x, y) in compared.items() if x and y and x != y]
    for name in sorted({*a.sampling, *b.sampling}):
        x, y = a.sampling.get(name, "not set"), b.sampling.get(name, "not set")
        if a.sampling and b.sampling and x != y:
            found.append(f"the setting {name} is {x} in A and {y} in B")
    return found


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def pair_items(a: Sequence[ResultItem], b: Sequence[ResultItem]) -> ItemPairing:
    """Join the answers to the same document: same key, same repeat, same prompt, same expected answer.

    A document that both hold equally often is one question asked again: the first answers count. Held more often by one side, it
    is unknown which answer belongs to which.
    """
    result = ItemPairing()
    left, right = _by_key(a), _by_key(b)
    for key, mine in left.items():
        theirs = right.get(key, [])
        if not theirs:
            _count(result, "only-in-a", key)
        elif len(mine) != len(theirs):
            _count(result, "repeated", key)
        else:
            result.again += len(mine) - 1
            _join(result, key, mine[0], theirs[0])
    for key in right:
        if key not in left:
            _count(result, "only-in-b", key)
    return result


_Key = tuple[str, int]


def _by_key(items: Sequence[ResultItem]) -> dict[_Key, list[ResultItem]]:
    found: dict[_Key, list[ResultItem]] = {}
    for item in items:
        found.setdefault((item.key, item.repeat), []).append(item)
    return found


def _join(result: ItemPairing, key: _Key, a: ResultItem, b: ResultItem) -> None:
    if a.prompt_hash and b.prompt_hash and a.prompt_hash != b.prompt_hash:
        _count(result, "other-prompt", key)
    elif a.target != b.target:
        _count(result, "other-target", key)
    elif a.score is None or b.score is None:
        _count(result, "not-scored", key)
    else:
        result.unverified += not (a.prompt_hash and b.prompt_hash)
        result.pairs.append(ItemPair(a, b))


def _count(result: ItemPairing, reason: str, key: _Key) -> None:
    name = key[0] if not key[1] else f"{key[0]} (repeat {key[1]})"
    for place, one in enumerate(result.unpaired):
        if one.id == reason:
            named = one.examples if len(one.examples) >= _EXAMPLES else (*one.examples, name)
            result.unpaired[place] = one.model_copy(update={"count": one.count + 1, "examples": named})
            return
    result.unpaired.append(Unpaired(id=reason, title=_TITLES[reason], count=1, examples=(name,)))


def guessing(pairs: Sequence[ItemPair]) -> float:
    """Compute the accuracy of always giving the most frequent expected answer: 1/4 for 4 balanced letters, near 0 for numbers."""
    counted = Counter(pair.a.target for pair in pairs)
    return max(counted.values()) / len(pairs) if counted and any(counted) else 0.0
