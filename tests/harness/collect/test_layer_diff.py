"""The order of work of a layer diff, on a server that only takes notes. Real servers: tests/test_end_to_end.py."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER
from assay.harness.collect import layer_diff
from assay.harness.collect.plan import COLD_QUESTIONS, WARM_QUESTIONS, Plan
from assay.harness.config import make_spec
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine
from assay.harness.errors import UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff import read_record
from assay.harness.evidence.records import Item
from assay.harness.progress import ProgressDisplay
from assay.harness.verdict import Finding

PROMPTS = [f"question {number}" for number in range(COLD_QUESTIONS + WARM_QUESTIONS)]
FOUND = Finding(
    id="mask-top-left", title="causal mask top-left", severity="serious", where="extend, all 4 layers", diagnosis="agrees with it",
    evidence=(), reproduce="",
)  # fmt: skip


class Server:
    """Records what it is asked, one list of prompts per call, and when its cache is emptied."""

    role = "reference"

    def __init__(self) -> None:
        self.notes: list[list[str] | str] = []

    def flush_cache(self) -> None:
        self.notes.append("flush")

    def ask(self, asks: Sequence[ChatRequest], concurrency: int, on_reply: Any) -> None:
        self.notes.append([one.prompt for one in asks])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    def written(place: Path, poke: Callable[[], None]) -> None:
        poke()
        made.notes.append("written")

    monkeypatch.setattr(layer_diff, "write_now", written)
    return made


def plan() -> Plan:
    spec = make_spec({"candidate": "sage_attn_as_shipped", "suites": "layers", "device": "cpu"})
    items = tuple(Item(suite="layers", id=prompt, prompt=prompt, prompt_hash="") for prompt in PROMPTS)
    return Plan(spec, Path(), items, Backend.parse(spec.reference), Backend.parse(spec.candidate))


def layers_compared(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, found: list[Finding] | UsageError
) -> str:
    """Compare layers, with these early findings; what the display showed."""

    def name(*_: object, **__: object) -> list[Finding]:
        server.notes.append("named")
        if isinstance(found, UsageError):
            raise found
        return found

    monkeypatch.setattr(layer_diff, "diagnose_recorded", name)
    monkeypatch.setattr(layer_diff, "layers_seen", lambda place: (0, 1))
    said = io.StringIO()
    display = ProgressDisplay(Console(file=said, width=200))
    layer_diff.compare_layers(cast(Engine, server), RunFolder(folder), plan(), display)
    return said.getvalue()


def test_a_cold_and_a_warm_question_come_before_the_name_and_all_others_after_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = layers_compared(server, tmp_path, monkeypatch, [FOUND])
    cold, warm = PROMPTS[:COLD_QUESTIONS], PROMPTS[COLD_QUESTIONS:]
    assert server.notes[:5] == ["flush", [cold[0]], [warm[0]], "written", "named"]
    assert server.notes[5:14] == [
        "flush",
        [cold[1]],
        "flush",
        [cold[2]],
        "flush",
        [cold[3]],
        "flush",
        [PROMPT_HEADER],
        warm[1:],
    ]
    assert "s: extend, all 4 layers: agrees with it." in said
    done = read_record(RunFolder(tmp_path), "reference")
    assert done is not None
    assert done.first_finding_s is not None
    assert 0 <= done.first_finding_s <= done.seconds


def test_nothing_is_named_in_a_right_kernel(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = layers_compared(server, tmp_path, monkeypatch, [])
    done = read_record(RunFolder(tmp_path), "reference")
    assert done is not None
    assert done.first_finding_s is None
    assert "After" not in said


def test_a_candidate_that_computed_nothing_does_not_end_the_layer_diff(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "After" not in layers_compared(server, tmp_path, monkeypatch, UsageError("no output", "one", "look"))
    assert server.notes[13] == PROMPTS[COLD_QUESTIONS + 1 :]
    assert read_record(RunFolder(tmp_path), "reference") is not None


def test_a_pack_recorded_on_its_own_has_the_same_questions(server: Server, tmp_path: Path) -> None:
    layer_diff.shadow(cast(Engine, server), tmp_path, plan())
    asked = [prompt for note in server.notes if isinstance(note, list) for prompt in note]
    assert sorted(asked) == sorted([*PROMPTS, PROMPT_HEADER, PROMPT_HEADER])
