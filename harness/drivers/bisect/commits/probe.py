"""The probe in a commit's own process: import its kernel from its worktree, verify its origin, run it, and save the measurement.

python -P -m assay.harness.drivers.bisect.commits.probe TASK.json
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from assay.harness.attention import kernels
from assay.harness.attention.call import KernelRefused
from assay.harness.attention.published import module_of
from assay.harness.checks.observed import Reader
from assay.harness.drivers.bisect.commits.calls import ProbeCall, chosen_calls
from assay.harness.drivers.bisect.commits.state import BisectSpec, CallErrors, Measurement
from assay.harness.errors import AssayError
from assay.harness.files import write_whole
from assay.harness.localize.bounds import bound_of
from assay.harness.localize.diagnose import describe, diagnose
from assay.harness.localize.kernel_runs import KernelRun, run_and_repeat
from assay.harness.schema import Record

# Never imported from a worktree unless the kernel has that name: they are already loaded, and cannot be loaded twice.
_OWN = {"assay", "torch", "numpy", *sys.stdlib_module_names}


class ProbeTask(Record):
    """The task of one process.

    Attributes:
        tree: top of the worktree.
        spec: the question; for accuracy runs, the kernel is imported and not called.
        result: file for the `Measurement`.
        name_bug: look for a hypothesis that fits, and read the kernel; takes seconds.
        reproduce: the command that findings cite.
    """

    tree: Path
    spec: BisectSpec
    result: Path
    name_bug: bool = False
    reproduce: str = ""


def _main() -> None:
    """Run a task in this process, which must be a fresh one. Errors of the kernel are results."""
    task = ProbeTask.model_validate_json(Path(sys.argv[1]).read_text())

    def keep(measured: Measurement) -> None:
        write_whole(task.result, measured.model_dump_json(), durable=False)

    keep(_measure_commit(task, keep))


def _measure_commit(task: ProbeTask, keep: Callable[[Measurement], None]) -> Measurement:
    """Import the kernel and run it on the calls. `keep` receives the result before a wrong kernel is read, which may end it."""
    spec, roots = task.spec, [str(root.resolve()) for root in task.spec.roots(task.tree)]
    module = module_of(spec.kernel)
    _prefer(roots, module.split(".")[0])
    try:
        kernel = kernels.load(spec.kernel)
    except BaseException as error:  # a module may raise anything, even SystemExit
        traceback.print_exc()
        return Measurement(status="import", reason=_said(error.__cause__ or error))
    if outsider := _imported_from_elsewhere(task.tree, roots, module):
        return Measurement(status="import", reason=outsider)
    file = Path(inspect.getfile(sys.modules[module])).resolve()
    origin = str(file.relative_to(task.tree.resolve()))
    if spec.measure_with == "accuracy":
        return Measurement(status="measured", origin=origin)
    calls = chosen_calls(spec.pack, spec.calls)
    try:
        run = run_and_repeat(kernel, [call for call, _ in calls])
    except BaseException as error:
        traceback.print_exc()
        return Measurement(status="raised", reason=_said(error), origin=origin)
    if outsider := _imported_from_elsewhere(task.tree, roots, module):  # it may import more when it first runs
        return Measurement(status="import", reason=outsider)
    findings = tuple(diagnose(run, task.reproduce)) if task.name_bug else ()
    measured = Measurement(status="measured", origin=origin, rows=_rows(run, calls), findings=findings)
    reader = Reader()
    if not reader.wants(findings, run.results):
        return measured
    keep(measured)
    seen = reader.observe(findings, kernel, kernels.declaration(kernel), run.results)
    return measured.model_copy(update={"findings": seen.findings})


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
        if path is not None or (fullname in _OWN and fullname != self._top):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, self._roots)
        # A folder without __init__.py counts as a package only if it is the kernel's: any folder could hide a real package.
        return spec if spec is not None and (spec.loader is not None or fullname == self._top) else None


def _prefer(roots: list[str], top: str) -> None:
    """Import from `roots`, and unload modules that the worktree has versions of."""
    sys.dont_write_bytecode = True  # bytecode is matched by size and second, so it could be another commit's
    finder = _Preferring(roots, top)
    loaded = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    for name in [name for name in loaded if finder.find_spec(name, None) is not None]:
        for module in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[module]
    sys.path[:0] = roots
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()


def _imported_from_elsewhere(tree: Path, roots: Sequence[str], kernel: str) -> str:
    """Describe a module of the kernel's package, or of the worktree, that was imported from elsewhere; empty if there is none."""
    tops = {path.stem for root in roots for path in Path(root).glob("*.py")}
    tops |= {path.parent.name for root in roots for path in Path(root).glob("*/__init__.py")}
    tops = (tops - _OWN) | {kernel.partition(".")[0]}
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] not in tops or not isinstance(loaded, ModuleType):
            continue
        file = getattr(loaded, "__file__", None)
        places = [file] if file else [*getattr(loaded, "__path__", ())]
        inside = [Path(place).resolve().is_relative_to(tree.resolve()) for place in places]
        if not all(inside) or (name == kernel and not file):
            return f"module {name} came from {', '.join(places) or 'nowhere'}, not from this commit's worktree"
    return ""


if __name__ == "__main__":
    _main()
