"""The questions of a run and what both roles answered: what the test of accuracy reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from assay.evals.questions import parse_answer
from assay.harness.compare.answers import Pair, Pairing
from assay.harness.compare.paired_accuracy import Outcome, Prefix, Rule, outcome_of, prefix_of
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import QUESTION_PLAN, QuestionPlan
from assay.harness.evidence.records import Answer, Item


@dataclass(frozen=True)
class Questions:
    """The questions of a run, and what both roles answered.

    Attributes:
        items: in their random order, each prompt once.
        pairs: those that both roles answered.
        again: for each question that the reference answered twice, whether one answer was right and the other not.
        prefix: what the test reads.
        rule: what it is made with.
        plan: what was recorded before the first question was asked; None if there is no record.
    """

    items: tuple[Item, ...]
    pairs: tuple[Pair, ...]
    again: tuple[bool, ...]
    prefix: Prefix
    rule: Rule
    plan: QuestionPlan | None

    @cached_property
    def outcome(self) -> Outcome:
        """The result of the test."""
        return outcome_of(self.prefix, self.rule)

    @property
    def needed(self) -> set[str]:
        """Ids of the questions that both roles must have answered: all, unless a beginning of them ended the test."""
        return {pair.item.id for pair in self.prefix.pairs} if self.outcome.over else {item.id for item in self.items}


def read_questions(
    folder: RunFolder, rule: Rule, items: Sequence[Item], pairing: Pairing, answers: Sequence[Answer]
) -> Questions:
    """Read how the questions were planned, and cut the pairs to what the test may read.

    Levels and margin of the `rule` are the policy's; only the size of the set comes from the record.
    """
    plan = folder.read(QUESTION_PLAN)
    distinct = tuple(item for item in items if item.suite == "accuracy" and item.id not in pairing.repeated)
    first = {pair.item.id: pair for pair in pairing.pairs}
    again = [a for a in answers if a.suite == "accuracy" and a.role == "reference" and a.repeat > 0 and a.item in first]
    return Questions(
        items=distinct,
        pairs=pairing.pairs,
        again=tuple(first[a.item].right("reference") != first[a.item].item.is_right(a.parsed) for a in again),
        prefix=prefix_of(distinct, pairing.pairs),
        rule=replace(rule, population=plan.population if plan else None),
        plan=plan,
    )


def parsed_from_text(answers: Sequence[Answer], items: Sequence[Item]) -> list[Answer]:
    """Parse the answers' letter, number or text again, whatever was recorded."""
    expected = {item.id: item.expected for item in items if item.suite == "accuracy"}
    return [
        answer.model_copy(update={"parsed": parse_answer(answer.text, expected.get(answer.item))})
        if answer.suite == "accuracy"
        else answer
        for answer in answers
    ]
