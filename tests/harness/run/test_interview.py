"""What is asked, and in which order, on a fake engine. Real servers: tests/test_end_to_end.py."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.evals.mmlu import draw_questions
from assay.evals.questions import PROMPT_HEADER
from assay.harness.config import RunSpec
from assay.harness.engines.base import ChatRequest, Engine, never
from assay.harness.errors import EngineError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path
from assay.harness.evidence.manifest import QUESTION_PLAN
from assay.harness.evidence.records import Answer
from assay.harness.judge.build import build
from assay.harness.progress import ProgressDisplay
from assay.harness.run.collect import collect
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.questions import _FLOOR_QUESTIONS, QuestionStop, interview
from assay.harness.run.run_folder import open_folder
from assay.harness.sides import ROLES, Role

EXPECTED = {question.prompt: question.answer for question in draw_questions("builtin", 2000).questions}


class FakeEngine(Engine):
    """Answers questions rightly, or all with the same letter, and records what it is asked."""

    def __init__(self, role: Role, dies_after: int = 10**9, letter: str = "") -> None:
        self.letter, self.prompts = letter, list[str]()
        self.role, self.backend, self.url, self.label = role, "fake", "", "a fake"
        self.startup_s, self.launch_command, self.evidence = None, "", None
        self.events: list[str] = []
        self.left = dies_after
        self.stopped = False

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    def check(self) -> None:
        pass

    def arguments(self) -> dict[str, Any]:
        return {}

    def flush_cache(self) -> None:
        self.events.append("flush")

    def ask(
        self,
        asks: Sequence[ChatRequest],
        concurrency: int,
        on_reply: Callable[[int, Answer], None],
        enough: Callable[[], bool] = never,
    ) -> None:
        for index, ask in enumerate(asks):
            if enough():
                return
            if self.left == 0:
                raise EngineError("it died")
            self.left -= 1
            self.events.append(
                "header" if ask.prompt == PROMPT_HEADER else f"{'greedy' if ask.top_logprobs else 'ask'}/{concurrency}"
            )
            self.prompts.append(ask.prompt)
            letter = self.letter or EXPECTED.get(ask.prompt, "A")
            told = {"finish_reason": "stop", "prompt_tokens": 100, "completion_tokens": 3, "cached_tokens": 0, "latency_s": 0.1}
            on_reply(index, ask.answered(self.role, f"Answer: {letter}", request_id="id", **told))


@pytest.fixture
def plan() -> Plan:
    return prepare(
        RunSpec.of(reference="torch_native", candidate="sage_attn", questions=16, greedy_prompts=3, suites=("accuracy", "greedy"))
    )


def asked(plan: Plan, folder: RunFolder, engines: Sequence[FakeEngine]) -> None:
    with ProgressDisplay(Console(file=StringIO())) as display:
        collect(plan, folder, display, ready=engines)


def begins_with(events: list[str], expected: list[str]) -> bool:
    """Whether the interview, which comes before all else that is asked, was this one."""
    return events[: len(expected)] == expected


def test_cold_questions_come_one_by_one_each_on_an_empty_cache(plan: Plan, tmp_path: Path) -> None:
    engines = [FakeEngine("reference"), FakeEngine("candidate")]
    asked(plan, open_folder(plan, tmp_path / "run"), engines)
    cold = ["flush", "ask/1"] * 2
    warm = ["flush", "header"] + ["ask/32"] * 14
    assert begins_with(engines[1].events, cold + warm + ["greedy/32"] * 3)
    again = ["ask/32"] * 14 + ["greedy/32"] * 4
    assert begins_with(engines[0].events, cold + warm + again), "the reference is asked again, for its floors"


def test_what_was_answered_is_not_asked_again(plan: Plan, tmp_path: Path) -> None:
    folder = open_folder(plan, tmp_path / "run")
    asked(plan, folder, [FakeEngine("reference"), FakeEngine("candidate", dies_after=9)])
    failure = folder.progress().failure
    assert failure is not None
    assert "it died" in failure.found
    before = {answer.key for answer in folder.answers()}
    assert len([key for key in before if key[1] == "candidate"]) == 8, "all but the header"
    second = [FakeEngine("reference"), FakeEngine("candidate")]
    again = open_folder(plan, tmp_path / "run")
    asked(plan, again, second)
    assert begins_with(second[1].events, ["flush", "header"] + ["ask/32"] * 8 + ["greedy/32"] * 3)
    assert again.progress().failure is None
    assert len(again.answers()) == 2 * 16 + 14 + 3 * 2 + 1


def test_one_engines_failure_stops_both(plan: Plan, tmp_path: Path) -> None:
    engines = [FakeEngine("reference"), FakeEngine("candidate", dies_after=0)]
    asked(plan, open_folder(plan, tmp_path / "run"), engines)
    assert all(engine.stopped for engine in engines)


def test_without_a_way_to_score_tokens_logits_are_not_compared(plan: Plan, tmp_path: Path) -> None:
    scored = prepare(plan.spec.changed(suites=("accuracy", "greedy", "logits")))
    folder = open_folder(scored, tmp_path / "run")
    asked(scored, folder, [FakeEngine("reference"), FakeEngine("candidate")])
    assert folder.progress().failure is None
    assert len(folder.answers()) == 2 * 16 + 14 + 3 * 2 + 1
    assert not logits_path(folder.path, "reference", 0).exists()


@pytest.fixture
def long_plan() -> Plan:
    return prepare(RunSpec.of(reference="torch_native", candidate="sage_attn", questions=2000, suites=("accuracy",)))


def test_asking_stops_when_the_answers_decide(long_plan: Plan, tmp_path: Path) -> None:
    engines = [FakeEngine("reference"), FakeEngine("candidate")]
    folder = open_folder(long_plan, tmp_path / "run")
    asked(long_plan, folder, engines)
    recorded = folder.read(QUESTION_PLAN)
    assert recorded is not None
    assert (recorded.stopped, recorded.most, recorded.seed) == ("decided", 2000, 0)
    assert recorded.pairs is not None
    assert 200 <= recorded.pairs <= 300, "an equal candidate, of which no answer flips"
    items = [item for item in long_plan.of("accuracy") if item.cold]
    answers = folder.answers()
    assert sum(answer.repeat > 0 for answer in answers) == _FLOOR_QUESTIONS
    for role in ROLES:
        questions = [answer.item for answer in answers if answer.role == role and not answer.repeat]
        assert len(questions) == recorded.pairs, "none was in flight in vain"
    answered = {(answer.role, answer.item) for answer in answers}
    assert all((role, item.id) in answered for role in ROLES for item in items), "both conditions are in every run"
    report = build(folder)
    assert {suite.id: suite.verdict for suite in report.suites} == {"accuracy": "pass"}
    assert "ok" in [check.status for check in report.checks if check.id == "all-answered"]


def test_a_broken_candidate_is_asked_few_questions(long_plan: Plan, tmp_path: Path) -> None:
    folder = open_folder(long_plan, tmp_path / "run")
    asked(long_plan, folder, [FakeEngine("reference"), FakeEngine("candidate", letter="A")])
    recorded = folder.read(QUESTION_PLAN)
    assert recorded is not None
    assert recorded.stopped == "decided"
    assert recorded.pairs is not None
    assert recorded.pairs < 60
    assert build(folder).suites[0].verdict == "regression"


def test_a_reference_that_guesses_is_not_asked_in_vain(long_plan: Plan, tmp_path: Path) -> None:
    folder = open_folder(long_plan, tmp_path / "run")
    asked(long_plan, folder, [FakeEngine("reference", letter="?"), FakeEngine("candidate", letter="?")])
    recorded = folder.read(QUESTION_PLAN)
    assert recorded is not None
    assert recorded.stopped == "hopeless"
    assert len(folder.answers()) < 1000
    assert build(folder).suites[0].verdict == "inconclusive"


def test_a_run_killed_while_asking_goes_on_in_the_same_order(long_plan: Plan, tmp_path: Path) -> None:
    folder = open_folder(long_plan, tmp_path / "run")
    asked(long_plan, folder, [FakeEngine("reference"), FakeEngine("candidate", dies_after=90)])
    before = {answer.key for answer in folder.answers()}
    assert folder.progress().failure is not None
    second = [FakeEngine("reference"), FakeEngine("candidate")]
    asked(long_plan, open_folder(long_plan, tmp_path / "run"), second)
    answers = folder.answers()
    assert len({answer.key for answer in answers}) == len(answers), "nothing is asked twice"
    assert before < {answer.key for answer in answers}
    place = {item.id: number for number, item in enumerate(long_plan.of("accuracy"))}
    for role in ROLES:
        warm = [a.item for a in answers if a.role == role and not a.repeat and place[a.item] % 8 != 7]
        assert [place[item] for item in warm] == sorted(place[item] for item in warm)
    asked(long_plan, open_folder(long_plan, tmp_path / "run"), third := [FakeEngine("reference"), FakeEngine("candidate")])
    assert [engine.events for engine in third] == [[], []], "what has decided is not asked on"


def test_servers_in_turn_share_few_questions_first(long_plan: Plan, tmp_path: Path) -> None:
    stop = QuestionStop(long_plan, [], together=False)
    stop.first = 100
    assert stop.open_items("reference") == stop.items[:100]
    assert stop.open_items("candidate") == []
    folder = open_folder(long_plan, tmp_path / "run")
    with ProgressDisplay(Console(file=StringIO())) as display:
        stop.begin(["reference"])
        interview(FakeEngine("reference"), long_plan, folder, set(), stop, display)
        assert len(stop.open_items("candidate")) == 100
        stop.begin(["candidate"])
        interview(FakeEngine("candidate"), long_plan, folder, set(), stop, display)
        assert (stop.pairs, stop.reason) == (100, None)
        stop.first = len(stop.items)
        for role in ROLES:
            stop.begin([role])
            interview(FakeEngine(role), long_plan, folder, {answer.key for answer in folder.answers()}, stop, display)
    assert stop.reason == "decided"
    by_role = {role: sum(a.role == role and not a.repeat for a in folder.answers()) for role in ROLES}
    assert by_role["reference"] == 2000
    assert by_role["candidate"] < 300


def test_the_command_in_the_manifest_repeats_the_run(plan: Plan, tmp_path: Path) -> None:
    words = shlex.split(open_folder(plan, tmp_path / "run").manifest().command)
    assert words[:2] == ["assay", "run"]
    assert set(words[2:]) == {"--reference=torch_native", "--candidate=sage_attn", "--questions=16", "--suites=accuracy,greedy"}
