"""The layer suite: one server with the other role's backend beside it, which is looked into while it answers a short workload.

First the candidate runs in the shadow: its own error on the reference's q, k and v, and a replay pack of the calls. What the first
two questions came to is examined at once, so that a bug has a name within seconds. Then it runs free: a few prompts are traced as
they are, and once more with the candidate in every layer. After the servers have stopped, all recorded calls are examined.
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
from assay.harness.conditions import PHASES
from assay.harness.config import RunSpec
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import hash_model
from assay.harness.evidence.records import ROLES, Role
from assay.harness.evidence.shadow_sums import DIMENSIONS, SUMS, ShadowSums, read_shadow_sums
from assay.harness.evidence.shadow_sums import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.trace import BUDGET_BYTES
from assay.harness.evidence.trace import FOLDER as TRACE_FOLDER
from assay.harness.files import write_whole
from assay.harness.offline.replay import name_recorded
from assay.harness.progress import ProgressDisplay
from assay.harness.schema import Record
from assay.harness.server.control import Control, set_control
from assay.harness.server.sglang_plugin import MODEL_HASH, RECORD, SHADOW, TRACE
from assay.harness.server.shadow import PACK_FOLDER
from assay.harness.server.write_request import bring_up_to_date

COLD, WARM = 4, 12
"""Questions of the short workload: with an empty cache, one by one, and with the shared header cached."""
TRACED_COLD, TRACED_WARM = 2, 4
"""Of these, prompts whose layer outputs are traced."""
_EARLY_TOKENS = 2
"""Tokens of an answer to the first questions: one pass of each phase."""
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


def wanted(spec: RunSpec) -> bool:
    """Whether a run has a layer suite, and can: a server that assay did not start cannot be looked into."""
    return "layers" in spec.suites and not (Backend.parse(spec.reference).is_url or Backend.parse(spec.candidate).is_url)


def settings(spec: RunSpec, model: Path, role: Role, looked_into: bool) -> dict[str, str]:
    """Environment of a role's server in a layer suite.

    Args:
        spec: of the run.
        model: folder of the model.
        role: of the server.
        looked_into: whether the other role's backend stands beside it and its calls are recorded; if not, it is only traced.
    """
    if not wanted(spec):
        return {}
    if not looked_into:
        return {TRACE: str(BUDGET_BYTES)}
    beside = spec.candidate if role == "reference" else spec.reference
    return {SHADOW: beside, RECORD: str(spec.budget_mb * 2**20), MODEL_HASH: hash_model(model)}


def pack_of(folder: RunFolder) -> Path | None:
    """The replay pack that a run recorded; None if it recorded none."""
    packs = [folder.server_folder(role) / PACK_FOLDER for role in ROLES]
    return next((pack for pack in packs if (pack / "manifest.json").exists()), None)


def looked(folder: RunFolder, role: Role) -> Looked | None:
    """What was looked at in a role's server; None if that did not come to its end."""
    path = folder.server_folder(role) / _DONE
    return Looked.model_validate_json(path.read_text()) if path.exists() else None


def observed(folder: RunFolder) -> ShadowSums | None:
    """What the shadow observed in a run, the roles as they are meant; None where nobody looked.

    Raises:
        EvidenceError: a file is damaged.
    """
    for role in ROLES:
        place = folder.server_folder(role)
        if any((place / SHADOW_FOLDER).glob("*.safetensors")):
            cells = read_shadow_sums(place)
            servers = {server.role: server for server in folder.progress().servers}
            return cells if role == "reference" else turned(cells, servers["candidate"].claimed_phases)
    return None


def turned(cells: ShadowSums, claimed: Sequence[str]) -> ShadowSums:
    """What was observed in the candidate's server, where the reference stood in the shadow: with the roles as they are meant, and
    in the phases that the candidate computes itself.

    The differences are the same. Where the server's own output is not finite, it is the candidate's that is not. Relative errors
    stay relative to the size of the server's output, the candidate's: that of the shadow's was not summed up.
    """
    own = np.isin(cells.index[:, DIMENSIONS.index("phase")], [PHASES.index(phase) for phase in claimed])
    swapped = {"candidate_squared": "reference_squared", "nonfinite": "undefined"}
    swapped |= {other: name for name, other in swapped.items()}
    sums = cells.sums[own][:, [SUMS.index(swapped.get(name, name)) for name in SUMS]]
    legends = (
        one.model_copy(update={"reference": one.candidate, "candidate": one.reference, "phases": tuple(claimed)})
        for one in cells.legends
    )
    return replace(cells, index=cells.index[own], sums=sums, max_abs=cells.max_abs[own], legends=tuple(legends))


def look(engine: Engine, folder: RunFolder, prompts: Sequence[str], spec: RunSpec, display: ProgressDisplay) -> None:
    """Look into a running server: shadow and record, then trace it as it is and with the other backend in every layer.

    Args:
        engine: the server, launched with `settings`.
        folder: the run's.
        prompts: `COLD` + `WARM` questions.
        spec: of the run.
        display: shows the progress.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    begun = time.monotonic()
    place = folder.server_folder(engine.role)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    display.say(f"Looking inside the {engine.role}: {len(prompts)} questions in the shadow.")
    named_s: float | None = None

    def name() -> None:
        nonlocal named_s
        pack = place / PACK_FOLDER
        again = reproduced_by(pack, spec.candidate)
        try:
            findings = name_recorded(pack, Backend.parse(spec.candidate), again, served=engine.role == "candidate")
        except UsageError:  # the candidate computed nothing: the examination at the end says so, with all that was seen
            return
        if findings:
            named_s = time.monotonic() - begun
        for finding in findings:
            display.say(f"After {named_s:.1f} s: {finding.where}: {finding.diagnosis}.")

    shadow(engine, place, prompts, spec, name)
    layers = layers_seen(place)
    labels = trace(engine, place, engine.role, prompts, Control())
    beside: Role = "candidate" if engine.role == "reference" else "reference"
    trace(engine, place, beside, prompts, Control(substitute=layers))
    set_control(place, Control())
    done = Looked(
        traced=labels, substituted=True, layers=len(layers), seconds=time.monotonic() - begun, named_s=named_s
    )
    write_whole(place / _DONE, done.model_dump_json(indent=1))


def reproduced_by(pack: Path, candidate: str) -> str:
    """The command that examines a pack again."""
    return shlex.join(["assay", "replay", str(pack), "--candidate", candidate])


def shadow(
    engine: Engine, place: Path, prompts: Sequence[str], spec: RunSpec, early: Callable[[], None] | None = None
) -> None:
    """Ask a short workload with the other backend in the shadow, and have its errors and the calls written.

    Args:
        engine: the server, launched with `settings`.
        place: its folder.
        prompts: `COLD` + `WARM` questions.
        spec: of the run.
        early: is called once what a question without and one with a cached prefix came to is written; the others follow.

    Raises:
        EngineError: the server failed.
        EvidenceError: it wrote nothing, or the folder cannot be written.
    """
    for left in (SHADOW_FOLDER, PACK_FOLDER):  # by a server that was killed while it was looked into
        shutil.rmtree(place / left, ignore_errors=True)
    set_control(place, Control(watch=True))
    cold, warm = prompts[:COLD], prompts[COLD:]
    if early:
        first, cold, question, warm = cold[0], cold[1:], warm[0], warm[1:]
        engine.flush_cache()
        send(engine, [first], _EARLY_TOKENS, 1)  # leaves the header in the cache
        bring_up_to_date(place, lambda: send(engine, [question], _EARLY_TOKENS, 1))
        early()
    for prompt in cold:
        engine.flush_cache()
        send(engine, [prompt], spec.token_limit, 1)
    engine.flush_cache()
    send(engine, [PROMPT_HEADER], 1, 1)
    send(engine, warm, spec.token_limit, spec.concurrency)
    bring_up_to_date(place, lambda: send(engine, [PROMPT_HEADER], 1, 1))
    set_control(place, Control())


def follow(engine: Engine, folder: RunFolder, prompts: Sequence[str]) -> None:
    """Trace the prompts that `look` traces in a server that is not looked into: the candidate as it runs free.

    Raises:
        EngineError: the server failed.
        EvidenceError: the folder cannot be written.
    """
    begun = time.monotonic()
    place = folder.server_folder(engine.role)
    shutil.rmtree(place / TRACE_FOLDER, ignore_errors=True)
    labels = trace(engine, place, engine.role, prompts, Control())
    set_control(place, Control())
    done = Looked(traced=labels, substituted=False, layers=len(layers_seen(place)), seconds=time.monotonic() - begun)
    write_whole(place / _DONE, done.model_dump_json(indent=1))


@contextmanager
def substituted_everywhere(place: Path) -> Iterator[None]:
    """Have a server that is looked into run the other role's backend in every layer for a while."""
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
        raise EvidenceError(
            f"{place} has counted no attention call.", "a server with assay's plugin", "see the server's log"
        )
    return layers


def trace(engine: Engine, place: Path, role: str, prompts: Sequence[str], control: Control) -> tuple[str, ...]:
    """Trace some of the prompts, alone: the first ones with an empty cache, the others with the shared header cached.

    Args:
        engine: the server.
        place: its folder.
        role: what the labels begin with.
        prompts: the questions.
        control: what else holds meanwhile.

    Returns:
        The labels without the role, such as "0".
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
    """Ask, and drop the answers: what is looked at is below them."""

    def drop(index: int, reply: Reply) -> None: ...

    engine.ask([ChatRequest(prompt, max_tokens) for prompt in prompts], concurrency, drop)
