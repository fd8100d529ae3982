"""The executor that a command was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from assay.harness.sweep.executor import Executor, Needs
from assay.harness.sweep.this_machine import ThisMachine


def executor_of(
    needs: Needs, jobs: int | None = None, ray: str | None = None, runtime_env: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str, str], None] = lambda key, line: None,
) -> Executor:  # fmt: skip
    """Make the executor of this machine, or one on Ray.

    Args:
        needs: what each task needs.
        jobs: most tasks at a time; None for as many as fit.
        ray: address of a cluster, as `on_ray.OnRay` has it; None for this machine.
        runtime_env: environment of Ray's workers.
        say: shows a line of a task: its key, and what it says.

    Raises:
        UsageError: this machine has not what a task needs.
    """
    if not ray:
        return ThisMachine(needs, jobs, say)
    from assay.harness.sweep.on_ray import IN_FLIGHT, OnRay

    return OnRay(ray, runtime_env, jobs or IN_FLIGHT, say)


def without_results(runtime_env: Mapping[str, Any], *folders: Path) -> Mapping[str, Any]:
    """Leave folders of results out of the working folder that travels to workers: no cell reads them, and Ray refuses 512 MiB.

    Args:
        runtime_env: as Ray has it.
        folders: which.
    """
    working = runtime_env.get("working_dir")
    if not isinstance(working, str) or "://" in working:
        return runtime_env
    top = Path(working).resolve()
    inside = [folder.resolve().relative_to(top).as_posix() for folder in folders if top in folder.resolve().parents]
    excludes = dict.fromkeys([*runtime_env.get("excludes", ()), *(f"/{name}/" for name in inside)])
    return {**runtime_env, "excludes": [*excludes]}
