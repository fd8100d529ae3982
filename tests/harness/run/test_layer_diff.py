"""The order of work of a layer diff, on a stand-in for a server. Real servers: tests/test_end_to_end.py."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER
from assay.harness.backend import Backend
from assay.harness.config import make_spec
from assay.harness.engines.base import ChatRequest, Engine
from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.evidence.records import Item
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff
from assay.harness.run.plan import COLD_QUESTIONS, WARM_QUESTIONS, Plan
from assay.harness.verdict import Finding

PROMPTS = [f"question {number}" for number in range(COLD_QUESTIONS + WARM_QUESTIONS)]
FOUND = Finding(
    id="mask-top-left", title="causal mask top-left", severity="serious", where="extend, all 4 layers", diagnosis="agrees with it",
    evidence=(), reproduce="",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question that a server was asked.

    Attributes:
        prompt: its text.
        header_cached: whether the shared header was in the cache when it arrived.
        diagnosed: whether the early diagnosis had been made.
    """

    prompt: str
    header_cached: bool
    diagnosed: bool


class Server:
    """A stand-in that knows what its cache holds: every prompt begins with the shared header."""

    role = "reference"
    scores = False  # it takes no token ids

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.header_cached = True  # by whatever was asked before
        self.written: list[Question] = []
        """What had been asked when the shadow's errors were written for the early diagnosis."""
        self.diagnosed = False

    def flush_cache(self) -> None:
        self.header_cached = False

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Any, enough: Any = None) -> None:
        for number, request in enumerate(asks):
            if request.prompt != PROMPT_HEADER:
                self.questions.append(Question(request.prompt, self.header_cached, self.diagnosed))
            self.header_cached = True
            on_reply(number, None)

    def in_shadow(self) -> list[Question]:
        """The questions asked before any of them was asked again, for a trace."""
        first: dict[str, Question] = {}
        for question in self.questions:
            first.setdefault(question.prompt, question)
        return list(first.values())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    def write_now(place: Path, poke: Callable[[], None]) -> None:
        poke()
        if not made.diagnosed:
            made.written = list(made.questions)

    monkeypatch.setattr(layer_diff, "write_now", write_now)
    return made


def plan() -> Plan:
    spec = make_spec({"candidate": "sage_attn_as_shipped", "suites": "layers", "device": "cpu"})
    items = tuple(Item(suite="layers", id=prompt, prompt=prompt, prompt_hash="") for prompt in PROMPTS)
    return Plan(spec, Path(), items, Backend.parse(spec.reference.backend), Backend.parse(spec.candidate.backend))


def layers_compared(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, found: list[Finding] | UsageError) -> str:
    """Compare layers, with these early findings; what the display showed."""

    def name(*_: object, **__: object) -> list[Finding]:
        server.diagnosed = True
        if isinstance(found, UsageError):
            raise found
        return found

    monkeypatch.setattr("assay.harness.checks.replay.diagnose_recorded", name)
    monkeypatch.setattr(layer_diff, "layers_seen", lambda place: (0, 1))
    said = io.StringIO()
    display = ProgressDisplay(Console(file=said, width=200))
    layer_diff.compare_layers(cast(Engine, server), RunFolder(folder, "n"), plan(), display)
    return said.getvalue()


def test_the_early_diagnosis_follows_one_question_without_and_one_with_the_cached_header(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = layers_compared(server, tmp_path, monkeypatch, [FOUND])
    early = [question for question in server.in_shadow() if not question.diagnosed]
    assert sorted(question.header_cached for question in early) == [False, True]
    assert server.written == early, "both are written before they are diagnosed"
    assert "s: extend, all 4 layers: agrees with it." in said


def test_every_question_finds_the_cache_state_it_is_for(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_compared(server, tmp_path, monkeypatch, [])
    cached = {question.prompt: question.header_cached for question in server.in_shadow()}
    assert cached == {prompt: number >= COLD_QUESTIONS for number, prompt in enumerate(PROMPTS)}


def test_a_correct_kernel_has_no_early_finding(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = layers_compared(server, tmp_path, monkeypatch, [])
    assert "After" not in said


def test_a_candidate_that_computed_nothing_does_not_end_the_layer_diff(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "After" not in layers_compared(server, tmp_path, monkeypatch, UsageError("no output", "one", "look"))
    assert {question.prompt for question in server.questions} == set(PROMPTS)
    assert RunFolder(tmp_path, "n").read(LAYER_DIFF, "reference") is not None


def test_a_pack_recorded_on_its_own_has_the_same_questions(server: Server, tmp_path: Path) -> None:
    layer_diff.shadow(cast(Engine, server), tmp_path, plan())
    assert sorted(question.prompt for question in server.questions) == sorted(PROMPTS)
