"""The verdict on greedy texts: the limit of "close", the number of prompts, and what honest and broken candidates get."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from assay.harness.config import RunSpec
from assay.harness.evidence import jsonl
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Answer, Token
from assay.harness.judge.build import build
from assay.harness.judge.greedy_suite import MIN_PROMPTS, decide_share
from assay.harness.judge.report import SuiteResult
from assay.harness.sides import Role
from assay.harness.statement import state

Say = Callable[[Role, int], tuple[Token, ...]]


def token(text: str, logprob: float, other: str, least: float) -> Token:
    return Token(text=text, logprob=logprob, top=((text, logprob), (other, least)))


def swapped_by(nats: float) -> Say:
    """Both roles prefer their own letter to the other's by this much."""

    def say(role: Role, number: int) -> tuple[Token, ...]:
        own, other = ("A", "B") if role == "reference" else ("B", "A")
        return (token(own, -1e-7, other, -nats),)

    return say


def nan(role: Role, number: int) -> tuple[Token, ...]:
    if role == "reference":
        return (token("A", -1e-7, "B", -16.0),)
    return (Token(text="A", logprob=math.nan, top=(("A", math.nan), ("B", math.nan))),)


@pytest.fixture
def answered(tmp_path: Path, runs: ModuleType) -> Callable[..., RunFolder]:
    """A function that writes a run in which each role says this."""

    def answer(say: Say, prompts: int = MIN_PROMPTS, candidate: str = "triton") -> RunFolder:
        spec: RunSpec = runs.spec_of(candidate, suites=("greedy",), greedy_prompts=prompts)
        folder: RunFolder = runs.run_of(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", spec)
        runs.answer_all(folder, say)
        return folder

    return answer


@pytest.fixture
def judged(answered: Callable[..., RunFolder]) -> Callable[..., SuiteResult]:
    """A function that judges such a run, if its answers are not edited first."""

    def judge(*said: Any, edit: Callable[[Answer], Answer] | None = None, **more: Any) -> SuiteResult:
        folder = answered(*said, **more)
        if edit:
            records = folder.path / "records.jsonl"
            answers = [Answer.model_validate_json(line) for line in records.read_text().splitlines()]
            records.write_text(jsonl.lines_of(map(edit, answers)))
        (suite,) = build(folder).suites
        return suite

    return judge


@pytest.mark.parametrize("say", [swapped_by(16.0), nan])
@pytest.mark.parametrize("candidate", ["triton", "sage_attn"])
def test_a_certain_swap_and_nan_are_regressions(judged: Callable[..., SuiteResult], say: Say, candidate: str) -> None:
    suite = judged(say, candidate=candidate)
    assert (suite.verdict, {d.kind for d in suite.divergences}) == ("regression", {"apart"})
    assert suite.p_regression is not None
    assert suite.p_regression < 1e-9


@pytest.mark.parametrize("tokens", [(), (token("A", -0.1, "B", -3.0),)])
def test_texts_that_differ_are_apart_whatever_their_tokens_say(
    judged: Callable[..., SuiteResult], tokens: tuple[Token, ...]
) -> None:
    def named(answer: Answer) -> Answer:
        return answer.model_copy(update={"text": f"I am the {answer.role}."})

    suite = judged(lambda role, number: tokens, edit=named)
    assert (suite.verdict, {d.kind for d in suite.divergences}) == ("regression", {"apart"})


def test_answers_without_log_probabilities_are_no_pass(judged: Callable[..., SuiteResult]) -> None:
    def without(answer: Answer) -> Answer:
        first = (answer.role, answer.item, answer.repeat) == ("reference", "greedy-000", 0)
        return answer.model_copy(update={"tokens": ()}) if first else answer

    suite = judged(swapped_by(0.0), edit=without)
    assert (suite.verdict, suite.why[0]) == ("inconclusive", state("log-probabilities-lacking", bare=1, answers=256))


def test_the_limit_comes_from_the_floor_where_that_is_larger(judged: Callable[..., SuiteResult]) -> None:
    asked: dict[int, int] = {}

    def say(role: Role, number: int) -> tuple[Token, ...]:
        if role == "candidate":
            return (token("B", -0.1, "A", -0.9),)
        asked[number] = asked.get(number, 0) + 1
        return (token("A", -0.1, "B", -0.9 - (0.7 if asked[number] > 1 else 0.0)),)

    suite = judged(say)
    limit = next(metric for metric in suite.metrics if metric.id == "close-limit")
    assert (limit.value, limit.values) == (pytest.approx(3 * 0.7), {"factor": 3.0, "declared": []})
    assert (suite.verdict, {d.kind for d in suite.divergences}) == ("pass", {"close"})


@pytest.mark.parametrize(
    ("apart", "verdict"), [(0, "pass"), (6, "pass"), (7, "inconclusive"), (19, "inconclusive"), (20, "regression")]
)
def test_up_to_six_of_128_texts_apart_pass(judged: Callable[..., SuiteResult], apart: int, verdict: str) -> None:
    same, other = swapped_by(0.0), swapped_by(16.0)
    suite = judged(lambda role, number: (other if number < apart else same)(role, number))
    assert suite.verdict == verdict


def test_fewer_prompts_cannot_pass_and_a_regression_stays_one(judged: Callable[..., SuiteResult]) -> None:
    suite = judged(swapped_by(0.0), prompts=MIN_PROMPTS - 1)
    assert (suite.verdict, suite.why[0]) == ("inconclusive", state("too-few-texts", prompts=127, least=128))
    assert judged(swapped_by(16.0), prompts=32).verdict == "regression"


def test_a_reference_that_is_not_finite_blames_nobody(judged: Callable[..., SuiteResult]) -> None:
    suite = judged(lambda role, number: nan("candidate" if role == "reference" else "reference", number))
    assert (suite.verdict, suite.why[0]) == ("inconclusive", state("reference-texts-not-finite", broken=128, texts=128))


def test_honest_candidates_pass_in_95_percent_of_runs() -> None:
    passing = [k for k in range(MIN_PROMPTS + 1) if decide_share(k, MIN_PROMPTS, 0.10, 0.05) == "pass"]
    for share in (0.0, 0.01, 0.02):
        assert float(np.sum(binom.pmf(passing, MIN_PROMPTS, share))) >= 0.95
    assert float(np.sum(binom.pmf(passing, MIN_PROMPTS, 0.10))) <= 0.05


@pytest.mark.parametrize(("times", "verdict"), [(1, "regression"), (16, "inconclusive")])
def test_an_erratic_reference_excuses_nothing(judged: Callable[..., SuiteResult], times: int, verdict: str) -> None:
    asked: dict[int, int] = {}

    def say(role: Role, number: int) -> tuple[Token, ...]:
        if role == "candidate":
            return swapped_by(16.0)(role, number)
        asked[number] = asked.get(number, 0) + 1
        return (token("A", -1e-7, "B", -8.0 if asked[number] > 1 and number < times else -16.0),)

    suite = judged(say)
    assert suite.verdict == verdict
    assert {one.kind for one in suite.divergences} == {"apart"}
    assert [why.id for why in suite.why] == ["reference-erratic", "share-of-texts-apart", "policy"]
    assert (suite.why[0].values["erratic"], suite.why[0].values["answers"]) == (times, 32)


def test_an_erratic_reference_is_no_pass_and_a_finding(answered: Callable[..., RunFolder]) -> None:
    asked: dict[int, int] = {}

    def say(role: Role, number: int) -> tuple[Token, ...]:
        asked[number] = asked.get(number, 0) + (role == "reference")
        return (token("A", -1e-7, "B", -8.0 if asked[number] > 1 and number == 0 else -16.0),)

    report = build(answered(say))
    assert [suite.verdict for suite in report.suites] == ["inconclusive"]
    (found,) = report.findings
    assert (found.id, found.severity) == ("reference-erratic", "warning")
    assert found.claim == state("reference-erratic", erratic=1, answers=32, largest=pytest.approx(8), factor=3.0)


def test_two_roles_that_answer_nothing_have_compared_nothing(judged: Callable[..., SuiteResult]) -> None:
    suite = judged(lambda role, number: ())
    assert (suite.verdict, suite.why[0].id) == ("inconclusive", "no-texts-compared")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_endpoint_without_usable_log_probabilities_is_no_regression(judged: Callable[..., SuiteResult], value: float) -> None:
    def say(role: Role, number: int) -> tuple[Token, ...]:
        return nan(role, number) if role == "reference" else (Token(text="A", logprob=value, top=()),)

    suite = judged(say, candidate="http://gateway:8000")
    assert (suite.verdict, suite.divergences) == ("inconclusive", ())
    assert suite.why[0] == state("log-probabilities-lacking", bare=128, answers=256)
