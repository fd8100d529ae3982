"""Both roles' answers to the same questions: correctness and flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from assay.harness.conditions import BATCH_SIZE, CACHED_PREFIX, PROMPT_LENGTH, Buckets, condition_id
from assay.harness.errors import EvidenceError
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.schema import Part
from assay.harness.sides import Role
from assay.harness.stats.multiple import holm
from assay.harness.stats.share import fisher_exact_greater


@dataclass(frozen=True)
class Pair:
    """One item that both roles answered, asked with the same prompt."""

    item: Item
    reference: Answer
    candidate: Answer

    def right(self, role: Role) -> bool:
        """Return True if the role's answer was parsed and is the expected one."""
        return self.item.is_right(self.of(role).parsed)

    @property
    def loss(self) -> int:
        """1 if only the reference is right, -1 if only the candidate is, or else 0."""
        return self.right("reference") - self.right("candidate")

    def of(self, role: Role) -> Answer:
        """Return the role's answer."""
        return self.reference if role == "reference" else self.candidate


@dataclass(frozen=True)
class Pairing:
    """The pairs of a suite, and the items that cannot be compared although they were answered.

    Attributes:
        pairs: in the order of the items.
        mismatched: ids of the items whose prompt is not the same in item, reference answer and candidate answer.
        repeated: ids of the items that repeat an earlier item's question; they count for nothing.
    """

    pairs: tuple[Pair, ...]
    mismatched: tuple[str, ...]
    repeated: tuple[str, ...] = ()


def pair(items: Sequence[Item], answers: Sequence[Answer], suite: Suite = "accuracy") -> Pairing:
    """Join both roles' answers to each item of a suite.

    Repeats (`Answer.repeat` above 0) are not compared, and equal prompts count once: asking twice does not make a second question.

    Raises:
        EvidenceError: one role answered an item twice, or two items have the same id: the records are of several runs.
    """
    answered: dict[tuple[Role, str], Answer] = {}
    for answer in answers:
        if answer.suite == suite and answer.repeat == 0:
            key = (answer.role, answer.item)
            if key in answered:
                _refuse_second(f"two answers of the {answer.role} to {answer.item}")
            answered[key] = answer
    pairs, mismatched, repeated = [], [], []
    seen, prompts = set(), set()
    for item in items:
        if item.suite != suite:
            continue
        if item.id in seen:
            _refuse_second(f"two items {item.id}")
        seen.add(item.id)
        if item.prompt_hash in prompts:
            repeated.append(item.id)
            continue
        prompts.add(item.prompt_hash)
        reference, candidate = answered.get(("reference", item.id)), answered.get(("candidate", item.id))
        if reference is None or candidate is None:
            continue
        if not item.prompt_hash == reference.prompt_hash == candidate.prompt_hash:
            mismatched.append(item.id)
        else:
            pairs.append(Pair(item, reference, candidate))
    return Pairing(tuple(pairs), tuple(mismatched), tuple(repeated))


def _refuse_second(what: str) -> None:
    raise EvidenceError(f"The records hold {what}.", "one", "use a separate folder for the run, with --out")


def envelope_pairs(answers: Sequence[Answer]) -> Sequence[Pair]:
    """Return both roles' answers to the requests at required lengths.

    Raises:
        EvidenceError: a role answered a request twice.
    """
    asked = {answer.item: answer for answer in answers if answer.suite == "envelope"}
    items = [Item(suite="envelope", id=id_, prompt=id_, prompt_hash=a.prompt_hash) for id_, a in asked.items()]
    return pair(items, answers, "envelope").pairs


class Tally(Part):
    """One role's answers; right + wrong + unparsed = total."""

    role: Role
    right: int = Field(description="parsed, and the expected letter")
    wrong: int = Field(description="parsed, and another letter")
    unparsed: int = Field(description="no letter was found")
    ran_to_limit: int = Field(description="answers that ran to the token limit; each is also one of the other three")
    total: int


def tally(pairs: Sequence[Pair], role: Role) -> Tally:
    """Count one role's answers."""
    right = sum(p.right(role) for p in pairs)
    unparsed = sum(p.of(role).parsed is None for p in pairs)
    return Tally(
        role=role,
        right=right,
        wrong=len(pairs) - right - unparsed,
        unparsed=unparsed,
        ran_to_limit=sum(p.of(role).finish_reason == "length" for p in pairs),
        total=len(pairs),
    )


def flips(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """List the questions that the candidate lost, right by the reference only, and those that it gained."""
    return [pair for pair in pairs if pair.loss > 0], [pair for pair in pairs if pair.loss < 0]


# A condition is intact if the candidate lost at most this share of the answers that the reference got right there.
_INTACT_SHARE = 0.1
# A condition is broken if its corrected p value is below this. Stricter than the policy's alpha: it decides no
# verdict, but names one of several conditions as the cause, and a wrong name misleads more than none.
_CAUSE_ALPHA = 0.01


# Maps a pair to its bucket's sort key, infinite if the bucket is unknown, and the bucket's label.
_Place = Callable[[Pair], tuple[float, str]]


def _number(buckets: Buckets, of: Callable[[Pair], int | None], unknown: str = "unknown") -> tuple[str, str, _Place]:
    def place(pair: Pair) -> tuple[float, str]:
        value = of(pair)
        return (math.inf, unknown) if value is None else (buckets.index(value), buckets.label(value))

    return buckets.id, buckets.title, place


# The ways to split the pairs: stable id, title, and place of a pair.
_SPLITS: tuple[tuple[str, str, _Place], ...] = (
    _number(CACHED_PREFIX, lambda p: p.candidate.cached_tokens),
    _number(PROMPT_LENGTH, lambda p: p.candidate.prompt_tokens),
    _number(BATCH_SIZE, lambda p: p.candidate.batch_size, "not observed"),
    ("group", "group", lambda p: (0, p.item.group)),
)


class ConditionRow(Part):
    """Both roles' results on the items of one condition, which is the candidate's own."""

    id: str = Field(description='stable, such as "cached-prefix-at-least-16"')
    by: str = Field(description='stable id of the quantity that splits the items: "cached-prefix", ..., "group"')
    title: str = Field(description='the quantity in prose, such as "cached prefix"')
    bucket: str = Field(description='such as ">= 16"')
    known: bool = Field(True, description="whether the quantity is known for these items")
    items: int
    reference_right: int
    candidate_right: int
    candidate_unparsed: int
    lost: int | None = Field(None, description="right by the reference only")


def by_condition(pairs: Sequence[Pair]) -> list[ConditionRow]:
    """Split the pairs by each quantity in turn; only buckets that hold a pair have a row."""
    rows = []
    for by, title, place in _SPLITS:
        buckets: dict[tuple[float, str], list[Pair]] = {}
        for p in sorted(pairs, key=place):
            buckets.setdefault(place(p), []).append(p)
        rows += [_row(by, title, bucket, inside) for bucket, inside in buckets.items()]
    return rows


def _row(by: str, title: str, bucket: tuple[float, str], pairs: Sequence[Pair]) -> ConditionRow:
    order, label = bucket
    return ConditionRow(
        id=condition_id(by, label),
        by=by,
        title=title,
        bucket=label,
        known=order < math.inf,
        items=len(pairs),
        reference_right=sum(p.right("reference") for p in pairs),
        candidate_right=sum(p.right("candidate") for p in pairs),
        candidate_unparsed=sum(p.candidate.parsed is None for p in pairs),
        lost=sum(p.right("reference") and not p.right("candidate") for p in pairs),
    )


class _Telling(NamedTuple):
    """A split of the questions that separates conditions where the candidate is right from those where it is not.

    Attributes:
        p: p value of its worst condition, corrected for the number of conditions.
        broken: its conditions under which the candidate loses more than elsewhere, worst first.
        intact: those under which it loses hardly anything.
    """

    p: float
    broken: Sequence[ConditionRow]
    intact: Sequence[ConditionRow]


def most_telling(rows: Sequence[ConditionRow]) -> _Telling | None:
    """Find the split that best separates conditions where the candidate is right from those where it is not.

    Of the questions that the reference got right, the share that the candidate lost in a bucket is compared with the share in the
    other buckets of the same split (Fisher's exact test, one-sided), so that a hard subject does not look broken. All buckets of
    all splits are one family (Holm's correction). A split counts only if the candidate is intact (loses at most `_INTACT_SHARE`)
    in another of its buckets. Unknown conditions are left out.
    """
    known = [row for row in rows if row.known and row.reference_right]
    tested = [(row, others) for row in known if (others := [o for o in known if o.by == row.by and o != row])]
    if not tested:
        return None
    p_values = []
    for row, others in tested:
        lost, right = sum(_lost(o) for o in others), sum(o.reference_right for o in others)
        p_values.append(fisher_exact_greater(_lost(row), row.reference_right - _lost(row), lost, right - lost))
    corrected = holm(p_values)
    broken = [(float(p), row) for p, (row, _) in zip(corrected, tested, strict=True) if p < _CAUSE_ALPHA]
    splits = [_telling(by, broken, known) for by in dict.fromkeys(row.by for row in known)]
    # Of two equivalent splits, the one that comes first in `_SPLITS` is nearer to a cause.
    return min(filter(None, splits), key=lambda telling: telling.p, default=None)


def _telling(by: str, broken: Sequence[tuple[float, ConditionRow]], known: Sequence[ConditionRow]) -> _Telling | None:
    """Return a split whose buckets are partly broken and partly intact, as `most_telling` does, or None."""
    here = sorted(((p, row) for p, row in broken if row.by == by), key=lambda entry: (entry[0], -_share_lost(entry[1])))
    worst = [row for _, row in here]
    intact = [row for row in known if row.by == by and row not in worst and _share_lost(row) <= _INTACT_SHARE]
    if not worst or not intact:
        return None
    return _Telling(here[0][0], worst, intact)


def _lost(row: ConditionRow) -> int:
    return row.lost or 0  # counted in every row of `by_condition`


def _share_lost(row: ConditionRow) -> float:
    return _lost(row) / row.reference_right
