"""The layer diff: the other role's backend runs inside one server while it answers a short workload.

First as a shadow: the candidate computes the same calls beside the serving backend, its own error is measured on the reference's
q, k and v, and a replay pack of the calls is recorded. The first two questions are examined at once, so that a bug has a name
within seconds. Then free-running: a few prompts are traced as they are, and once more with the candidate in every layer. After
the servers have stopped, all recorded calls are examined.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from assay.evals.questions import PROMPT_HEADER
from assay.harness.collect.plan import COLD_QUESTIONS, Plan
from assay.harness.conditions import PHASES
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_sums import SUMS
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import hash_model
from assay.harness.evidence.records import ROLES, Role
from assay.harness.evidence.shadow_errors import DIMENSIONS, ShadowErrors, read_shadow_errors
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.trace import BUDGET_BYTES
from assay.harness.evidence.trace import FOLDER as TRACE_FOLDER
from assay.harness.files import write_whole
from assay.harness.offline.replay import name_recorded
from assay.harness.progress import ProgressDisplay
from assay.harness.schema import Record
from assay.harness.server.control import Control, set_control
from assay.harness.server.sglang_plugin import MODEL_HASH, RECORD, SHADOW, TRACE
from assay.harness.server.shadow import PACK_FOLDER
from assay.harness.server.write_request import write_now

TRACED_COLD, TRACED_WARM = 2, 4
"""Prompts whose layer outputs are traced, of the cold and of the warm ones."""
_EARLY_TOKENS = 2
"""Token limit of the first two answers: one pass of each phase."""
_DONE = "looked.json"


class Looked(Record):
    """``looked.json`` in a server's folder: what was looked at in it, written when all of it was.

    Attributes:
        traced: labels of the traced prompts, without their role.
        substituted: whether the candidate's traces were made in this server, with the candidate in every layer.
        layers: number of layers.
        seconds: from the first question to the last.
        named_s: seconds from the first question until what it and the second came to was examined and said; None if nothing was
            out of bounds.
    """

    traced: tuple[str, ...]
    substituted: bool
    layers: int
    seconds: float
    named_s: float | None = None


def environment(plan: Plan, role: Role, shadowed: bool) -> dict[str, str]:
    """Environment variables of a role's server in a layer diff.

    Args:
        plan: a run with a layer diff.
        role: the server's role.
        shadowed: whether the other role's backend runs in it as a shadow and calls are recorded; otherwise it is only traced.
    """
    if not shadowed:
        return {TRACE: str(BUDGET_BYTES)}
    shadow = plan.candidate if role == "reference" else plan.reference
    return {SHADOW: shadow.name, RECORD: str(plan.spec.budget_mb * 2**20), MODEL_HASH: hash_model(plan.model)}


def pack_of(folder: RunFolder) -> Path | None:
    """The replay pack that a run recorded; None if it recorded none."""
    packs = [folder.server_folder(role) / PACK_FOLDER for role in ROLES]
    return next((pack for pack in packs if (pack / "manifest.json").exists()), None)


def looked(folder: RunFolder, role: Role) -> Looked | None:
    """What was looked at in a role's server; None if that did not come to its end."""
    path = folder.server_folder(role) / _DONE
    return Looked.model_validate_json(path.read_text()) if path.exists() else None


def observed(folder: RunFolder) -> ShadowErrors | None:
    """What the shadow observed in a run, the roles as they are meant; None where nobody looked.

    Raises:
        EvidenceError: a file is damaged.
    """
    for role in ROLES:
        place = folder.server_folder(role)
        if any((place / SHADOW_FOLDER).glob("*.safetensors")):
            cells = read_shadow_errors(place)
            servers = {server.role: server for server in folder.progress().servers}
            return cells if role == "reference" else turned(cells, servers["candidate"].claimed_phases)
    return None


def turned(cells: ShadowErrors, claimed: Sequence[str]) -> ShadowErrors:
    """What was observed in the candidate's server, where the reference stood in the shadow: with the roles as they are meant, and
    in the phases that the candidate computes itself.

    The differences are the same. Where the server's own output is not finite, it is the candidate's that is not. Relative errors
    stay relative to the size of the server's output, the candidate's: that of the shadow's was not summed up.
    """
    own = np.isin(cells.index[:, DIMENSIONS.index("phase")], [PHASES.index(phase) for phase in claimed])
    swapped = {"candidate_squared": "reference_squared", "nonfinite": "undefined"}
    swapped |= {other: name for name, other in swapped.items()}
    sums = cells.sums[own][:, [SUMS.index(swapped.get(name, name)) for name in SUMS]]
    headers = (
        one.model_copy(update={"reference": one.candidate, "candidate": one.reference, "phases": tuple(claimed)})
        for one in cells.headers
    )
    return replace(cells, index=cells.index[own], sums=sums, max_abs=cells.max_abs[own], headers=tuple(headers))


def compare_layers(engine: Engine, folder: RunFolder, plan: Plan, display: ProgressDisplay) -> None:
    """Shadow and record in a running server, then trace it as it is and with the other backend in every layer.

    Args:
        engine: the server, launched with `environment`.
        folder: the run's.
        plan: a run with a layer diff.
        display: shows the progress.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    begun = time.monotonic()
    place = folder.server_folder(engine.role)
    prompts = prompts_of(plan)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    display.say(f"Layer diff in the {engine.role}'s server: {len(prompts)} questions in the shadow.")
    named_s: float | None = None

    def name() -> None:
        nonlocal named_s
        pack = place / PACK_FOLDER
        again = replay_command(pack, plan.candidate)
        try:
            findings = name_recorded(pack, plan.candidate, again, served=engine.role == "candidate")
        except UsageError:  # the candidate computed nothing: the final examination says so, with everything that was seen
            return
        if findings:
            named_s = time.monotonic() - begun
        for finding in findings:
            display.say(f"After {named_s:.1f} s: {finding.where}: {finding.diagnosis}.")

    shadow(engine, place, plan, name)
    layers = layers_seen(place)
    labels = trace(engine, place, engine.role, prompts, Control())
    other: Role = "candidate" if engine.role == "reference" else "reference"
    trace(engine, place, other, prompts, Control(substitute=layers))
    set_control(place, Control())
    done = Looked(
        traced=labels, substituted=True, layers=len(layers), seconds=time.monotonic() - begun, named_s=named_s
    )
    write_whole(place / _DONE, done.model_dump_json(indent=1))


def trace_free_running(engine: Engine, folder: RunFolder, plan: Plan) -> None:
    """Trace the prompts of `compare_layers` in a server without a shadow: the candidate as it runs on its own.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written.
    """
    begun = time.monotonic()
    place = folder.server_folder(engine.role)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    labels = trace(engine, place, engine.role, prompts_of(plan), Control())
    set_control(place, Control())
    done = Looked(traced=labels, substituted=False, layers=len(layers_seen(place)), seconds=time.monotonic() - begun)
    write_whole(place / _DONE, done.model_dump_json(indent=1))


def prompts_of(plan: Plan) -> list[str]:
    """The short workload: `COLD_QUESTIONS`, then `WARM_QUESTIONS`."""
    return [item.prompt for item in plan.of("layers")]


def replay_command(pack: Path, candidate: Backend) -> str:
    """The command that examines a pack again."""
    return shlex.join(["assay", "replay", str(pack), "--candidate", candidate.name])


def shadow(engine: Engine, place: Path, plan: Plan, early: Callable[[], None] | None = None) -> None:
    """Ask the short workload with the other backend in the shadow, and have its errors and the calls written.

    Args:
        engine: the server, launched with `environment`.
        place: its folder.
        plan: a run with a layer diff.
        early: called once one question without and one with a cached prefix are written; the other questions follow.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    for left in (SHADOW_FOLDER, PACK_FOLDER):  # by a server that was killed in the middle of a layer diff
        shutil.rmtree(place / left, ignore_errors=True)
    set_control(place, Control(shadow=True))
    spec, prompts = plan.spec, prompts_of(plan)
    cold, warm = prompts[:COLD_QUESTIONS], prompts[COLD_QUESTIONS:]
    if early:
        first, cold, question, warm = cold[0], cold[1:], warm[0], warm[1:]
        engine.flush_cache()
        send(engine, [first], _EARLY_TOKENS, 1)  # leaves the header in the cache
        write_now(place, lambda: send(engine, [question], _EARLY_TOKENS, 1))
        early()
    for prompt in cold:
        engine.flush_cache()
        send(engine, [prompt], spec.token_limit, 1)
    engine.flush_cache()
    send(engine, [PROMPT_HEADER], 1, 1)
    send(engine, warm, spec.token_limit, spec.concurrency)
    write_now(place, lambda: send(engine, [PROMPT_HEADER], 1, 1))
    set_control(place, Control())


@contextmanager
def substituted_everywhere(place: Path) -> Iterator[None]:
    """Have a server with a shadow serve the other role's backend in every layer for a while."""
    set_control(place, Control(substitute=layers_seen(place)))
    try:
        yield
    finally:
        set_control(place, Control())


def layers_seen(place: Path) -> tuple[int, ...]:
    """Layers that called attention in a server.

    Raises:
        EvidenceError: none was counted.
    """
    layers = tuple(sorted({layer for count in read_counters(place / "counters") for layer in count.calls_by_layer}))
    if not layers:
        raise EvidenceError(f"{place} counted no attention call.", "a server with assay's plugin", "see the server's log")
    return layers


def trace(engine: Engine, place: Path, role: str, prompts: Sequence[str], control: Control) -> tuple[str, ...]:
    """Trace some of the prompts, one at a time: the first with an empty cache, the others with the shared header cached.

    Args:
        engine: the server.
        place: its folder.
        role: the role that the labels begin with.
        prompts: the questions.
        control: what else applies meanwhile.

    Returns:
        The labels without the role: "0", "1", ...
    """
    chosen = [*prompts[:TRACED_COLD], *prompts[-TRACED_WARM:]]
    for number, prompt in enumerate(chosen):
        set_control(place, control)
        if number <= TRACED_COLD:
            engine.flush_cache()
        if number >= TRACED_COLD:
            send(engine, [PROMPT_HEADER], 1, 1)
        set_control(place, control.model_copy(update={"trace": f"{role}-{number}"}))
        send(engine, [prompt], 4, 1)
    return tuple(str(number) for number in range(len(chosen)))


def send(engine: Engine, prompts: Sequence[str], max_tokens: int, concurrency: int) -> None:
    """Ask, and drop the answers: the layer diff measures what is below them."""

    def drop(index: int, reply: Reply) -> None: ...

    engine.ask([ChatRequest(prompt, max_tokens) for prompt in prompts], concurrency, drop)
