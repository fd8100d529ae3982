"""The third opinion: a real server of transformers scores what two servers scored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.evidence.fingerprint import FINGERPRINT
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import Logits, logits_path, read_logits, write_logits
from assay.harness.evidence.rounding import ROUNDING, RoundingCost
from assay.harness.judge.logits_suite import WITNESS
from assay.harness.progress import ProgressDisplay
from assay.harness.run import logit_scoring
from assay.harness.run.plan import prepare
from assay.harness.run.witness import ask_witness

PROMPTS = 64


def scored(folder: RunFolder, runs: ModuleType, noise: float) -> None:
    """Both roles' scores of tokens that the tiny model has."""

    def made(role: str, prompts: int, run: str) -> Logits:
        given: Logits = runs.scored(role, prompts, noise=noise if role == "candidate" else 0.0, seed=1, run=run)
        return replace(given, ids=given.ids % 1000)

    for role in ("reference", "candidate"):
        write_logits(folder.path, made(role, PROMPTS, folder.nonce))


@pytest.mark.slow  # fast: test_it_is_not_asked_of_what_agrees_or_is_declared
@pytest.mark.server
def test_transformers_scores_the_tokens_of_servers_that_differ(
    tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_scoring, "_TOP_K", runs.K)  # as many as the made-up scores have
    folder: RunFolder = runs.run_of(tmp_path / "run", spec := runs.spec_of(suites=("logits",)))
    ask = partial(ask_witness, prepare(spec), folder, ProgressDisplay(Console(quiet=True)))
    place = folder.path / WITNESS
    ask()
    assert not place.exists(), "nothing was scored"
    scored(folder, runs, 0.3)
    ask()
    assert FINGERPRINT.read(place, folder.nonce) is not None
    seen, asked = (read_logits(logits_path(where, "candidate", 0), folder.nonce) for where in (place, folder.path))
    assert (seen.ids == asked.ids).all()
    assert seen.header.engine.startswith("transformers 5.")
    assert all(sequence.honoured("cached") for sequence in seen.header.sequences)


@pytest.mark.parametrize("why", ["equal", "declared", "another model", "witness"])
def test_it_is_not_asked_of_what_agrees_or_is_declared(why: str, tmp_path: Path, runs: ModuleType) -> None:
    changed = {"another model": {"candidate_model": "tiny-qwen3"}}
    spec = runs.spec_of(suites=("logits",))
    folder: RunFolder = runs.run_of(tmp_path / "run", spec)
    scored(folder, runs, 0.0 if why == "equal" else 0.3)
    if why == "declared":
        folder.write(ROUNDING, RoundingCost(declared="activations in bfloat16"))
    plan = prepare(runs.spec_of(suites=("greedy", "logits"), **changed[why]) if why in changed else spec)
    if why == "witness":
        plan = prepare(RunSpec.of(reference="hf", candidate="triton", suites=("greedy", "logits")))
    ask_witness(plan, folder, ProgressDisplay(Console(quiet=True)))
    assert not (folder.path / WITNESS).exists()
