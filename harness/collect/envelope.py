"""Takes a server through the policy's envelope while the other role's backend runs in its shadow.

Waves of requests (`assay.evals.envelope_load`) are sent until every condition of the envelope was counted, or a few rounds have not
met it: which sequences share a call is the engine's choice, so a wave may have to be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from assay.evals.envelope_load import BATCH, DEPTH, Request, again, batch_wave, long_wave, longest
from assay.harness.collect.plan import Plan
from assay.harness.engines.base import Engine, Scorer
from assay.harness.engines.launch import CHUNK_FLAG
from assay.harness.engines.model import model_shape
from assay.harness.errors import EngineError
from assay.harness.evidence.envelope import Envelope, EnvelopeCounts, read_envelope

ROUNDS = 3
"""Most times that a wave is sent for one condition."""
_GENERATE = "/generate"


def chunk_argument(plan: Plan) -> tuple[str, ...]:
    """The flag that makes both servers split prompts at the envelope's length; the user's own flag overrides it.

    Without it a server's chunk may be longer than any prompt that the load can afford, and chunked prefill is never seen.
    """
    length = longest(plan.spec.envelope, model_shape(plan.model).context, DEPTH[plan.spec.device])
    return (f"{CHUNK_FLAG}={length}",) if plan.has_layer_diff and length > 0 else ()


def drive_envelope(engine: Engine, place: Path, plan: Plan, write: Callable[[], None]) -> None:
    """Send waves until the envelope is covered, and have the counts written.

    Args:
        engine: the server, with the shadow switched on.
        place: its folder.
        plan: a run with a layer diff.
        write: makes the server write what it counted.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing.
    """
    scorer, counts = engine.scorer, None
    for number in range(ROUNDS):
        for wave in _waves(plan, counts, f"{number}") if scorer else ():
            assert scorer is not None
            send_ids(scorer, wave)
        write()
        counts = read_envelope(place)
        if counts is None or not _open(plan, counts):
            return


def _open(plan: Plan, counts: EnvelopeCounts) -> set[str]:
    """Ids of the conditions that are not yet covered in a phase that the candidate computes."""
    return {one.quantity for one in Envelope.of(plan.spec).missing(counts, plan.candidate.phases)}


def _waves(plan: Plan, counts: EnvelopeCounts | None, seed: str) -> list[tuple[Request, ...]]:
    """The waves of a round: all lengths in the first one, then what is still open."""
    device, model = plan.spec.device, model_shape(plan.model)
    depth = DEPTH[device] if "decode" in plan.candidate.phases else 1
    length = longest(plan.spec.envelope, model.context, depth)
    if length <= 0:
        return []
    missed = None if counts is None else _open(plan, counts)
    waves: list[tuple[Request, ...]] = []
    if missed is None or missed - {"batch"}:
        waves.append(long_wave(length, depth, model.vocabulary, seed))
        if missed is not None and "prefix-tokens" in missed:
            waves.append(again(waves[0], length, depth, model.vocabulary))
    if missed is not None and "batch" in missed:
        waves.append(batch_wave(BATCH[device] + 2, min(depth, 4), model.vocabulary, seed))
    return waves


def send_ids(server: Scorer, wave: Sequence[Request]) -> None:
    """Send prompts of token ids at once and wait for all answers, which are dropped.

    Raises:
        EngineError: the server failed, or did not answer each of them.
    """
    sampling = [{"temperature": 0, "max_new_tokens": one.output, "ignore_eos": True} for one in wave]
    reply = server.send(_GENERATE, {"input_ids": [list(one.ids) for one in wave], "sampling_params": sampling})
    if not isinstance(reply, list) or len(reply) != len(wave):
        raise EngineError(
            f"{server.who} answered {_GENERATE} with {str(reply)[:300]}.", f"{len(wave)} answers", "read its log"
        )
