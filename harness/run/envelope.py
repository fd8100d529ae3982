"""The policy's envelope, driven through the servers: one runs the other role's backend in its shadow, the other serves normally.

Both get the same requests (`assay.evals.envelope_load`), whose answers are compared. In the shadow the conditions of the calls are
counted. Waves that left a condition uncovered are sent again, since the engine chooses which sequences share a call. Where texts
diverge before a required length, both servers get further requests for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from assay.evals.envelope_load import (
    BATCH,
    DEPTH,
    Load,
    LoadReach,
    LoadRequest,
    Wave,
    blocks_of,
    decode_load,
    envelope_load,
    inner_lengths,
    longest,
)
from assay.evals.questions import prompt_hash
from assay.harness.engines import registry
from assay.harness.engines.base import Engine
from assay.harness.engines.launch import launching
from assay.harness.engines.model import model_shape
from assay.harness.evidence.envelope import EngineLimits, EnvelopeCounts, envelope_of, gaps, read_envelope
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import RESOLVED
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import envelope_pairs
from assay.harness.judge.baselines import envelope_seed
from assay.harness.judge.envelope import served_counts
from assay.harness.run.plan import Plan
from assay.harness.run.run_folder import shadowed_role
from assay.harness.sides import ROLES, Role
from assay.harness.sides import Engine as EngineName

# Most times that a wave is sent for one condition.
_ROUNDS = 3
# Ends of the ids of requests for lengths that no text reached before it diverged, by round.
AGAIN = (" asked again", " asked a third time")
# Alternatives with each token at required lengths: tokens of random prompts are near ties, so that rounding of a whole model moves
# one out of the best few. Engines return at most 20.
_ALTERNATIVES = 20

Keep = Callable[[Answer], None]
"""Records an answer."""


def chunk_argument(plan: Plan, engine: EngineName) -> tuple[str, ...]:
    """Return the flag that makes a server of an engine split prompts at the envelope's length; the user's own flag overrides it.

    Otherwise a server's chunk may be longer than any prompt that the load can afford, and chunked prefill would never occur.
    """
    length = longest(plan.spec.policy.envelope_tokens, model_shape(plan.model).context, DEPTH[plan.spec.device])
    flag = launching(engine).CHUNK_FLAG
    return (f"{flag}={length}",) if flag and plan.has_layer_diff and length > 0 else ()


def drive_envelope(
    engine: Engine, place: Path, plan: Plan, write: Callable[[], None], keep: Keep, seed: str = "",
    limits: Sequence[EngineLimits] = (),
) -> None:  # fmt: skip
    """Send waves to a server with its shadow switched on until the envelope is covered, and have the counts written.

    Args:
        write: makes the server write its counts.
        keep: receives the answers to the first round, which the other role answers too.
        seed: the run's seed, from which every round derives its own.
        limits: limits of both servers (`served_limits`); by default this server's.
    """
    counts, missing = None, _missing(plan, None)
    if engine.scores:  # an engine that does not score takes no token ids either
        own = None if limits else engine.limits(model_shape(plan.model).context)
        limits = limits or ([own] if own else [])
    for number in range(_ROUNDS):
        for load, whose in _loads(limits if number == 0 else limits[:1], plan, f"{seed}/{number}"):
            send(engine, _waves_for(load, missing if number else None), drop if number else keep, whose)
        write()
        counts, before = read_envelope(place), missing
        missing = _missing(plan, counts)
        if counts is None or not missing or missing == before:
            return


def serve_envelope(engine: Engine, folder: RunFolder, plan: Plan) -> None:
    """Have a server without a shadow answer the envelope's requests as it normally serves, with its own kernels and graphs."""
    for load, whose in _loads(served_limits(plan, folder), plan, f"{envelope_seed(folder)}/0") if engine.scores else ():
        send(engine, load.waves, keeper(folder, plan), whose)


def lengths_again(reach: LoadReach, counts: EnvelopeCounts) -> list[int]:
    """List total lengths of decode that further requests need, if the answers that were compared had these `counts`."""
    points, met = reach.lengths["decode"]["total-tokens"], counts.values("decode", "total-tokens")
    lacking = [length for first, last in gaps(met, points) for length in range(first, last + 1)]
    lengths = [length for length in lacking if length in points]
    for block in blocks_of(lacking):  # a block needs its border points and one length between them
        inner = inner_lengths(block, points)
        if inner and not any(first <= length <= last for first, last in met for length in inner):
            lengths.append(inner[len(inner) // 2])
    return lengths


def serve_again(plan: Plan, folder: RunFolder, role: Role, number: int) -> Callable[[Engine], None] | None:
    """Have a server decode at the required lengths that no text reached before it diverged, in a round of `AGAIN`.

    Both servers must have answered the rounds before it. Both then get the same requests.
    """
    answers = folder.answers()
    if any(answer.role == role and answer.item.endswith(AGAIN[number]) for answer in answers):
        return None
    candidate = {server.role: server for server in folder.progress().servers}.get("candidate")
    # This role has no answer of this round yet, so whatever the other role has, no pair of this round counts.
    counts = served_counts(folder, envelope_of(folder), candidate, envelope_pairs(answers))
    if counts is None or counts.limits is None or "decode" not in plan.candidate.phases:
        return None
    reach = plan.envelope.reach(counts.limits)
    lengths = lengths_again(reach, counts)
    if not lengths:
        return None
    seed = envelope_seed(folder) + AGAIN[number]
    waves = decode_load(reach, model_shape(plan.model).vocabulary, seed, lengths)
    return lambda engine: send(engine, waves, keeper(folder, plan), AGAIN[number])


def served_limits(plan: Plan, folder: RunFolder) -> list[EngineLimits]:
    """Return the limits of both servers, starting with the one that has the shadow; a single one if they are equal.

    Both get the requests that take either server to its limits, because they may split prompts or page differently.
    """
    reported = {server.role: server.arguments for server in folder.progress().servers}
    context, limits = model_shape(plan.model).context, []
    for role in sorted(filter(plan.instrumented, ROLES), key=lambda role: role != shadowed_role(plan, folder)):
        record = folder.read(RESOLVED, role)
        if known := record.arguments if record is not None else reported.get(role):
            limits.append(registry.arguments(plan.spec.sides[role].engine).limits_of(known, context))
    return [each for number, each in enumerate(limits) if each not in limits[:number]]


def keeper(folder: RunFolder, plan: Plan) -> Keep:
    """Make a callback that keeps a server's answers in a run's folder, each once, if its texts are compared."""
    if "greedy" not in plan.spec.workload.suites:
        return drop
    known = {answer.key for answer in folder.answers()}

    def keep(answer: Answer) -> None:
        if answer.key not in known:
            folder.append(answer)

    return keep


def drop(answer: Answer) -> None:
    """Discard an answer."""


def send(engine: Engine, waves: Sequence[Wave], keep: Keep, whose: str = "") -> None:
    """Send waves in succession to a server with an empty cache; `whose` ends the ids of their items."""
    engine.flush_cache()
    for wave in waves:
        outputs = [request.output for request in wave]
        for answer in engine.generate_all(
            [_item(r, whose) for r in wave], [r.ids for r in wave], outputs, _ALTERNATIVES
        ):
            keep(answer)


def _item(request: LoadRequest, whose: str) -> Item:
    prompt = " ".join(map(str, request.ids))
    return Item(suite="envelope", id=request.title + whose, prompt=prompt, prompt_hash=prompt_hash(prompt))


def _waves_for(load: Load, missing: set[tuple[str, str]] | None) -> Sequence[Wave]:
    """List the waves of a load that can meet the missing (phase, condition) pairs; all waves for None."""
    if missing is None:
        return load.waves
    quantities = {quantity for _, quantity in missing}
    return (
        load.long,
        *(load.extend if any(phase == "extend" and quantity not in ("batch", "mix") for phase, quantity in missing) else ()),
        *(load.decode if any(phase == "decode" and quantity != "batch" for phase, quantity in missing) else ()),
        *(load.batch if quantities & {"batch", "mix"} else ()),
    )  # fmt: skip


def _missing(plan: Plan, counts: EnvelopeCounts | None) -> set[tuple[str, str]]:
    """List the phases that the candidate computes and the ids of conditions in them that are not covered yet."""
    if counts is None:
        return set()
    return {missing[:2] for missing in plan.envelope.missing(counts, plan.candidate.phases)}


def _loads(limits: Sequence[EngineLimits], plan: Plan, seed: str) -> Iterator[tuple[Load, str]]:
    """Make a plan's load for each server's limits, and say whose they are; skip limits that the model's context has no room for."""
    for number, reach in enumerate(map(plan.envelope.reach, limits)):
        if reach.tokens > 0:
            vocabulary, decodes = model_shape(plan.model).vocabulary, "decode" in plan.candidate.phases
            whose = " at the other server's limits" if number else ""
            yield envelope_load(reach, BATCH[plan.spec.device], vocabulary, seed + whose, decodes=decodes), whose
