"""Plan -> engines: the one place that constructs a server under test, for a run, a bench, a recording and a bisection."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from assay.harness.backend import Backend
from assay.harness.config import RunSpec
from assay.harness.engines import memory
from assay.harness.engines.arguments import differences
from assay.harness.engines.base import Engine, start_together
from assay.harness.engines.environments import python_of
from assay.harness.engines.inside.control import CONTROL, FAULTS
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import server
from assay.harness.engines.remote import RemoteServer
from assay.harness.errors import UsageError
from assay.harness.evidence.fingerprint import FINGERPRINT, PARTS, Fingerprint
from assay.harness.evidence.folder import EvidenceFolder, RunFolder
from assay.harness.evidence.manifest import COMMON_SETTINGS, RESOLVED, ResolvedArguments, ServerManifest
from assay.harness.evidence.run_file import RUN
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff
from assay.harness.run.envelope import chunk_argument
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import ignored_of
from assay.harness.run.probes import PROBED
from assay.harness.run.run_folder import shadowed_role
from assay.harness.run.side_probes import compares_probes
from assay.harness.sides import ROLES, Role, Side, settings, without_secrets


def make_engine(
    plan: Plan,
    role: Role,
    evidence: Path,
    log: Path,
    *,
    cpu_core: int | None,
    eager: bool,
    side: Side | None = None,
) -> Engine:
    """Make a role's engine without starting it: a server to launch, or one that is already running.

    Args:
        plan: backends, model, device, engine flags and timeouts.
        evidence: folder for the files that the server's process writes.
        cpu_core: see `Launch` and `core_of`.
        eager: see `Launch`.
        side: the role's side as launched, or None for the side as requested.
    """
    spec, side, backend = plan.spec, side or plan.spec.sides[role], plan.backend(role)
    if backend.is_url:
        return RemoteServer(role=role, url=backend.name, request_timeout=spec.request_timeout, model=side.model)
    return server(
        Launch(
            engine=side.engine,
            role=role,
            backend=backend.name,
            model=plan.models[role],
            interpreter=python_of(side),
            device=spec.device,
            engine_args=side.flags,
            evidence=evidence,
            log=log,
            startup_timeout=spec.startup_timeout,
            request_timeout=spec.request_timeout,
            decode_backend=plan.beside,
            cpu_core=cpu_core,
            eager=eager,
            extra=side.environment,
        )
    )


def make_run_engine(plan: Plan, folder: RunFolder, role: Role) -> Engine:
    """Make a role's engine in a run.

    Both run without CUDA graphs if a kernel of the contract computes decode, or if decode is traced because no answers are
    compared. Both also get the arguments that only one of the backends forces, which are determined once per run.
    """
    engine, spec = _run_engine(plan, folder, role), plan.spec
    # On the CPU, SGLang resolves the same arguments for every backend: assay starts both with --disable-cuda-graph.
    # If the backends are the same, the treatment explains every difference in arguments; two engines have none in common.
    several = {side.engine for side in spec.sides.values()} != {"sglang"}
    if spec.device != "cuda" or plan.has_url or not plan.compares_answers or "backend" not in spec.treatment or several:
        return engine
    common = folder.read(COMMON_SETTINGS)
    if common is None:
        reference, candidate = (_run_engine(plan, folder, each) for each in ROLES)
        common = reference.settle_with(candidate, spec.treatment)
        folder.write(COMMON_SETTINGS, common)
    return engine.with_flags(common.flags)


def resolve_sides(
    spec: RunSpec,
    folder: EvidenceFolder[Any],
    servers: Mapping[Role, ServerManifest],
    engine_of: Callable[[Role], Engine],
) -> None:
    """Record what the engine resolves each side's command line to, unless only the backends differ.

    A setting that the engine resolves from a side follows from the treatment; any other difference is unintended.

    Args:
        servers: manifests of the servers that have started, by role.
        engine_of: makes a role's engine; it need not have started.
    """
    more_than_backend = set(spec.treatment) - {"backend"}
    if not (more_than_backend or differences(servers, spec.treatment)):
        return
    for role in ROLES:
        if folder.read(RESOLVED, role) is None:
            resolved = engine_of(role).resolved_arguments()
            folder.write(RESOLVED, ResolvedArguments(arguments=resolved), role)


def _run_engine(plan: Plan, folder: RunFolder, role: Role) -> Engine:
    environment = {RUN: folder.nonce, FAULTS: "1"}
    # A server that was killed may have left a control file, which its successor would follow.
    (folder.server_folder(role) / CONTROL).unlink(missing_ok=True)
    if plan.has_layer_diff:
        environment |= layer_diff.environment(plan, role, shadowed=role == shadowed_role(plan, folder))
    environment |= PROBED if compares_probes(plan) else {}
    return make_engine(
        plan,
        role,
        folder.server_folder(role),
        folder.log(role),
        cpu_core=core_of(plan.spec.device, ROLES.index(role)),
        eager=plan.has_decode_kernel or not plan.compares_answers,
        side=plan.spec.sides[role].launched_with(environment, chunk_argument(plan, plan.spec.sides[role].engine)),
    )


def core_of(device: str, number: int = 0) -> int | None:
    """Return a CPU server's core, a different one for each `number` if possible, or None on a GPU."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores)] if device == "cpu" else None


def together(plan: Plan) -> bool:
    """Return True if both servers run at the same time: as the spec sets it, or if memory allows it."""
    spec = plan.spec
    if spec.servers != "auto":
        return spec.servers == "together"
    if plan.has_url:
        return True
    sizes = [memory.model_bytes(plan.models[role]) for role in ROLES]
    return memory.hold_both(spec.device, [*spec.sides.values()], sizes, memory.available_bytes(spec.device))


def check_together(plan: Plan, reason: str) -> None:
    """Check that both servers run at the same time, as `reason` requires.

    Raises:
        UsageError: they do not.
    """
    if together(plan):
        return
    says, do = "The servers are set to run in turn.", "leave out --servers"
    if plan.spec.servers != "in-turn":
        says = "The two servers do not fit into memory together."
        do = "use a smaller model, more memory, or --engine-arg=SHARE"
    raise UsageError(says, f"both at the same time: {reason}", do)


@contextmanager
def running(engines: Sequence[Engine], device: str, display: ProgressDisplay | None = None) -> Iterator[None]:
    """Start engines, and always stop them. While they start, a display shows for how long, and their log.

    On CUDA they start one after the other: SGLang sizes its KV cache by the memory that is free before and after it loads the
    weights, and fails if another server takes some in between.

    Raises:
        EngineError: one of them did not start.
    """
    what = f"starting {' and '.join(engine.role for engine in engines)}"
    with display.waiting(what, lambda: _last_words(engines)) if display else nullcontext():
        start_together(engines, at_once=device != "cuda")
    try:
        yield
    finally:
        for engine in engines:
            engine.stop()


# The time and process at the start of a server's log line.
_STAMP = re.compile(r"^\[[^\]]*\]\s*")


def _last_words(engines: Sequence[Engine]) -> str:
    """Return the last line, except warnings, logged by a server that is not ready yet; if several are not, the last one's."""
    starting = [engine for engine in engines if engine.startup_s is None]
    lines = [f"{engine.role}: {_STAMP.sub('', line)}" for engine in starting if (line := engine.last_step())]
    return lines[-1] if lines else ""


def record_fingerprint(engine: Engine, side: Side, folder: Path, nonce: str) -> Fingerprint | None:
    """Write the fingerprint of a running server into its folder, and return it, or None for an engine that does not report one.

    Raises:
        EngineError: the server failed.
        EvidenceError: it cannot be written.
    """
    made = engine.fingerprint()
    if made is None:
        return None
    ignored, why = None, "is measured without a server next to it, as by assay fingerprint --model"
    try:
        ignored = ignored_of(Path(made.model), side, measuring=False)
    except UsageError as error:  # another host's folder, for example of a URL
        why = error.found
    update = {"model": side.model, "asked": dict(settings(without_secrets(side))), "run": nonce, "ignored": ignored}
    made = made.model_copy(update=update)
    reasons = dict.fromkeys((part for part in PARTS if not made.has(part)), "its processes did not tell")
    reasons |= {"ignored": why} if ignored is None else {}
    made = made.model_copy(update={"not_observed": {**reasons, **made.not_observed}})
    FINGERPRINT.write(folder, made)
    return made


def manifest_of(engine: Engine) -> ServerManifest:
    """Return the manifest of a running server: what it reports about itself."""
    return ServerManifest(
        role=engine.role,
        backend=engine.backend,
        engine=engine.label,
        kind=engine.kind,
        claimed_phases=Backend.parse(engine.backend).phases,
        launch_command=engine.launch_command,
        startup_s=engine.startup_s,
        arguments=engine.arguments(),
    )
