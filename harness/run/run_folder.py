"""A run's folder: begin or resume the run there, and find the roles that need a server."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from assay.harness.attention.source import source_hashes
from assay.harness.config import FLAGS, RUN_FLAGS, RUNS
from assay.harness.errors import ChangedError, EngineError, EvidenceError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import QUESTION_PLAN, FailureResult, Manifest, QuestionPlan, hash_items, order_hash
from assay.harness.evidence.run_file import new_nonce
from assay.harness.files import file_name, portable, shown
from assay.harness.judge.baselines import check_stored_reference, measured_roles
from assay.harness.run.machine import origin_of
from assay.harness.run.plan import Plan
from assay.harness.sides import ROLES, Role, declared_noise

# Flags whose paths assay expands (``~``), as it does for ``--out``.
_EXPANDED = ("--model", "--data")


def default_folder(candidate: str) -> Path:
    """Return ``runs/<time>-<candidate>``, for a run of this backend without ``--out``."""
    return RUNS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{file_name(candidate)}"


def open_folder(plan: Plan, path: Path, command: str = "run") -> RunFolder:
    """Begin the run in `path`, or resume it there.

    Args:
        path: the run's folder.
        command: the command that repeats it: "run" or "gate".

    Raises:
        UsageError: `path` holds something else.
    """
    flags = plan.spec.given_flags(FLAGS if command == "gate" else RUN_FLAGS)
    manifest = Manifest(
        **vars(origin_of(plan, shlex.join(["assay", command, *map(_portable, flags)]), new_nonce())),
        run_id=path.resolve().name,
        model=plan.spec.reference.model,
        items_hash=hash_items(plan.items),
        code=_code(plan),
        noise={
            role: plan.backend(role).noise or declared_noise(plan.spec.sides[role], plan.spec.treatment)
            for role in ROLES
        },
    )
    check_stored_reference(manifest)
    folder = RunFolder.open(path, manifest, plan.items)
    _plan_questions(plan, folder)
    return folder


def _portable(word: str) -> str:
    """Make a flag of assay portable; a path may begin with the home folder's ``~`` if assay itself expands it."""
    name, _, path = word.partition("=")
    return f"{name}={shown(Path(path))}" if name in _EXPANDED and Path(path).is_absolute() else portable(word)


def note_changed_kernels(plan: Plan, folder: RunFolder) -> None:
    """Record a failure if a kernel's code changed after the run began: its servers may have run different kernels.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    before, now = folder.manifest().code, _code(plan)
    changed = [role for role in ROLES if before.get(role, {}) != now.get(role, {})]
    if changed:
        parts = sorted({part for part, _ in before.get(changed[0], {}).items() ^ now.get(changed[0], {}).items()})
        error = EvidenceError(
            f"The {changed[0]}'s kernel changed during the run ({', '.join(parts)}), so its servers may have run different "
            "code.",
            do="run again with a new --out, and leave its files alone until the run has ended",
        )
        folder.update(folder.progress().model_copy(update={"failure": FailureResult.of("changed", error)}))


def _code(plan: Plan) -> dict[Role, dict[str, str]]:
    """Hash the code of the kernels of a run, by role."""
    return {role: source_hashes(plan.backend(role).name) for role in ROLES if plan.backend(role).is_kernel}


def _plan_questions(plan: Plan, folder: RunFolder) -> None:
    """Record order and stopping rule of the questions before the first is asked; a resumed run keeps its own."""
    questions, rule = plan.of("accuracy"), plan.rule
    if not questions or folder.read(QUESTION_PLAN) is not None:
        return
    planned = QuestionPlan(
        seed=plan.spec.workload.order_seed,
        order_hash=order_hash(questions),
        most=len(questions),
        population=plan.units,
        margin=rule.margin,
        alpha=rule.alpha,
        regression_alpha=rule.regression_alpha,
    )
    folder.write(QUESTION_PLAN, planned)


def asked_roles(plan: Plan, folder: RunFolder) -> tuple[Role, ...]:
    """Return the roles whose servers are asked. The reference is not, if its answers come from an accepted baseline."""
    return tuple(role for role in plan.roles if role in measured_roles(folder))


def shadowed_role(plan: Plan, folder: RunFolder) -> Role | None:
    """Return the role whose server also runs the other role's backend for the layer diff, or None without a layer diff."""
    return (
        next((role for role in asked_roles(plan, folder) if plan.instrumented(role)), None)
        if plan.has_layer_diff
        else None
    )


def _resuming(folder: RunFolder) -> str:
    return f"{folder.manifest().command} --out={shlex.quote(shown(folder.path.absolute()))}"


@contextmanager
def recorded(folder: RunFolder) -> Iterator[None]:
    """Record a run's duration and any error that ended it. Engine and disk failures end here; Ctrl-C and bugs are raised again."""
    begun = time.monotonic()
    failure: FailureResult | None = None
    try:
        yield
    except EngineError as error:
        failure = FailureResult.of("engine", error)
    except ChangedError as error:
        failure = FailureResult.of("changed", error)
    except EvidenceError as error:
        failure = FailureResult.of("disk", error)
    except KeyboardInterrupt:
        said, do = "The run was interrupted.", f"to resume it: {_resuming(folder)}"
        failure = FailureResult(kind="interrupted", cause="", found=said, do=do, details="")
        raise
    except Exception as error:
        do = "report it, with the traceback above"
        failure = FailureResult(kind="bug", cause="", found=f"A bug in assay: {error!r}", do=do, details="")
        raise
    finally:
        progress = folder.progress()
        seconds = progress.seconds + time.monotonic() - begun
        folder.update(progress.model_copy(update={"seconds": seconds, "failure": failure}))
