"""The third opinion: a real server of transformers scores what two servers scored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.engines.hf.model import Model
from assay.harness.engines.model import TINY_MODEL
from assay.harness.evidence.fingerprint import FINGERPRINT
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import Logits, logits_path, read_logits, write_logits
from assay.harness.evidence.manifest import ROUNDING, RoundingCost
from assay.harness.evidence.probes import ProbePass, ProbeReply, Scores, TracedPlace, record_pass
from assay.harness.evidence.trace import TraceHeader, write_pass
from assay.harness.judge.build import build
from assay.harness.judge.logits_suite import WITNESS
from assay.harness.progress import ProgressDisplay
from assay.harness.run import logit_scoring
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.side_probes import load_of
from assay.harness.run.witness import ask_witness
from assay.harness.sides import ROLES
from assay.reports.wording.say import say

PROMPTS = 64
DECODE: dict[str, Any] = {
    "first": 0, "tokens": (11, 12, 13), "own": (-1.0,) * 3, "ids": ((11,),) * 3, "logprobs": ((-1.0,),) * 3,
}  # fmt: skip


def scored(folder: RunFolder, runs: ModuleType, noise: float) -> None:
    """Both roles' scores of tokens that the tiny model has."""

    def made(role: str, prompts: int, run: str) -> Logits:
        given: Logits = runs.scored(role, prompts, noise=noise if role == "candidate" else 0.0, seed=1, run=run)
        return replace(given, ids=given.ids % 1000)

    for role in ("reference", "candidate"):
        write_logits(folder.path, made(role, PROMPTS, folder.nonce))


def traced(folder: RunFolder, plan: Plan) -> None:
    """Both roles' traces of a probe and two tokens of its answer; the candidate's q of layer 2 is wrong."""
    probe = load_of(plan).probes[5]
    reply = ProbeReply(probe=probe.id, prompt_tokens=len(probe.ids), cached_tokens=0, decode=Scores(**DECODE))
    place = TracedPlace(probe=probe.id, index=len(probe.ids) + 2)
    ids = torch.tensor([*probe.ids, *DECODE["tokens"][:2]])
    for role in ROLES:
        kept = Model(TINY_MODEL).trace(ids.tolist())
        kept["q.2"] = kept["q.2"] * (1.5 if role == "candidate" else 1)
        record_pass(folder.server_folder(role), ProbePass(number=0, why="sides", replies=(reply,)), folder.nonce)
        own = ProbePass(number=4, why="trace", replies=(reply,), traced=place)
        record_pass(folder.server_folder(role), own, folder.nonce)
        header = TraceHeader(run=folder.nonce, request="x", phase="extend", number=0, rank=0, ranks=1)
        write_pass(folder.server_folder(role), own.label, ids, torch.arange(len(ids)), kept, header)


@pytest.mark.slow  # fast: test_it_is_not_asked_of_what_agrees_or_is_declared
@pytest.mark.server
def test_transformers_scores_the_tokens_of_servers_that_differ(
    tmp_path: Path, runs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_scoring, "_TOP_K", runs.K)  # as many as the made-up scores have
    folder: RunFolder = runs.run_of(tmp_path / "run", spec := runs.spec_of(suites=("logits",)))
    ask = partial(ask_witness, plan := prepare(spec), folder, ProgressDisplay(Console(quiet=True)))
    place = folder.path / WITNESS
    ask()
    assert not place.exists(), "nothing was scored"
    scored(folder, runs, 0.3)
    traced(folder, plan)
    ask()
    assert FINGERPRINT.read(place, folder.nonce) is not None
    (said,) = (each for suite in build(folder).suites for each in suite.why if each.id == "witness")
    (of, nowhere), (other, at) = said.values["where"]
    assert (of, nowhere, other, at[:29]) == ("reference", "", "candidate", "layer 2, before attention, head"[:29])
    assert "the reference parts from it in no layer and the candidate parts from it in layer 2, before attention" in say(said)
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
