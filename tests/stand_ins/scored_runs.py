"""Runs of the suites ``greedy`` and ``logits`` on disk, with the distributions that a test wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import log_softmax

from assay.harness.collect.plan import prepare
from assay.harness.collect.run_folder import open_folder
from assay.harness.config import RunSpec
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import (
    CACHE_STATES,
    CacheState,
    Logits,
    LogitsHeader,
    Positions,
    ScoredSequence,
    write_logits,
)
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Token
from assay.harness.sides import ROLES, Role

START, PROMPT, LENGTH = 20, 30, 41
POSITIONS = LENGTH - START - 1
VOCABULARY, K = 12, 4
SPREAD = np.linspace(3, -3, VOCABULARY)
"""Logits of every position, before a test changes them."""


def spec_of(candidate: str = "triton", **more: object) -> RunSpec:
    """Of a run without questions and layers; neither backend declares a quantisation."""
    return RunSpec.of(reference="torch_native", candidate=candidate, **{"suites": ("greedy", "logits"), **more})  # type: ignore[arg-type]


def run_of(path: Path, spec: RunSpec) -> RunFolder:
    """A run whose servers started, without an answer."""
    folder = open_folder(prepare(spec), path)
    servers = tuple(
        ServerManifest(
            role=role,
            backend=spec.reference.backend if role == "reference" else spec.candidate.backend,
            engine="SGLang 0.5.23 on cpu",
            claimed_phases=("extend", "decode"),
            arguments={"dtype": "float32"},
        )
        for role in ROLES
    )
    folder.update(folder.progress().model_copy(update={"servers": servers}))
    return folder


def answer_all(folder: RunFolder, say: Callable[[Role, int], tuple[Token, ...]], floor: int = 32) -> None:
    """Append a greedy answer of both roles to each prompt, and a second one of the reference to the first ``floor`` prompts."""
    items = [item for item in folder.items() if item.suite == "greedy"]
    for role, repeat in (*((role, 0) for role in ROLES), ("reference", FLOOR_REPEAT)):
        for number, item in enumerate(items[:floor] if repeat else items):
            tokens = say(role, number)  # type: ignore[arg-type]
            folder.append(
                Answer(
                    suite="greedy", role=role, item=item.id, repeat=repeat, prompt_hash=item.prompt_hash,
                    text="".join(token.text for token in tokens), finish_reason="stop", prompt_tokens=PROMPT,
                    completion_tokens=len(tokens), cached_tokens=0, latency_s=0.1, tokens=tokens,
                )  # type: ignore[arg-type]
            )  # fmt: skip


def scored(
    role: Role,
    prompts: int,
    noise: float = 0.0,
    seed: int = 0,
    repeat: int = 0,
    change: Callable[[CacheState, np.ndarray], np.ndarray] | None = None,
    run: str = "",
) -> Logits:
    """A scoring whose logits are `SPREAD` with normal noise, and then changed, [prompts * POSITIONS, VOCABULARY]."""
    by_condition = {}
    for number, condition in enumerate(CACHE_STATES):
        random = np.random.default_rng((seed, number))
        values = np.tile(SPREAD, (prompts * POSITIONS, 1))
        values = values + noise * random.normal(size=values.shape)
        values = change(condition, values) if change else values
        with np.errstate(invalid="ignore"):
            chosen = log_softmax(values, axis=1).astype(np.float32)
        by_condition[condition] = Positions(
            token=chosen[:, 0],
            best=np.argmax(values, axis=1).astype(np.int32),
            top_ids=np.tile(np.arange(K, dtype=np.int32), (len(values), 1)),
            logprobs=chosen[:, :K],
        )
    sequences = tuple(
        ScoredSequence(
            item=f"greedy-{i:03d}",
            prompt_tokens=PROMPT,
            length=LENGTH,
            start=START,
            cached={"cold": 0, "cached": START},
        )
        for i in range(prompts)
    )
    header = LogitsHeader(run=run, role=role, repeat=repeat, backend="x", engine="y", top_k=K, sequences=sequences)
    return Logits(header, np.arange(prompts * LENGTH, dtype=np.int32), by_condition)


def score_both(folder: RunFolder, candidate: Callable[..., Logits], prompts: int = 64) -> None:
    """Write both roles' scorings to a run's folder; the reference repeats itself exactly."""
    write_logits(folder.path, scored("reference", prompts, run=folder.nonce))
    write_logits(folder.path, scored("reference", prompts, repeat=FLOOR_REPEAT, run=folder.nonce))
    write_logits(folder.path, candidate("candidate", prompts, run=folder.nonce))


def same_answer(role: Role, number: int) -> tuple[Token, ...]:
    """The same greedy answer by both roles."""
    return (Token(text="A", logprob=-0.1, top=(("A", -0.1), ("B", -3.0))),)
