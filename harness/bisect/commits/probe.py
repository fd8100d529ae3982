"""The probe in a commit's own process: import its kernel from its worktree, verify its origin, run it, and save the measurement.

The process is forked from one that has imported torch and assay but no kernel, so it pays for the kernel's imports only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from assay.harness.attention import kernels
from assay.harness.attention.call import KernelRefused, default_device
from assay.harness.attention.published import module_of
from assay.harness.bisect.commits.probe_calls import ProbeCall, read_calls
from assay.harness.bisect.commits.state import CallErrors, Measurement
from assay.harness.errors import AssayError
from assay.harness.files import write_whole
from assay.harness.localize.bounds import bound_of
from assay.harness.localize.diagnose import describe, diagnose
from assay.harness.localize.kernel_runs import KernelRun, run_and_repeat
from assay.harness.offline.observed import Reader

_OWN = {"torch", "numpy", *sys.stdlib_module_names}
"""Never imported from a worktree unless the kernel has that name: they are already loaded, and cannot be loaded twice."""


@dataclass(frozen=True)
class ProbeTask:
    """The task of one process.

    Attributes:
        tree: top of the worktree.
        sources: folders in it that modules are imported from, relative to it.
        kernel: ``module:function``.
        calls: file of the calls; None to import the kernel and nothing else.
        result: file for the `Measurement`.
        log: file that all output is appended to.
        name_bug: look for a hypothesis that fits, and read the kernel; takes seconds.
        reproduce: the command that findings cite.
        environment: variables of the process: which GPUs it sees.
    """

    tree: Path
    sources: tuple[str, ...]
    kernel: str
    calls: Path | None
    result: Path
    log: Path
    name_bug: bool = False
    reproduce: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def main(task: ProbeTask) -> None:
    """Run a task in this process, which must be a fresh one. Errors of the kernel are results."""
    os.setsid()
    os.environ.update(task.environment)  # nothing has asked for a GPU yet
    threading.Thread(target=_end_with_parent, daemon=True).start()
    out = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    # A forked process inherits its parent's random state: every probe of a randomised kernel would draw the same numbers.
    random.seed()
    np.random.seed()
    torch.seed()
    os.chdir(task.tree)

    def keep(measured: Measurement) -> None:
        write_whole(task.result, measured.model_dump_json(), durable=False)

    keep(_measure_commit(task, keep))


def _end_with_parent() -> None:
    """End this process and its children when the bisection ends, however it ends: a kernel may never return."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _measure_commit(
    task: ProbeTask, before_reading: Callable[[Measurement], None] = lambda measured: None
) -> Measurement:
    """Import the kernel and run it on the calls. `before_reading` receives the result before a wrong kernel is read."""
    roots = [str((task.tree / source).resolve()) for source in task.sources if (task.tree / source).is_dir()]
    _prefer(roots, module_of(task.kernel).split(".")[0])
    try:
        kernel = kernels.load(task.kernel)
    except BaseException as error:  # a module may raise anything, even SystemExit
        traceback.print_exc()
        return Measurement(status="import", reason=_said(error.__cause__ or error))
    outsider = _imported_from_elsewhere(task.tree, roots, task.kernel)
    if outsider:
        return Measurement(status="import", reason=outsider)
    origin = _origin(task.tree, sys.modules[module_of(task.kernel)])
    if task.calls is None:
        return Measurement(status="measured", origin=origin)
    calls = read_calls(task.calls, default_device())
    try:
        run = run_and_repeat(kernel, [call for call, _ in calls])
    except BaseException as error:
        traceback.print_exc()
        return Measurement(status="raised", reason=_said(error), origin=origin)
    outsider = _imported_from_elsewhere(task.tree, roots, task.kernel)  # a kernel may import more when it first runs
    if outsider:
        return Measurement(status="import", reason=outsider)
    findings = tuple(diagnose(run, task.reproduce)) if task.name_bug else ()
    measured = Measurement(
        status="measured", origin=origin, rows=_rows(run, calls), delegated=len(run.delegated),
        refused=len(run.refused), findings=findings,
    )  # fmt: skip
    reader = Reader()
    if not reader.wants(findings, run.results):
        return measured
    before_reading(measured)
    seen = reader.observe(findings, kernel, kernels.declaration(kernel), run.results)
    return measured.model_copy(update={"findings": seen.findings, "operator": seen.clauses})


def _rows(run: KernelRun, calls: Sequence[ProbeCall]) -> tuple[CallErrors, ...]:
    number = {id(call): i for i, (call, _) in enumerate(calls)}
    rows = []
    for seen in run.results:
        i = number[id(seen.call)]
        _, bound = seen.worst_cell
        # Cells have bounds of their own: all as if they had that of the worst.
        own = (seen.own / seen.bounds).amax(0) * bound
        rows.append(
            CallErrors(
                number=i, layer=seen.call.layer, call=describe(seen.call), condition=calls[i][1],
                own=tuple(own.tolist()), bound=bound,
                rounding=bound_of(seen.call) if seen.noise else bound,
            )
        )  # fmt: skip
    return tuple(rows)


def _said(error: BaseException) -> str:
    if isinstance(error, AssayError):
        return error.found
    if isinstance(error, KernelRefused):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Preferring(importlib.abc.MetaPathFinder):
    """Finds a worktree's modules first, even ahead of what an editable install puts on ``sys.meta_path``."""

    def __init__(self, roots: list[str], top: str) -> None:
        self._roots, self._top = roots, top

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None:
            if fullname in _OWN and fullname != self._top:
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, self._roots)
            # A folder without __init__.py counts as a package only if it is the kernel's: any folder could hide a real package.
            return spec if spec is not None and (spec.loader is not None or fullname == self._top) else None
        if all(_inside(entry, self._roots) for entry in path):
            return importlib.machinery.PathFinder.find_spec(fullname, list(path))
        return None


def _prefer(roots: list[str], top: str) -> None:
    """Import from `roots` rather than the working directory, and unload modules that the worktree has versions of."""
    sys.dont_write_bytecode = True  # bytecode is matched by size and second, so it could be another commit's
    finder = _Preferring(roots, top)
    loaded = {name.partition(".")[0] for name in sys.modules}
    for name in loaded - {"__main__", "__mp_main__"}:
        if finder.find_spec(name, None) is not None:
            for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
                del sys.modules[module]
    sys.path[:] = roots + [entry for entry in sys.path if entry and Path(entry) != Path.cwd()]
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()


def _imported_from_elsewhere(tree: Path, roots: Sequence[str], kernel: str) -> str:
    """Describe a module of the kernel's package, or of the worktree, that was imported from elsewhere; empty if there is none."""
    module = module_of(kernel)
    tops = {path.stem for root in roots for path in Path(root).iterdir() if path.suffix == ".py"}
    tops |= {path.parent.name for root in roots for path in Path(root).glob("*/__init__.py")}
    tops = (tops - _OWN) | {module.partition(".")[0]}
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] not in tops or not isinstance(loaded, ModuleType) or name == "__mp_main__":
            continue
        file = getattr(loaded, "__file__", None)
        places = [file] if file else [*getattr(loaded, "__path__", ())]
        if any(not _inside(place, [str(tree)]) for place in places) or (name == module and not file):
            place = file or ", ".join(places)
            return f"module {name} came from {place or 'nowhere'}, not from this commit's worktree"
    return ""


def _origin(tree: Path, module: ModuleType) -> str:
    file: Any = inspect.getfile(module)
    return str(Path(file).resolve().relative_to(tree.resolve()))


def _inside(place: str, roots: Sequence[str]) -> bool:
    path = Path(place).resolve()
    return any(path.is_relative_to(Path(root).resolve()) for root in roots)
