"""Traces both servers on one sequence that they scored, to locate the first layer at which they part, where no probes are asked.

The sequence is the one on which the candidate is farthest from the reference. Where the servers run in turn, nothing is known of
the candidate when the reference is traced, and it is the first.
"""

from __future__ import annotations

from pathlib import Path

from assay.harness.engines.base import Engine, TracedPrompt
from assay.harness.engines.inside.control import Control, TracedRequest
from assay.harness.engines.launched import LaunchedServer
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import Logits, logits_path, read_logits
from assay.harness.evidence.traced_sequence import AGAIN, FIRST, TRACED_SEQUENCE, TracedSequence
from assay.harness.judge.logits import farthest
from assay.harness.run.plan import Plan
from assay.harness.run.probes import switched_on
from assay.harness.run.run_folder import asked_roles
from assay.harness.run.side_probes import compares_probes
from assay.harness.sides import ROLES, Role


def is_open(plan: Plan, folder: RunFolder, role: Role) -> bool:
    """Return True if a role's server is still to be traced: the sides differ in more than a backend, which a shadow covers."""
    asked = (
        not compares_probes(plan)
        and plan.has_layer_diff
        and "logits" in plan.spec.workload.suites
        and asked_roles(plan, folder) == ROLES
        and all(map(plan.instrumented, ROLES))
    )
    more_than_backend = bool(set(plan.spec.treatment) - {"backend"})
    return asked and more_than_backend and folder.read(TRACED_SEQUENCE, role) is None


def trace_sides(engine: Engine, plan: Plan, folder: RunFolder) -> None:
    """Trace a role's server on the sequence, the reference twice.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written, or its scores cannot be read.
    """
    if not (isinstance(engine, LaunchedServer) and logits_path(folder.path, "reference", 0).exists()):
        return
    place, scored = (
        folder.server_folder(engine.role),
        read_logits(logits_path(folder.path, "reference", 0), folder.nonce),
    )
    chosen = folder.read(TRACED_SEQUENCE, "reference") or _choose(folder, scored)
    for label in (FIRST, AGAIN) if engine.role == "reference" else (FIRST,):
        _trace(engine, place, scored, chosen, label)
    folder.write(TRACED_SEQUENCE, chosen, engine.role)


def _choose(folder: RunFolder, scored: Logits) -> TracedSequence:
    path = logits_path(folder.path, "candidate", 0)
    index, condition = farthest(scored, read_logits(path, folder.nonce)) if path.exists() else (0, "cached")
    return TracedSequence(item=scored.header.sequences[index].item, index=index, condition=condition)


def _trace(engine: Engine, place: Path, scored: Logits, chosen: TracedSequence, label: str) -> None:
    """Trace one request for the sequence; under `AGAIN`, together with a request for another one."""
    ids, start = scored.ids_of(chosen.index), scored.header.sequences[chosen.index].start
    traced = TracedPrompt(f"assay-{label}", ids, start, chosen.condition == "cached")
    together = [traced]
    if label == AGAIN:
        other = (chosen.index + 1) % len(scored.header.sequences)
        beside = scored.header.sequences[other]
        together.append(TracedPrompt(f"assay-{label}-other", scored.ids_of(other), beside.start))
    control = Control(trace=label, traced=TracedRequest(request=engine.traced_id(traced.name), until=len(ids) - 1))
    with switched_on(engine, place, control):
        engine.prefill(together)
