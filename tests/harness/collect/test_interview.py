"""What is asked, and in which order, on a fake engine. Real servers: tests/test_end_to_end.py."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER
from assay.harness.collect.collect import collect
from assay.harness.collect.plan import Plan, prepare
from assay.harness.collect.run_folder import default_folder, open_folder
from assay.harness.config import RunSpec
from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.errors import EngineError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path
from assay.harness.evidence.records import Role
from assay.harness.progress import ProgressDisplay


class FakeEngine(Engine):
    """Answers A to everything, and records what it is asked."""

    def __init__(self, role: Role, dies_after: int = 10**9) -> None:
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

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Callable[[int, Reply], None]) -> None:
        for index, ask in enumerate(asks):
            if self.left == 0:
                raise EngineError("it died")
            self.left -= 1
            self.events.append(
                "header" if ask.prompt == PROMPT_HEADER else f"{'greedy' if ask.top_logprobs else 'ask'}/{concurrency}"
            )
            on_reply(index, Reply("id", "Answer: A", "stop", 100, 3, 0, 0.1))


@pytest.fixture
def plan() -> Plan:
    return prepare(
        RunSpec(
            reference="torch_native", candidate="sage_attn", questions=16, greedy_prompts=3, suites=("mmlu", "greedy")
        )
    )


def asked(plan: Plan, folder: RunFolder, engines: Sequence[FakeEngine]) -> None:
    with ProgressDisplay(Console(file=StringIO())) as display:
        collect(plan, folder, display, ready=engines)


def test_cold_questions_come_one_by_one_each_on_an_empty_cache(plan: Plan, tmp_path: Path) -> None:
    engines = [FakeEngine("reference"), FakeEngine("candidate")]
    asked(plan, open_folder(plan, tmp_path / "run"), engines)
    cold = ["flush", "ask/1"] * 2
    warm = ["flush", "header"] + ["ask/32"] * 14
    assert engines[1].events == cold + warm + ["greedy/32"] * 3
    assert engines[0].events == cold + warm + ["greedy/32"] * 6, "the reference is asked again, for its floor"


def test_what_was_answered_is_not_asked_again(plan: Plan, tmp_path: Path) -> None:
    folder = open_folder(plan, tmp_path / "run")
    asked(plan, folder, [FakeEngine("reference"), FakeEngine("candidate", dies_after=9)])
    failure = folder.progress().failure
    assert failure is not None
    assert "it died" in failure.message
    before = {answer.key for answer in folder.answers()}
    assert len([key for key in before if key[1] == "candidate"]) == 8, "all but the header"
    second = [FakeEngine("reference"), FakeEngine("candidate")]
    again = open_folder(plan, tmp_path / "run")
    asked(plan, again, second)
    assert second[1].events == ["flush", "header"] + ["ask/32"] * 8 + ["greedy/32"] * 3
    assert again.progress().failure is None
    assert len(again.answers()) == 2 * 16 + 3 * 3


def test_one_engines_failure_stops_both(plan: Plan, tmp_path: Path) -> None:
    engines = [FakeEngine("reference"), FakeEngine("candidate", dies_after=0)]
    asked(plan, open_folder(plan, tmp_path / "run"), engines)
    assert all(engine.stopped for engine in engines)


def test_without_a_way_to_score_tokens_logits_are_not_compared(plan: Plan, tmp_path: Path) -> None:
    scored = prepare(plan.spec.model_copy(update={"suites": ("mmlu", "greedy", "logits")}))
    folder = open_folder(scored, tmp_path / "run")
    asked(scored, folder, [FakeEngine("reference"), FakeEngine("candidate")])
    assert folder.progress().failure is None
    assert len(folder.answers()) == 2 * 16 + 3 * 3
    assert not logits_path(folder.path, "reference", 0).exists()


def test_the_command_in_the_manifest_repeats_the_run(plan: Plan, tmp_path: Path) -> None:
    words = shlex.split(open_folder(plan, tmp_path / "run").manifest().command)
    assert words[:2] == ["assay", "run"]
    assert set(words[2:]) == {
        "--reference=torch_native",
        "--candidate=sage_attn",
        "--questions=16",
        "--greedy-prompts=3",
        "--suites=mmlu,greedy",
    }


def test_no_greedy_prompt_is_one_of_the_questions(plan: Plan) -> None:
    assert not {item.prompt for item in plan.of("mmlu")} & {item.prompt for item in plan.of("greedy")}


def test_a_folder_is_named_after_the_candidate() -> None:
    spec = RunSpec(reference="triton", candidate="mine.attn:forward")
    assert default_folder(spec).name.endswith("-mine.attn-forward")
