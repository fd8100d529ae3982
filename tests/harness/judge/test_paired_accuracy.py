from __future__ import annotations

from dataclasses import replace

import pytest

from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import Pair, pair
from assay.harness.judge.paired_accuracy import Accuracy, Rule, accuracy_of, beginning, soonest_pass
from assay.harness.sides import ROLES

RULE = Rule(margin=0.05, alpha=0.05, regression_alpha=0.01, population=None)


def items_of(count: int, units: dict[int, str] | None = None, cold: tuple[int, ...] = ()) -> list[Item]:
    return [
        Item(
            suite="accuracy", id=f"q{n}", prompt=f"p{n}", prompt_hash=f"h{n}", expected="A",
            unit=(units or {}).get(n, ""), cold=n in cold,
        )
        for n in range(count)
    ]  # fmt: skip


def pairs_of(items: list[Item], outcomes: str) -> tuple[Pair, ...]:
    """By outcome: "=" both right, "x" both wrong, "-" lost, "+" gained, "u" unparsed by both, "?" by the
    candidate alone, "w" by it where the reference is wrong, " " missing."""
    letters = {
        "=": ("A", "A"),
        "x": ("B", "C"),
        "-": ("A", "B"),
        "+": ("B", "A"),
        "u": (None, None),
        "?": ("A", None),
        "w": ("B", None),
    }
    answers = [
        Answer(
            suite="accuracy", role=role, item=item.id, prompt_hash=item.prompt_hash, text="", parsed=letters[outcome][number],
            finish_reason="stop", prompt_tokens=1, completion_tokens=1, latency_s=0.1,
        )
        for item, outcome in zip(items, outcomes, strict=True)
        if outcome != " "
        for number, role in enumerate(ROLES)
    ]  # fmt: skip
    return pair(items, answers).pairs


def read(outcomes: str, units: dict[int, str] | None = None, cold: tuple[int, ...] = ()) -> tuple[Pair, ...]:
    items = items_of(len(outcomes), units, cold)
    return beginning(items, pairs_of(items, outcomes))


def decided(outcomes: str, units: dict[int, str] | None = None, cold: tuple[int, ...] = (), rule: Rule = RULE) -> Accuracy:
    return accuracy_of(read(outcomes, units, cold), rule)


def test_the_test_reads_up_to_the_first_question_that_is_not_answered() -> None:
    assert [one.item.id for one in read("=-+= ----")] == ["q0", "q1", "q2", "q3"]
    assert decided("=-+= ----").losses.tolist() == [0, 1, -1, 0]


def test_questions_about_one_passage_are_one_value() -> None:
    result = decided("=---+=", {1: "a", 2: "a", 3: "b", 4: "b"})
    assert result.losses.tolist() == [0, 1, 0, 0]
    assert result.references.tolist() == [1, 1, 0.5, 1]
    assert decided("=- -+=", {1: "a", 2: "a"}).losses.tolist() == [0], "a passage counts when all its questions are answered"


def test_twenty_lost_questions_about_one_passage_are_not_twenty_losses() -> None:
    same = dict.fromkeys(range(20), "a")
    assert decided("-" * 20 + "=" * 10).reason == "regression"
    assert decided("-" * 20 + "=" * 10, same).reason == "undecided"


def test_questions_with_an_empty_cache_lose_a_pass_but_win_none() -> None:
    cold = tuple(range(200))
    assert decided("=" * 200, cold=cold).reason == "undecided"
    assert decided("=" * 200 + "=" * 100, cold=cold).reason == "non-inferior"
    assert decided("-" * 30 + "=" * 100, cold=tuple(range(30))).reason == "regression"


def test_a_regression_stays_one_whatever_comes_after() -> None:
    assert decided("-" * 20).reason == "regression"
    assert decided("-" * 20 + "=" * 2000).reason == "regression"


def test_a_pass_does_not_survive_that_all_further_answers_are_lost() -> None:
    assert decided("=" * 100).reason == "non-inferior"
    assert decided("=" * 100 + "-" * 60).reason == "regression"


@pytest.mark.parametrize(
    ("outcomes", "reason", "hopeless"),
    [
        ("", "nothing", False),
        ("=" * 20, "undecided", False),
        ("=" * 100, "non-inferior", False),
        ("u" * 6 + "=" * 94, "unparsed", False),
        ("u" * 60 + "=" * 40, "unparsed", True),
        ("?" * 60 + "=" * 40, "regression", False),
        ("w" * 6 + "=" * 94, "unparsed", False),
        ("xx=" * 33, "no headroom", False),
        ("x" * 300 + "=" * 60, "no headroom", True),
        ("-" * 8 + "+" * 8 + "=" * 84, "undecided", False),
    ],
)
def test_reasons(outcomes: str, reason: str, hopeless: bool) -> None:
    outcome = decided(outcomes)
    assert (outcome.reason, outcome.hopeless) == (reason, hopeless)
    assert outcome.over == (hopeless or reason in ("regression", "non-inferior"))


@pytest.mark.parametrize(
    ("known", "cold"), [("", ()), ("=" * 40, ()), ("=" * 20 + "-", ()), ("+" * 3, ()), ("", (7, 15, 23)), ("-" * 60, ())]
)
def test_a_pass_comes_no_sooner_than_it_would_without_further_losses(known: str, cold: tuple[int, ...]) -> None:
    items = items_of(600, cold=cold)
    answered = pairs_of(items, known + "=" * (600 - len(known)))

    def passes(after: int) -> bool:
        return accuracy_of(beginning(items[:after], answered[:after]), RULE).reason == "non-inferior"

    first = next((after for after in range(1, 601) if passes(after)), 600)
    assert soonest_pass(items, answered[: len(known)], RULE) == first


@pytest.mark.parametrize(("outcomes", "unfit"), [("-" * 60 + "u" * 20, "unparsed"), ("x" * 60 + "-" * 30, "no headroom")])
def test_a_reference_that_is_not_fit_shows_a_regression_only_where_the_loss_alone_counts(outcomes: str, unfit: str) -> None:
    assert decided(outcomes).reason == unfit
    assert decided(outcomes, rule=replace(RULE, loss_suffices=True)).reason == "regression"
