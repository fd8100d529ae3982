"""Runs on disk, as two servers would leave them: answers, the counters and admissions that agree with them, and logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from assay.harness.conditions import has_cached_prefix
from assay.harness.config import RunSpec
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import ADMISSIONS, FOLDER, Admission, CounterFile, CounterRow
from assay.harness.evidence.executed import FOLDER as KERNELS
from assay.harness.evidence.executed import KERNEL_TRACES, ExecutedKernel, KernelTrace, TracedPass
from assay.harness.evidence.faults import SENSITIVITY_RECORD, SeededCalls, SensitivityRecord
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
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item, Token
from assay.harness.files import write_whole
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder
from assay.harness.sides import ROLES, Role

LAYERS, COLD, PROMPT_TOKENS, CACHED_TOKENS = 4, 16, 100, 54
START, PROMPT, LENGTH = 20, 30, 41
POSITIONS = LENGTH - START - 1
VOCABULARY, K = 12, 4
SPREAD = np.linspace(3, -3, VOCABULARY)
"""Logits of every position, before a test changes them."""


def started(plan: Plan, path: Path, roles: tuple[Role, ...] = ROLES, **said: Any) -> RunFolder:
    """A run whose servers are ready.

    Args:
        plan: the run.
        path: its folder.
        roles: those whose server was started.
        said: what the servers' manifests say otherwise.
    """
    folder = open_folder(plan, path)
    servers = tuple(
        ServerManifest(
            **{
                "role": role,
                "backend": plan.backend(role).name,
                "engine": "SGLang 0.5.23 on cpu",
                "claimed_phases": ("extend", "decode") if role == "reference" else ("extend",),
                "arguments": {"dtype": "float32", "attention_backend": plan.backend(role).name},
                **said,
            }
        )
        for role in ROLES
        if role in roles
    )
    progress = folder.progress()
    folder.update(progress.model_copy(update={"servers": (*progress.servers, *servers), "seconds": 12.0}))
    return folder


def count_layers(folder: RunFolder, role: Role, backend: str, layers: int = LAYERS) -> None:
    """Count one call of a role's kernel behind a cached prefix in each of the first layers."""
    file = CounterFile(folder.server_folder(role) / FOLDER, "1", folder.nonce)
    row = file.row(CounterRow(backend=backend, kernel=backend, phase="extend", cached_prefix=True))
    for layer in range(layers):
        file.add(row, layer)


def complete_run(plan: Plan, path: Path) -> RunFolder:
    """A run of two equal servers that computed everything themselves."""
    folder = started(plan, path)
    for role in ROLES:
        for number, item in enumerate(item for item in plan.items if item.suite in ("accuracy", "greedy")):
            folder.append(answer_of(role, item, 0 if number < COLD else CACHED_TOKENS))
        count_served(folder, role, plan.backend(role).name)
    see_fault(folder, plan)
    return folder


def copied(folder: RunFolder, path: Path) -> RunFolder:
    """The same run elsewhere, which costs a fraction of writing it; a test may change it."""
    return RunFolder(Path(shutil.copytree(folder.path, path)))


def trace(folder: RunFolder, role: Role, backend: str, names: tuple[str, ...], **declared: Any) -> None:
    """Write the trace of a server whose kernel launched so many kernels in each of two passes, and declares this."""
    kernels = tuple(ExecutedKernel(kind="operator", name=name, attention=True, launches=4) for name in names)
    passes = tuple(TracedPass(phase="extend", cached_prefix=cached, kernels=kernels) for cached in (False, True))
    seen = KernelTrace(run=folder.nonce, backend=backend, passes=passes, **declared)
    folder.write(KERNEL_TRACES, seen, role)


def mark_traced(folder: RunFolder) -> None:
    """Leave what says that both servers have listed their kernels."""
    for role in ROLES:
        write_whole(folder.server_folder(role) / KERNELS / "complete", folder.nonce, durable=False)


def see_fault(folder: RunFolder, plan: Plan, lost: int = 8, changed: int = 40) -> None:
    """Write what the candidate's server did with a seeded fault: it lost the first questions of eight."""
    answers = [answer_of("candidate", item, CACHED_TOKENS) for item in plan.of("accuracy")[:8]]
    wrong = [unparsed(answer).model_copy(update={"run": folder.nonce}) for answer in answers]
    calls = SeededCalls(run=folder.nonce, fault="mask-top-left", calls=40, changed=changed, refused=0)
    record = SensitivityRecord(
        run=folder.nonce, fault="mask-top-left", served=calls, answers=(*wrong[:lost], *answers[lost:]), seconds=1.0
    )
    folder.write(SENSITIVITY_RECORD, record, "candidate")


def answer_of(role: Role, item: Item, cached: int | None = CACHED_TOKENS, repeat: int = 0, **changed: Any) -> Answer:
    """The right answer to an item, or one that is changed."""
    text = f"Answer: {item.expected}" if item.suite == "accuracy" else "yes"
    greedy = (Token(text=text, logprob=-0.1, top=((text, -0.1), ("no", -3.0))),)
    right = Answer(
        suite=item.suite, role=role, item=item.id, repeat=repeat, prompt_hash=item.prompt_hash,
        request_id=f"{role}-{item.suite}-{item.id}-{repeat}", text=text,
        parsed=item.expected if item.suite == "accuracy" else None, finish_reason="stop", prompt_tokens=PROMPT_TOKENS,
        completion_tokens=1, cached_tokens=cached, latency_s=0.1, tokens=greedy if item.suite == "greedy" else (),
    )  # fmt: skip
    return right.model_copy(update=changed)


def unparsed(answer: Answer) -> Answer:
    """The same answer without a letter."""
    return answer.model_copy(update={"text": "", "parsed": None})


def count_served(folder: RunFolder, role: Role, backend: str, layers: int = LAYERS) -> None:
    """Write what a server leaves that admitted each answered request of the role alone, and computed it with `backend`."""
    answers = [answer for answer in folder.answers() if answer.role == role]
    admissions = [
        Admission(
            run=folder.nonce,
            process=1,
            rids=(answer.request_id,),
            new=(answer.prompt_tokens - (answer.cached_tokens or 0),),
            prefix=(answer.cached_tokens or 0,),
        )
        for answer in answers
    ]
    place = folder.server_folder(role)
    file = CounterFile(place / FOLDER, "1", folder.nonce)
    for admission in admissions:
        cached = has_cached_prefix(admission.prefix)
        row = file.row(CounterRow(backend=backend, kernel=backend, phase="extend", cached_prefix=cached))
        for layer in range(layers):
            file.add(row, layer)
    (place / ADMISSIONS).write_text(jsonl.lines_of(admissions))


def spec_of(candidate: str = "triton", **more: object) -> RunSpec:
    """Of a run without questions and layers; neither backend declares a quantisation."""
    return RunSpec.of(reference="torch_native", candidate=candidate, **{"suites": ("greedy", "logits"), **more})  # type: ignore[arg-type]


def run_of(path: Path, spec: RunSpec) -> RunFolder:
    """A run whose servers claim both phases, without an answer."""
    return started(prepare(spec), path, claimed_phases=("extend", "decode"), arguments={"dtype": "float32"})


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
            item=f"greedy-{i:03d}", prompt_tokens=PROMPT, length=LENGTH, start=START, cached={"cold": 0, "cached": START}
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
