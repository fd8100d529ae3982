"""Complete runs on disk, as two servers would leave them: answers, and the counters and admissions that agree with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.harness.collect.plan import Plan
from assay.harness.collect.run_folder import open_folder
from assay.harness.conditions import has_cached_prefix
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import ADMISSIONS, FOLDER, Admission, CounterFile, CounterRow
from assay.harness.evidence.executed import FOLDER as KERNELS
from assay.harness.evidence.executed import KERNEL_TRACES, ExecutedKernel, KernelTrace, TracedPass
from assay.harness.evidence.faults import SeededCalls
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.evidence.sensitivity import SENSITIVITY_RECORD, SensitivityRecord
from assay.harness.files import write_whole
from assay.harness.sides import ROLES, Role

LAYERS, COLD, PROMPT_TOKENS, CACHED_TOKENS = 4, 16, 100, 54


def complete_run(plan: Plan, path: Path) -> RunFolder:
    """A run of two equal servers that computed everything themselves."""
    folder = open_folder(plan, path)
    servers = tuple(
        ServerManifest(
            role=role,
            backend=plan.backend(role).name,
            engine="SGLang 0.5.23 on cpu",
            claimed_phases=("extend", "decode") if role == "reference" else ("extend",),
            arguments={"dtype": "float32", "attention_backend": plan.backend(role).name},
        )
        for role in ROLES
    )
    folder.update(folder.progress().model_copy(update={"servers": servers, "seconds": 12.0}))
    for role in ROLES:
        for number, item in enumerate(item for item in plan.items if item.suite in ("accuracy", "greedy")):
            folder.append(answer_of(role, item, 0 if number < COLD else CACHED_TOKENS))
        count_served(folder, role, plan.backend(role).name)
    see_fault(folder, plan)
    return folder


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
    wrong = [one.model_copy(update={"text": "", "parsed": None, "run": folder.nonce}) for one in answers]
    calls = SeededCalls(run=folder.nonce, fault="mask-top-left", calls=40, changed=changed, refused=0)
    record = SensitivityRecord(
        run=folder.nonce,
        fault="mask-top-left",
        served=calls,
        answers=(*wrong[:lost], *answers[lost:]),
        seconds=1.0,
    )
    folder.write(SENSITIVITY_RECORD, record, "candidate")


def answer_of(role: Role, item: Item, cached: int, repeat: int = 0) -> Answer:
    """The right answer to an item."""
    text = f"Answer: {item.expected}" if item.suite == "accuracy" else "yes"
    greedy = (Token(text=text, logprob=-0.1, top=((text, -0.1), ("no", -3.0))),)
    return Answer(
        suite=item.suite, role=role, item=item.id, repeat=repeat, prompt_hash=item.prompt_hash,
        request_id=f"{role}-{item.suite}-{item.id}-{repeat}", text=text,
        parsed=item.expected if item.suite == "accuracy" else None, finish_reason="stop", prompt_tokens=PROMPT_TOKENS,
        completion_tokens=1, cached_tokens=cached, latency_s=0.1, tokens=greedy if item.suite == "greedy" else (),
    )  # fmt: skip


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
