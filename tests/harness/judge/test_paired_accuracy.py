from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import Pair, pair
from assay.harness.judge.greedy_suite import decide_share
from assay.harness.judge.paired_accuracy import Accuracy, Rule, accuracy_of, beginning, soonest_pass, state_accuracy
from assay.harness.sides import ROLES
from assay.harness.statement import state

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


MARGIN, ALPHA = RULE.margin, RULE.alpha


Decide = Callable[..., Accuracy]


@pytest.fixture(scope="session")
def decide(paired: Callable[..., list[Pair]]) -> Decide:
    """The decision on so many questions that both got right, and were lost, gained, and wrong by both."""
    return lambda *counts: accuracy_of(paired(*counts), RULE)


def test_the_seed_case_is_a_regression(decide: Decide) -> None:
    # 64 questions, 40 right by the reference, 8 by the candidate.
    decision = decide(8, 32, 0, 24)
    assert (decision.verdict, decision.loss) == ("regression", 0.5)
    assert decision.p_regression < 1e-6
    assert decision.interval.low > 0.2
    stated = state_accuracy(decision)
    assert stated.id == "accuracy-lost"
    assert stated.values["p"] == decision.p_regression
    assert (stated.values["lost"], stated.values["gained"], stated.values["questions"]) == (32, 0, 64)


def test_nothing_compared_is_never_a_pass(decide: Decide) -> None:
    decision = decide()
    assert decision.verdict == "inconclusive"
    assert state_accuracy(decision) == state("nothing-compared")
    assert (decision.interval.low, decision.interval.high) == (-1, 1)


def test_a_reference_that_guesses_proves_nothing(decide: Decide) -> None:
    equal = decide(250, 0, 0, 750)
    assert equal.verdict == "inconclusive"
    stated = state_accuracy(equal)
    assert (stated.id, stated.values["chance"], stated.values["margins"]) == ("no-headroom", 0.25, 2)
    assert decide(0, 250, 0, 750).verdict == "inconclusive"
    assert decide(300, 0, 0, 700).verdict == "inconclusive", "better than guessing, but there is hardly anything to lose"
    assert decide(600, 0, 0, 400).verdict == "pass"


def test_a_significant_loss_within_the_margin_passes_and_says_so(decide: Decide) -> None:
    decision = decide(2940, 50, 0, 10)
    assert decision.verdict == "pass"
    assert state_accuracy(decision).values["p_mcnemar"] < 0.05


@given(both_right=st.integers(0, 90), lost=st.integers(0, 30), gained=st.integers(0, 30), both_wrong=st.integers(0, 60))
def test_every_verdict_is_what_its_numbers_say(both_right: int, lost: int, gained: int, both_wrong: int, decide: Decide) -> None:
    decision = decide(both_right, lost, gained, both_wrong)
    assert decision.loss in decision.interval
    if decision.verdict == "pass":
        assert decision.interval.high < MARGIN or decision.loss >= MARGIN
    if decision.verdict == "regression":
        assert decision.p_regression <= RULE.regression_alpha
        assert decision.interval.low > MARGIN or decision.loss <= MARGIN


@pytest.mark.parametrize(
    ("bad", "n", "verdict"),
    [
        (0, 0, "inconclusive"),
        (0, 28, "inconclusive"),  # 1 - 0.05^(1/28) = 0.1015
        (0, 29, "pass"),  # 1 - 0.05^(1/29) = 0.0981
        (1, 32, "inconclusive"),
        (6, 32, "inconclusive"),
        (7, 32, "regression"),
        (32, 32, "regression"),
    ],
)
def test_a_share_is_decided_by_its_bounds(bad: int, n: int, verdict: str) -> None:
    assert decide_share(bad, n, 0.1, ALPHA) == verdict
