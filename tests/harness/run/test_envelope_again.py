"""Lengths that no text reached before it diverged: both servers of a run are asked for them again, by the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rich.console import Console

from assay.harness.engines.base import Engine
from assay.harness.evidence.envelope import ENVELOPE_FILES, EngineLimits, EnvelopeCounts, envelope_of
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.judge.answers import envelope_pairs
from assay.harness.judge.envelope import served_counts
from assay.harness.progress import ProgressDisplay
from assay.harness.run.collect import _STEPS, _Asking
from assay.harness.run.envelope import AGAIN, serve_envelope
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.questions import QuestionStop
from assay.harness.sides import ROLES, Role

LIMITS = EngineLimits(context_tokens=4096)
AGAIN_STEPS = [group[0] for group in _STEPS[1 : 1 + len(AGAIN)]]


class Server:
    """A stand-in: it writes token 7, or first 8 from a prompt that it is said to differ at."""

    scores = True

    def __init__(self, role: Role, differs: bool) -> None:
        self.role, self.differs = role, differs

    def flush_cache(self) -> None:
        pass

    def generate_all(
        self, items: Sequence[Item], prompts: Sequence[Sequence[int]], tokens: Sequence[int], top_logprobs: int
    ) -> list[Answer]:
        return [self.answer(*asked) for asked in zip(items, prompts, tokens, strict=True)]

    def answer(self, item: Item, prompt: Sequence[int], tokens: int) -> Answer:
        said = ["8" if self.differs else "7", *["7"] * (tokens - 1)]
        return Answer(
            suite="envelope", role=self.role, item=item.id, prompt_hash=item.prompt_hash, request_id=f"{self.role} {item.id}",
            text=" ".join(said), finish_reason="length", prompt_tokens=len(prompt), completion_tokens=tokens, latency_s=1.0,
            tokens=tuple(Token(text=each, logprob=-0.1, top=((each, -0.1),)) for each in said), parsed=None,
        )  # fmt: skip


def begun(path: Path, runs: ModuleType, differs: bool) -> tuple[Plan, RunFolder]:
    """A run whose servers answered the envelope; the candidate's texts differ at once, or nowhere."""
    spec = runs.spec_of(suites=("greedy", "layers"), envelope_tokens=128)
    plan, folder = prepare(spec), runs.run_of(path, spec)
    ENVELOPE_FILES.write(folder.server_folder("reference"), EnvelopeCounts(run=folder.nonce, limits=LIMITS), process="1")
    for role in ROLES:
        serve_envelope(cast(Engine, Server(role, differs and role == "candidate")), folder, plan)
    return plan, folder


def work_of(plan: Plan, folder: RunFolder, role: Role, number: int, *, together: bool = True) -> Any:
    stop = QuestionStop(plan, folder.answers(), together=together)
    return AGAIN_STEPS[number](_Asking(plan, folder, ProgressDisplay(Console(quiet=True)), stop, set()), role)


def again(folder: RunFolder, role: Role, number: int) -> set[tuple[str, str]]:
    return {(a.item, a.prompt_hash) for a in folder.answers() if a.role == role and a.item.endswith(AGAIN[number])}


def test_both_servers_get_the_same_requests_whoever_answers_first(tmp_path: Path, runs: ModuleType) -> None:
    plan, folder = begun(tmp_path / "run", runs, differs=True)
    for role, differs in (("reference", False), ("candidate", True)):
        work_of(plan, folder, role, 0)(Server(role, differs))  # type: ignore[arg-type]
    assert again(folder, "reference", 0) == again(folder, "candidate", 0)
    assert {role: work_of(plan, folder, role, 0) for role in ROLES} == dict.fromkeys(ROLES), "each is asked once"
    # Every text still differs, so the last round asks for the same lengths, by other prompts. This time none differs.
    for role in ROLES:
        work_of(plan, folder, role, 1)(Server(role, differs=False))
    first, second = (again(folder, "candidate", number) for number in range(2))
    assert {item.removesuffix(AGAIN[0]) for item, _ in first} == {item.removesuffix(AGAIN[1]) for item, _ in second}
    assert not {prompt for _, prompt in first} & {prompt for _, prompt in second}


def test_lengths_that_were_reached_are_not_asked_again(tmp_path: Path, runs: ModuleType) -> None:
    equal = begun(tmp_path / "equal", runs, differs=False)
    assert [work_of(*equal, role, 0) for role in ROLES] == [None, None]
    reached = begun(tmp_path / "reached", runs, differs=True)
    for role in ROLES:
        work_of(*reached, role, 0)(Server(role, differs=False))
    plan, folder = reached
    counts = served_counts(folder, envelope_of(folder), folder.progress().servers[1], envelope_pairs(folder.answers()))
    assert counts is not None
    assert not plan.envelope.gaps(counts, ["decode"]), "a block lacks a length"
    assert [work_of(*reached, role, 1) for role in ROLES] == [None, None]


def test_servers_that_run_in_turn_are_not_asked_again(tmp_path: Path, runs: ModuleType) -> None:
    """The reference has stopped when the candidate's texts are known."""
    plan, folder = begun(tmp_path / "run", runs, differs=True)
    assert work_of(plan, folder, "candidate", 0) is not None
    assert work_of(plan, folder, "candidate", 0, together=False) is None
