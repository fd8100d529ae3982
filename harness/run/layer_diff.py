"""The layer diff: the other role's backend runs inside one server while the server answers a short workload.

It first runs as a shadow: the candidate computes the same calls as the serving backend, its own error is measured on the
reference's q, k and v, and a replay pack of the calls is recorded. Then both run freely: a few prompts are traced with the
reference, and again with the candidate, in every layer. After the servers have stopped, all recorded calls are examined.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from assay.evals.questions import PROMPT_HEADER
from assay.harness.engines.base import ChatRequest, Engine, answers, cache_header
from assay.harness.engines.inside.control import MODEL_HASH, RECORD, SHADOW, TRACE, Control, set_control, write_now
from assay.harness.evidence.envelope import FOLDER as ENVELOPE_FOLDER
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF, PACK_FOLDER, LayerDiffRecord, layers_seen
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.trace import FOLDER as TRACE_FOLDER
from assay.harness.judge.baselines import envelope_seed
from assay.harness.progress import ProgressDisplay
from assay.harness.run.envelope import Keep, drive_envelope, drop, keeper, serve_envelope, served_limits
from assay.harness.run.machine import hash_model
from assay.harness.run.plan import COLD_QUESTIONS, Plan
from assay.harness.sides import Role

# Prompts whose layer outputs are traced, of the cold and of the warm ones.
_TRACED_COLD, _TRACED_WARM = 2, 4
# Byte budget of all traces of a server's process.
_TRACE_BYTES = 256 * 2**20


def environment(plan: Plan, role: Role, shadowed: bool) -> dict[str, str]:
    """Return the environment variables of a role's server in a layer diff; a server without a shadow is only traced.

    Another engine's own backend cannot be its shadow: the server's own one is, and the other computes the recorded calls again.
    """
    if not shadowed:
        return {TRACE: str(_TRACE_BYTES)}
    shadow = plan.candidate if role == "reference" else plan.reference
    foreign = not shadow.is_kernel and "engine" in plan.spec.treatment
    own = plan.backend(role) if foreign else shadow
    return {
        SHADOW: own.name if plan.instrumented("reference") else plan.beside,
        RECORD: str(plan.spec.workload.budget_mb * 2**20),
        TRACE: str(_TRACE_BYTES),
        MODEL_HASH: hash_model(plan.model),
    }


def compare_layers(engine: Engine, folder: RunFolder, plan: Plan, display: ProgressDisplay) -> None:
    """Shadow and record in a running server, then trace it as it is and with the other backend in every layer.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    place = folder.server_folder(engine.role)
    prompts = _prompts_of(plan)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    display.say(f"Layer diff in the {engine.role}'s server: {len(prompts)} questions in the shadow.")

    limits = served_limits(plan, folder) if engine.scores else ()
    shadow(engine, place, plan, keeper(folder, plan), envelope_seed(folder), limits)
    labels = _trace(engine, place, engine.role, prompts, Control())
    other: Role = "candidate" if engine.role == "reference" else "reference"
    _trace(engine, place, other, prompts, Control(substitute=layers_seen(place)))
    set_control(place, Control())
    folder.write(LAYER_DIFF, LayerDiffRecord(traced=labels), engine.role)


def trace_free_running(engine: Engine, folder: RunFolder, plan: Plan) -> None:
    """Take a server without a shadow through the envelope, and trace the prompts of `compare_layers` with the candidate alone.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written.
    """
    place = folder.server_folder(engine.role)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    serve_envelope(engine, folder, plan)
    labels: tuple[str, ...] = ()
    if plan.instrumented(engine.role):
        labels = _trace(engine, place, engine.role, _prompts_of(plan), Control())
        set_control(place, Control())
    folder.write(LAYER_DIFF, LayerDiffRecord(traced=labels), engine.role)


def _prompts_of(plan: Plan) -> list[str]:
    return [item.prompt for item in plan.of("layers")]


def shadow(
    engine: Engine, place: Path, plan: Plan, keep: Keep = drop, seed: str = "", limits: Sequence[EngineLimits] = ()
) -> None:
    """Ask the short workload and the envelope's with the other backend in the shadow, and have its errors and the calls written.

    Args:
        engine: the server, launched with `environment`.
        keep: receives the answers to the envelope's requests.
        seed: seed of these requests.
        limits: limits of the servers that get them; by default this server's.
    """
    for stale in (SHADOW_FOLDER, PACK_FOLDER, ENVELOPE_FOLDER):  # from a server that was killed during a layer diff
        shutil.rmtree(place / stale, ignore_errors=True)
    set_control(place, Control(shadow=True))
    spec, prompts = plan.spec, _prompts_of(plan)
    cold, warm = prompts[:COLD_QUESTIONS], prompts[COLD_QUESTIONS:]
    for prompt in cold:
        engine.flush_cache()
        _send(engine, [prompt], spec.workload.token_limit, 1)
    cache_header(engine)
    _send(engine, warm, spec.workload.token_limit, spec.workload.concurrency)
    write = partial(write_now, place, lambda: _send(engine, [PROMPT_HEADER], 1, 1))
    drive_envelope(engine, place, plan, write, keep, seed, limits)
    set_control(place, Control())


@contextmanager
def substituted_everywhere(place: Path) -> Iterator[None]:
    """Have a server with a shadow serve the other role's backend in every layer, within the context."""
    set_control(place, Control(substitute=layers_seen(place)))
    try:
        yield
    finally:
        set_control(place, Control())


def _trace(engine: Engine, place: Path, role: str, prompts: Sequence[str], control: Control) -> tuple[str, ...]:
    """Trace some of the prompts, one at a time: the first with an empty cache, the others with the shared header cached.

    Labels begin with the role; they are returned without it: "0", "1", ...
    """
    chosen = [*prompts[:_TRACED_COLD], *prompts[-_TRACED_WARM:]]
    for number, prompt in enumerate(chosen):
        set_control(place, control)
        if number < _TRACED_COLD:
            engine.flush_cache()
        else:
            cache_header(engine)
        set_control(place, control.model_copy(update={"trace": f"{role}-{number}"}))
        _send(engine, [prompt], 4, 1)
    return tuple(str(number) for number in range(len(chosen)))


def _send(engine: Engine, prompts: Sequence[str], max_tokens: int, concurrency: int) -> None:
    """Ask, and discard the answers: the layer diff measures the attention calls that they cause."""
    answers(engine, [ChatRequest(prompt, max_tokens) for prompt in prompts], concurrency)
