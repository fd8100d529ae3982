"""Evidence about accuracy that must not pass, from a run's folder to its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from assay.evals.questions import LETTERS
from assay.harness.config import RunSpec
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Item
from assay.harness.judge.accuracy_suite import _check_all_answered, claim
from assay.harness.judge.build import build
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.report import Report, SuiteResult
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder
from assay.harness.sides import ROLES, Role
from assay.harness.statement import state
from assay.reports.wording.verdict import headline, reasons, unmet_sentence

Letter = Callable[[int, Item], str | None]
"""What a role answers to a question, by its place in the order; None for an answer without a letter."""


def plan_of(questions: int = 400, margin: float = 0.05) -> Plan:
    return prepare(
        RunSpec.of(reference="torch_native", candidate="sage_attn", questions=questions, margin=margin, suites=("accuracy",))
    )


def right(number: int, item: Item) -> str | None:
    return item.expected


def wrong(number: int, item: Item) -> str:
    return next(letter for letter in LETTERS if letter != item.expected)


def share(of: Letter, other: Letter, every: int) -> Letter:
    """One question in `every` is answered by `of`, the rest by `other`."""
    return lambda number, item: (of if number % every == 0 else other)(number, item)


@pytest.fixture
def begun(runs: ModuleType, tmp_path: Path) -> Callable[..., RunFolder]:
    """A function that writes a run whose servers have started, and which has answered nothing."""

    def begin(plan: Plan) -> RunFolder:
        folder: RunFolder = runs.started(plan, tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
        for role in ROLES:
            runs.count_layers(folder, role, plan.backend(role).name)
        return folder

    return begin


@pytest.fixture
def answered(runs: ModuleType) -> Callable[..., None]:
    """A function that appends a role's answers to these items."""

    def answer(folder: RunFolder, role: Role, items: Sequence[Item], letter: Letter) -> None:
        for number, item in enumerate(items):
            parsed = letter(number, item)
            text = f"Answer: {parsed}" if parsed else "I do not know."
            folder.append(runs.answer_of(role, item, text=text, parsed=parsed))

    return answer


@pytest.fixture
def report_of(begun: Callable[..., RunFolder], answered: Callable[..., None]) -> Callable[..., Report]:
    """A function that makes the report of two roles that answer every question of a plan."""

    def report(plan: Plan, reference: Letter, candidate: Letter) -> Report:
        folder = begun(plan)
        answered(folder, "reference", plan.of("accuracy"), reference)
        answered(folder, "candidate", plan.of("accuracy"), candidate)
        return build(folder)

    return report


def accuracy(report: Report) -> SuiteResult:
    (suite,) = [suite for suite in report.suites if suite.id == "accuracy"]
    return suite


def test_an_equal_candidate_passes_and_a_broken_one_does_not(report_of: Callable[..., Report]) -> None:
    assert accuracy(report_of(plan_of(), right, right)).verdict == "pass"
    assert accuracy(report_of(plan_of(), right, share(right, wrong, 8))).verdict == "regression"


@pytest.mark.parametrize(("more", "status"), [(1, "ok"), (9, "missing")])
def test_texts_that_are_equal_are_equally_long_however_a_server_counts(
    begun: Callable[..., RunFolder], runs: ModuleType, more: int, status: str
) -> None:
    plan = plan_of()
    folder = begun(plan)
    for role, counted in zip(ROLES, (9, 9 + more), strict=True):
        for item in plan.of("accuracy"):
            folder.append(runs.answer_of(role, item, completion_tokens=counted))
    report = build(folder)
    (check,) = [check for check in report.checks if check.id == "answer-lengths"]
    assert (accuracy(report).verdict, check.status, check.outcome.values["ratio"]) == ("pass", status, 1.0)
    assert check.outcome.values["recounted"] == more


@pytest.mark.parametrize(
    ("tokens", "cut", "verdict", "status"),
    [
        ((200, 200), (False, False), "pass", "ok"),
        ((200, 204), (False, False), "pass", "ok"),
        ((200, 260), (False, False), "regression", "missing"),
        ((200, 140), (False, False), "regression", "missing"),
        ((200, 202), (False, True), "regression", "missing"),
        ((200, 200), (True, True), "pass", "not checked"),
    ],
)
def test_right_answers_of_another_length_are_a_regression(
    begun: Callable[..., RunFolder], runs: ModuleType, tokens: tuple[int, int], cut: tuple[bool, bool], verdict: str, status: str
) -> None:
    plan = plan_of()
    folder = begun(plan)
    for role, length, ran_to_limit in zip(ROLES, tokens, cut, strict=True):
        changed = {"finish_reason": "length" if ran_to_limit else "stop"}
        for number, item in enumerate(plan.of("accuracy")):
            tokens_of = length + number % 7
            text = f"{'so ' * tokens_of}Answer: {item.expected}"
            folder.append(runs.answer_of(role, item, completion_tokens=tokens_of, text=text, **changed))
    report = build(folder)
    suite = accuracy(report)
    (check,) = [check for check in report.checks if check.id == "answer-lengths"]
    assert (suite.verdict, check.status) == (verdict, status)
    wrong = [finding for finding in report.findings if finding.id == "answer-lengths"]
    assert [finding.severity for finding in wrong] == (["serious"] if verdict == "regression" else [])
    if verdict == "regression":
        assert not [finding for finding in report.findings if finding.id == "accuracy"], "nothing was lost"
        assert suite.deciding_metric is not None
        assert suite.deciding_metric.id == "answer-length-ratio"
        assert "length of answers" in headline(report)


@pytest.mark.parametrize(
    ("end", "verdict", "status"),
    [({}, "pass", "ok"), ({"finish_reason": "abort"}, "inconclusive", "failed"), ({"stopped_at": "7"}, "inconclusive", "failed")],
)
def test_right_answers_that_end_otherwise_are_no_pass(
    begun: Callable[..., RunFolder], runs: ModuleType, end: dict[str, str], verdict: str, status: str
) -> None:
    plan = plan_of()
    folder = begun(plan)
    for role in ROLES:
        for number, item in enumerate(plan.of("accuracy")):
            changed = end if role == "candidate" and number < 20 else {}
            folder.append(runs.answer_of(role, item, **{"stopped_at": "2", **changed}))
    report = build(folder)
    (check,) = [check for check in report.checks if check.id == "finish-reasons"]
    assert (check.status, accuracy(report).verdict) == (status, "pass")
    other = [end.get("finish_reason") or "stop at 7", 0, 20]
    assert (other in [ends[:3] for ends in check.outcome.values["ends"]]) == (status == "failed")
    assert any(unmet_sentence(check) in reason for reason in reasons(report)) == (status == "failed")


def test_every_number_is_of_the_questions_that_the_test_read(
    begun: Callable[..., RunFolder], answered: Callable[..., None]
) -> None:
    plan = plan_of()
    folder = begun(plan)
    items = plan.of("accuracy")
    answered(folder, "reference", items[:120], right)
    # Question 100 was still being answered at the verdict; those after it are right, and would make the candidate look better.
    answered(folder, "candidate", items[:100], share(right, wrong, 4))
    answered(folder, "candidate", items[101:120], right)
    report = build(folder)
    suite = accuracy(report)
    values = {one.id: one.value for one in suite.metrics}
    before, after = (row.right / row.total for row in suite.tallies)
    assert values["questions"] == 100 == sum(row.total for row in suite.tallies) / 2
    assert 100 * (before - after) == pytest.approx(values["loss-of-accuracy"]) == pytest.approx(75)
    assert "accuracy 1.000 → 0.250" in headline(report)
    assert len(suite.flips) == 75
    assert (len(suite.steady), {flip.direction for flip in suite.steady}) == (min(64, suite.tallies[0].total - 75), {"both right"})


def test_the_same_question_256_times_counts_once(begun: Callable[..., RunFolder], answered: Callable[..., None]) -> None:
    first = plan_of().of("accuracy")[0]
    copies = tuple(first.model_copy(update={"id": f"copy-{number}"}) for number in range(400))
    plan = replace(plan_of(), items=copies)
    folder = begun(plan)
    for role in ROLES:
        answered(folder, role, copies, right)
    report = build(folder)
    assert report.verdict != "pass"
    assert all(suite.verdict != "pass" for suite in report.suites)


def test_all_answered() -> None:
    assert _check_all_answered(8, 8, ()).status == "ok"
    assert _check_all_answered(8, 7, ()).status == "missing"
    assert _check_all_answered(0, 0, ()).status == "missing"
    other = _check_all_answered(8, 7, ("mmlu-3",))
    found = state("another-prompt-answered", answered=7, asked=8, mismatched=1, first="mmlu-3")
    assert (other.status, other.outcome) == ("missing", found)


def test_only_accuracy_that_was_not_asked_for_is_noticed(tmp_path: Path) -> None:
    for suites, noticed in ((("accuracy", "greedy"), []), (("greedy",), ["not checked"])):
        spec = RunSpec.of(reference="torch_native", candidate="sage_attn", questions=8, greedy_prompts=8, suites=suites)
        run = RunEvidence.of(open_folder(prepare(spec), tmp_path / "-".join(suites)))
        assert [check.status for check in claim(run).checks if check.id == "accuracy-tested"] == noticed
