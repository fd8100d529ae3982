"""Asks both servers of a run the probes, under the conditions of `CONDITIONS`, and traces both where they differ most.

They decide where the sides differ in more than a backend: then no kernel can be put into a shadow. Every answer is forced to the
tokens that the reference writes cold, so each token is scored with the same history, in prefill and decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from assay.evals.probes import ProbeLoad, probe_load
from assay.harness.engines import registry
from assay.harness.engines.base import Engine
from assay.harness.engines.features import answered, shown, split
from assay.harness.engines.model import model_shape
from assay.harness.errors import EngineError
from assay.harness.evidence.faults import SENSITIVITY
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.probes import CONDITIONS, ProbePass, TracedPlace, passes_of, record_pass
from assay.harness.judge.side_probes import farthest
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.run.probes import AskedArm, ask, tracing
from assay.harness.run.run_folder import asked_roles
from assay.harness.sides import ROLES, Role, flag_values, profile_of

# The reference's traces: alone, and again in another batch; probes sent at once for the latter.
_TRACES: dict[Role, tuple[str, ...]] = {"reference": ("trace", "trace again"), "candidate": ("trace",)}
_AT_ONCE = 2


def compares_probes(plan: Plan) -> bool:
    """Return True if a run asks its servers the probes."""
    more_than_backend = bool(set(plan.spec.treatment) - {"backend"})
    asked = "logits" in plan.spec.workload.suites and plan.roles == ROLES and not plan.has_url
    return asked and more_than_backend and all(registry.probed(side.engine) for side in plan.spec.sides.values())


def open_passes(plan: Plan, folder: RunFolder, role: Role) -> list[ProbePass]:
    """List the passes that a role's server still has to make, the reference's first one first."""
    if not compares_probes(plan) or asked_roles(plan, folder) != ROLES:
        return []
    done = {made.number for made in passes_of(folder.server_folder(role), folder.nonce)}
    due = [
        ProbePass(number=number, features=tuple(sorted(features)), why="sides")
        for number, features in enumerate(CONDITIONS.values())
    ]
    return [each for each in due if each.number not in done]


def ask_probes(
    engine: Engine, plan: Plan, folder: RunFolder, display: ProgressDisplay, most: int | None = None
) -> None:
    """Ask a role's server the probes under each open condition, at most `most` of them.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written.
    """
    for record in open_passes(plan, folder, engine.role)[:most]:
        _ask(engine, plan, folder, record)
        display.count(f"{engine.role}: probes", record.number + 1, len(CONDITIONS))


def trace_open(plan: Plan, folder: RunFolder, role: Role) -> bool:
    """Return True if a role's server is still to be traced on a probe."""
    made = passes_of(folder.server_folder(role), folder.nonce)
    return [each.complete and each.traced is None for each in made] == [True] * len(CONDITIONS)


def trace_sides(engine: Engine, plan: Plan, folder: RunFolder) -> None:
    """Trace a role's server at the token at which the sides are farthest apart; where they run in turn, at a deep decode step.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written, or its passes cannot be read.
    """
    passes = {role: passes_of(folder.server_folder(role), folder.nonce) for role in ROLES}
    chosen = next((each for each in passes["reference"] if each.traced), None)
    features, place = (chosen.features, chosen.traced) if chosen else farthest(passes["reference"], passes["candidate"])
    for number, why in enumerate(_TRACES[engine.role], len(CONDITIONS)):
        _ask(engine, plan, folder, ProbePass(number=number, features=features, why=why, traced=place))


def ask_with_fault(engine: Engine, plan: Plan, folder: RunFolder) -> None:
    """Ask a server with a seeded fault the probes after a cached prefix, which the fault needs."""
    record = ProbePass(number=len(CONDITIONS), features=tuple(CONDITIONS["cached"]), why="sensitivity")
    _ask(engine, plan, folder, record, SENSITIVITY)


def _ask(engine: Engine, plan: Plan, folder: RunFolder, record: ProbePass, under: str = "") -> None:
    begun, place, features = time.monotonic(), folder.server_folder(engine.role), frozenset(record.features)
    base = next(iter(passes_of(folder.server_folder("reference"), folder.nonce)), None)
    answers = {reply.probe: reply.decode.tokens for reply in base.replies} if base else {}
    recurrent, again = model_shape(plan.model).recurrent, _AT_ONCE if record.why == "trace again" else 0
    asked = AskedArm(load_of(plan), features, record.label, answers, again=again, recurrent=recurrent)
    try:
        with tracing(engine, place, record):
            over = ask(engine, place, asked)
    except EngineError as error:
        engine.check()  # a server that died ends the run; one that refuses a probe does not
        record_pass(place / under, record.model_copy(update={"problem": error.found}), folder.nonce)
        return
    known = registry.features(engine.kind).features_of(plan.spec.device)
    made = answered(record, over, {id_: shown(known[id_], over) for id_ in record.features})
    chunks = {"chunks": said} if (said := split(over)) else {}
    made = made.model_copy(update={"seen": made.seen | chunks, "seconds": time.monotonic() - begun})
    record_pass(place / under, made, folder.nonce)


def traced_tokens(plan: Plan, passes: Sequence[ProbePass], place: TracedPlace) -> list[int]:
    """Return the tokens of a traced sequence up to the last one that a trace keeps: a probe, and the answer of the first pass."""
    (probe,) = (each.ids for each in load_of(plan).probes if each.id == place.probe)
    (answer,) = (reply.decode.tokens for reply in passes[0].replies if reply.probe == place.probe)
    return [*probe, *answer][: place.index]


def load_of(plan: Plan) -> ProbeLoad:
    """Make the probes for both models of a run."""
    shapes = [model_shape(folder) for folder in plan.models.values()]
    given = [
        flag_values(side.flags).get(flag, "")
        for side in plan.spec.sides.values()
        for flag in profile_of(side.engine).limits
    ]
    context = min([*(shape.context for shape in shapes), *(int(value) for value in given if value.isdigit())])
    return probe_load(plan.spec.device, context, min(shape.vocabulary for shape in shapes))
