"""Seeding a fault for a few requests, on a stand-in for a server that answers wrongly while the control names a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER
from assay.harness.config import make_spec
from assay.harness.engines.base import ChatRequest, Engine
from assay.harness.engines.inside.control import Control, read_setting
from assay.harness.errors import EngineError
from assay.harness.evidence.faults import SENSITIVITY_RECORD
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Answer
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.probes import switched_on
from assay.harness.run.run_folder import open_folder
from assay.harness.run.sensitivity import _AT_ONCE, _QUESTIONS, is_open, measure_sensitivity


class Server:
    """Answers as the reference did, except under a fault if it is `sensitive`."""

    role, scores = "candidate", False

    def __init__(self, place: Path, right: dict[str, str], sensitive: bool = True) -> None:
        self.place, self.right, self.sensitive = place, right, sensitive
        self.seen: list[tuple[str, str]] = []
        self.flushed: list[str] = []

    @property
    def fault(self) -> str:
        return read_setting(self.place).control.fault

    def flush_cache(self) -> None:
        self.flushed.append(self.fault)

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Callable[[int, Answer], None]) -> None:
        for number, ask in enumerate(asks):
            if ask.prompt != PROMPT_HEADER:
                self.seen.append((ask.prompt, self.fault))
            text = "" if self.fault and self.sensitive else self.right.get(ask.prompt, "")
            told = {"finish_reason": "stop", "prompt_tokens": 60, "completion_tokens": 1, "cached_tokens": 40, "latency_s": 0.1}
            on_reply(number, ask.answered(self.role, text, request_id=f"r{number}", **told))


@pytest.fixture
def display() -> ProgressDisplay:
    return ProgressDisplay(Console(quiet=True))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return prepare(make_spec({"candidate": "sage_attn", "questions": 40, "suites": "accuracy"}))


@pytest.fixture
def folder(plan: Plan, tmp_path: Path, runs: ModuleType) -> RunFolder:
    """A run in which the reference has answered everything right."""
    made = open_folder(plan, tmp_path / "run")
    for item in plan.of("accuracy"):
        made.append(runs.answer_of("reference", item))
    return made


def server(plan: Plan, folder: RunFolder, sensitive: bool = True) -> Server:
    right = {item.prompt: f"Answer: {item.expected}" for item in plan.of("accuracy")}
    return Server(folder.server_folder("candidate"), right, sensitive)


def test_questions_are_asked_under_the_fault_until_it_is_seen(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    assert is_open(plan, folder, "candidate")
    asked = server(plan, folder)
    measure_sensitivity(cast(Engine, asked), plan, folder, display)
    assert [fault for _, fault in asked.seen] == ["mask-top-left"] * _AT_ONCE
    record = folder.read(SENSITIVITY_RECORD, "candidate")
    assert record is not None
    assert [answer.text for answer in record.answers] == [""] * _AT_ONCE
    assert not is_open(plan, folder, "candidate"), "it is not repeated when the run is resumed"
    assert not any(answer.role == "candidate" for answer in folder.answers()), "no verdict reads what a fault answered"


def test_a_workload_that_does_not_see_it_is_asked_all_questions(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    asked = server(plan, folder, sensitive=False)
    measure_sensitivity(cast(Engine, asked), plan, folder, display)
    assert len(asked.seen) == _QUESTIONS


def test_afterwards_the_fault_is_off_and_the_cache_empty(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    asked = server(plan, folder)
    measure_sensitivity(cast(Engine, asked), plan, folder, display)
    assert read_setting(asked.place).control == Control()
    assert asked.flushed[-1] == "", "K and V that were computed with the fault are dropped when it is off"


def test_a_server_that_fails_under_the_fault_is_not_left_with_it(plan: Plan, folder: RunFolder) -> None:
    asked = server(plan, folder)
    with pytest.raises(EngineError), switched_on(cast(Engine, asked), asked.place, Control(fault="mask-top-left")):
        raise EngineError("it died", "a running server", "read its log")
    assert read_setting(asked.place).control == Control()


def test_the_reference_without_a_shadow_measures_nothing(plan: Plan, folder: RunFolder) -> None:
    assert not is_open(plan, folder, "reference")
