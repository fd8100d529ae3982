"""Both roles' answers to the same questions: correctness and flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from assay.harness.errors import EvidenceError
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.schema import Part
from assay.harness.sides import Role


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
        """1 where only the reference is right, -1 where only the candidate is, else 0."""
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
        repeated: ids of the items that ask again what an earlier item asked; they count for nothing.
    """

    pairs: tuple[Pair, ...]
    mismatched: tuple[str, ...]
    repeated: tuple[str, ...] = ()


def pair(items: Sequence[Item], answers: Sequence[Answer], suite: Suite = "accuracy") -> Pairing:
    """Join both roles' answers to each item of a suite.

    Repeats (`Answer.repeat` above 0) are not compared, and equal prompts count once: asking twice is no second question.

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
