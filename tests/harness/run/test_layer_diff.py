"""The order of work of a layer diff, on a stand-in for a server. Real servers: tests/test_end_to_end.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER
from assay.harness.backend import Backend
from assay.harness.config import RunSpec, make_spec
from assay.harness.engines.base import ChatRequest, Engine
from assay.harness.engines.inside.control import SHADOW
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.evidence.records import Item
from assay.harness.fingerprint.facts import own_environment
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff
from assay.harness.run.plan import COLD_QUESTIONS, WARM_QUESTIONS, Plan, prepare

PROMPTS = [f"question {number}" for number in range(COLD_QUESTIONS + WARM_QUESTIONS)]


@dataclass(frozen=True)
class Question:
    """A question that a server was asked.

    Attributes:
        prompt: its text.
        header_cached: whether the shared header was in the cache when it arrived.
    """

    prompt: str
    header_cached: bool


class Server:
    """A stand-in that knows what its cache holds: every prompt begins with the shared header."""

    role = "reference"
    scores = False  # it takes no token ids

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.header_cached = True  # by whatever was asked before

    def flush_cache(self) -> None:
        self.header_cached = False

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Any, enough: Any = None) -> None:
        for number, request in enumerate(asks):
            if request.prompt != PROMPT_HEADER:
                self.questions.append(Question(request.prompt, self.header_cached))
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
    monkeypatch.setattr(layer_diff, "write_now", lambda place, poke: poke())
    return Server()


def plan() -> Plan:
    spec = make_spec({"candidate": "sage_attn_as_shipped", "suites": "layers", "device": "cpu"})
    items = tuple(Item(suite="layers", id=prompt, prompt=prompt, prompt_hash="") for prompt in PROMPTS)
    return Plan(spec, Path(), items, Backend.parse(spec.reference.backend), Backend.parse(spec.candidate.backend))


def layers_compared(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_diff, "layers_seen", lambda place: (0, 1))
    monkeypatch.setattr(layer_diff, "envelope_seed", lambda folder: folder.nonce)  # there is no manifest
    display = ProgressDisplay(Console(quiet=True))
    layer_diff.compare_layers(cast(Engine, server), RunFolder(folder, "n"), plan(), display)


def test_every_question_finds_the_cache_state_it_is_for(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_compared(server, tmp_path, monkeypatch)
    assert RunFolder(tmp_path, "n").read(LAYER_DIFF, "reference") is not None
    cached = {question.prompt: question.header_cached for question in server.in_shadow()}
    assert cached == {prompt: number >= COLD_QUESTIONS for number, prompt in enumerate(PROMPTS)}


def test_a_pack_recorded_on_its_own_has_the_same_questions(server: Server, tmp_path: Path) -> None:
    layer_diff.shadow(cast(Engine, server), tmp_path, plan())
    assert sorted(question.prompt for question in server.questions) == sorted(PROMPTS)


@pytest.mark.parametrize(
    ("candidate", "engine", "shadow"),
    [("triton", "sglang", "triton"), ("CPU_ATTN", "vllm", "torch_native"), ("sage_attn", "vllm", "sage_attn")],
)
def test_another_engines_own_backend_is_no_shadow(candidate: str, engine: str, shadow: str) -> None:
    spec = RunSpec.of(reference="torch_native", candidate=candidate, candidate_engine=engine, suites=("greedy", "layers"))
    assert layer_diff.environment(prepare(spec), "reference", shadowed=True)[SHADOW] == shadow
    assert own_environment(spec.treatment) == (engine == "vllm")
