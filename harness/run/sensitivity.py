"""The sensitivity of a run's workload: a fault is seeded in the running servers, and every suite has to detect it.

Nothing is restarted: the control switches the fault on and off. In the candidate's own server the backend that the model uses has
the fault, for answers and logits; in the shadow's server the shadowed candidate has it, for the layers. Afterwards the prefix
cache is emptied, since K and V of later layers were computed with the fault. `assay.harness.judge.sensitivity` judges the result.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from assay.evals.questions import PROMPT_HEADER
from assay.harness.engines.base import ChatRequest, Engine, answers, cache_header
from assay.harness.engines.inside.control import Control, write_now
from assay.harness.evidence.faults import (
    SENSITIVITY,
    SENSITIVITY_RECORD,
    SeededCalls,
    SensitivityRecord,
    read_seeded_calls,
)
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import layers_seen
from assay.harness.evidence.logit_files import Logits, logits_path, read_logits, write_logits
from assay.harness.evidence.records import Answer
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.judge.sensitivity import losses, p_no_loss
from assay.harness.progress import ProgressDisplay
from assay.harness.run.logit_scoring import score_again
from assay.harness.run.plan import COLD_QUESTIONS, Plan
from assay.harness.run.probes import switched_on
from assay.harness.run.run_folder import asked_roles, shadowed_role
from assay.harness.run.side_probes import ask_with_fault, compares_probes
from assay.harness.sides import ROLES, Role

# The fault of the seed case, which only calls with a cached prefix show.
_FAULT = "mask-top-left"
# Most questions to ask under a fault, and how many at once: asking stops when the fault is detected.
_QUESTIONS, _AT_ONCE = 24, 8
# Prompts whose logits are scored under a fault: with fewer, even a sign test that all of them pass has a p value above 0.05.
_PROMPTS = 5
# Questions to ask while the candidate in the shadow has the fault.
_SHADOWED = 2


def is_open(plan: Plan, folder: RunFolder, role: Role) -> bool:
    """Return True if a role's server still has something to measure under the fault."""
    return bool(_parts(plan, folder, role)) and folder.read(SENSITIVITY_RECORD, role) is None


def measure_sensitivity(engine: Engine, plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Do a server's part, unless it is done. The suites of the run are complete, and read nothing that comes later.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    if not is_open(plan, folder, engine.role):
        return
    begun, place = time.monotonic(), folder.server_folder(engine.role)
    parts = _parts(plan, folder, engine.role)
    shutil.rmtree(place / SENSITIVITY, ignore_errors=True)  # from a server that was killed
    record = SensitivityRecord(fault=_FAULT, seconds=0.0)
    if "shadow" in parts:
        prompts = [item.prompt for item in plan.of("layers")[COLD_QUESTIONS:]][:_SHADOWED]
        record = record.model_copy(update={"shadowed": _shadow_fault(engine, place, prompts, folder.nonce)})
    if {"answers", "logits", "probes"} & parts:
        served = _serve_fault(engine, place, plan, folder, parts, display)
        record = served.model_copy(update={"shadowed": record.shadowed})
    record = record.model_copy(update={"seconds": time.monotonic() - begun})
    folder.write(SENSITIVITY_RECORD, record, engine.role)


def _serve_fault(
    engine: Engine, place: Path, plan: Plan, folder: RunFolder, parts: Collection[str], display: ProgressDisplay
) -> SensitivityRecord:
    """Ask and score while the backend that the model uses has the fault. Logits go to the server's sensitivity folder.

    In a reference's server, the other role's backend computes all layers, with the fault.
    """
    begun, nonce, policy, workload = time.monotonic(), folder.nonce, plan.spec.policy, plan.spec.workload
    texts = {a.item: a.text for a in folder.answers() if (a.suite, a.role, a.repeat) == ("accuracy", "reference", 0)}
    items = {item.id: item for item in plan.of("accuracy") if item.id in texts} if "answers" in parts else {}
    asks = [ChatRequest.of(item, workload.token_limit) for item in list(items.values())[:_QUESTIONS]]
    reference = _cached_logits(folder) if "logits" in parts else None
    seen, scored = list[Answer](), 0
    substitute = () if engine.role == "candidate" else layers_seen(place)
    with switched_on(engine, place, Control(fault=_FAULT, substitute=substitute)) as token:
        if asks:
            cache_header(engine)
        # Asking stops once the answers show the fault.
        while len(seen) < len(asks) and not (
            seen and p_no_loss(losses(items, texts, seen), policy.margin) <= policy.alpha
        ):
            seen += answers(engine, asks[len(seen) :][:_AT_ONCE], workload.concurrency)
        if reference is not None and engine.scores:
            logits = score_again(engine, reference, nonce, display, f"{engine.role}: logits with a seeded fault")
            write_logits(place / SENSITIVITY, logits)
            scored = len(logits.header.sequences)
        if "probes" in parts:
            ask_with_fault(engine, plan, folder)
        seeded = read_seeded_calls(place, token, nonce)
    told = tuple(answer.model_copy(update={"run": nonce}) for answer in seen)
    seconds = time.monotonic() - begun
    return SensitivityRecord(run=nonce, fault=_FAULT, served=seeded, answers=told, scored=scored, seconds=seconds)


def _cached_logits(folder: RunFolder) -> Logits | None:
    """Return some of the reference's sequences that were scored after a cached prefix, or None if it has none."""
    path = logits_path(folder.path, "reference", 0)
    if not path.exists():
        return None
    scored = read_logits(path, folder.nonce)
    chosen = [n for n, sequence in enumerate(scored.header.sequences) if sequence.honoured("cached")][:_PROMPTS]
    return scored.only(chosen) if chosen else None


def _shadow_fault(engine: Engine, place: Path, prompts: Sequence[str], nonce: str) -> SeededCalls | None:
    """Ask questions after the shared header while the candidate in the shadow has the fault, and have its errors written.

    They go to the server's sensitivity folder, so that no verdict on the candidate reads them.
    """
    shutil.rmtree(place / SENSITIVITY / SHADOW_FOLDER, ignore_errors=True)
    with switched_on(engine, place, Control(shadow=True, fault=_FAULT)) as token:
        cache_header(engine)
        _send(engine, prompts)
        write_now(place / SENSITIVITY, lambda: _send(engine, [PROMPT_HEADER]))
        return read_seeded_calls(place, token, nonce)


def _parts(plan: Plan, folder: RunFolder, role: Role) -> set[str]:
    """List what a role's server measures under a fault: "shadow", "answers", "logits", "probes"."""
    if plan.backend(role).is_url:
        return set()
    asked, shadowed = asked_roles(plan, folder), shadowed_role(plan, folder)
    parts = {"shadow"} if role == shadowed else set()
    if role == asked[-1] and (role == "candidate" or shadowed == role):
        parts |= {"answers"} if "accuracy" in plan.spec.workload.suites and role == "candidate" else set()
        parts |= {"logits"} if "logits" in plan.spec.workload.suites and not plan.has_url else set()
        parts |= {"probes"} if role == "candidate" and asked == ROLES and compares_probes(plan) else set()
    return parts


def _send(engine: Engine, prompts: Sequence[str]) -> None:
    """Ask for one token each, and discard the answers."""
    answers(engine, [ChatRequest(prompt, 1) for prompt in prompts], len(prompts))
