"""A commit's kernel, measured in a separate process: imported from its worktree, its origin verified, run on the calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.matrix import cases
from assay.harness.attention.published import module_of
from assay.harness.checks.observed import Reader
from assay.harness.checks.replay import choose
from assay.harness.drivers.bisect.commits.state import BisectSpec, Measurement
from assay.harness.errors import AssayError
from assay.harness.evidence.pack import read_pack
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import Guard, run_and_repeat
from assay.harness.localize.kernel_runs import KernelRun
from assay.worker import Journal

# Never imported from a worktree unless the kernel has this name: they are already loaded, and cannot be loaded twice.
_OWN = {"assay", "torch", "numpy", *sys.stdlib_module_names}

_Any = TypeVar("_Any")


def chosen_calls(pack: str, limit: int) -> Sequence[AttentionCall]:
    """Make the calls to probe with, identical for every commit.

    Args:
        pack: folder of a replay pack, or empty to use the op-level matrix.
        limit: most calls to use, evenly spread; 0 for all.
    """
    if pack:
        recorded = [case.call for case in choose(read_pack(Path(pack)))]
        calls = sorted(recorded, key=lambda call: (call.layer, call.phase))
        return _spread(calls, limit)
    return [case.make() for case in _spread(cases(seed=0), limit)]


def _spread(these: Sequence[_Any], limit: int) -> Sequence[_Any]:
    """Return at most `limit` of these, evenly spread, or all of them for 0."""
    return [these[i * len(these) // limit] for i in range(limit)] if 0 < limit < len(these) else these


def measure(journal: Journal, tree: str, spec: dict[str, Any], name_bug: bool, reproduce: str) -> Measurement:
    """Measure the kernel of a worktree, as a job of `assay.worker`; errors of the kernel are results.

    A wrong kernel's measurement is written to the journal before the kernel is probed further, which may end the process.
    """
    os.chdir(tree)
    asked, top = BisectSpec(**spec), Path(tree).resolve()
    roots, module = [str(root.resolve()) for root in asked.roots(top)], module_of(asked.kernel)
    _prefer(roots, module.split(".")[0])
    try:
        kernel = kernels.load(asked.kernel)
    except BaseException as error:  # a module may raise anything, even SystemExit
        traceback.print_exc()
        return Measurement(status="import", reason=_said(error.__cause__ or error))
    if outsider := _imported_from_elsewhere(top, roots, module):
        return Measurement(status="import", reason=outsider)
    origin = str(Path(inspect.getfile(sys.modules[module])).resolve().relative_to(top))
    try:
        run = run_and_repeat(kernel, chosen_calls(asked.pack, asked.calls))
    except BaseException as error:
        traceback.print_exc()
        return Measurement(status="raised", reason=_said(error), origin=origin)
    if outsider := _imported_from_elsewhere(top, roots, module):  # its first run may import more
        return Measurement(status="import", reason=outsider)
    findings = tuple(diagnose(run, reproduce)) if name_bug else ()
    measured = Measurement(origin=origin, findings=findings, **_worst(run))
    reader = Reader()
    if reader.wants(findings, run.results):
        journal.write("measured", measurement=measured)
        seen = reader.observe(findings, Guard(kernel), run.results)
        measured = measured.model_copy(update={"findings": seen.findings})
    return measured


def _worst(run: KernelRun) -> dict[str, Any]:
    """Return the largest own error as a multiple of its bound, over all calls and heads; each cell has its own bound."""
    heads = [
        (seen, head, float(times))
        for seen in run.results
        for head, times in enumerate((seen.own / seen.bounds).amax(0))
    ]
    if not heads:
        return {"status": "no call"}
    seen, head, worst = max(heads, key=lambda each: each[2])
    return {"worst": worst, "own": worst * seen.worst_cell[1], "where": f"{describe(seen.call)}, head {head}"}


def _said(error: BaseException) -> str:
    if isinstance(error, AssayError):
        return error.found
    if isinstance(error, KernelRefused):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Preferring(importlib.abc.MetaPathFinder):
    """Finds a worktree's modules before all others, even before those that an editable install puts on ``sys.meta_path``."""

    def __init__(self, roots: list[str], top: str) -> None:
        self._roots, self._top = roots, top

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or (fullname in _OWN and fullname != self._top):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, self._roots)
        # A folder without __init__.py counts as a package only if it is the kernel's: any other could hide a real package.
        return spec if spec is not None and (spec.loader is not None or fullname == self._top) else None


def _prefer(roots: list[str], top: str) -> None:
    """Import from `roots`, and unload modules that also exist in the worktree."""
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
    """Describe a module that should come from the worktree but was imported from elsewhere, or return an empty string."""
    tops = {path.stem for root in roots for path in Path(root).glob("*.py")}
    tops |= {path.parent.name for root in roots for path in Path(root).glob("*/__init__.py")}
    tops = (tops - _OWN) | {kernel.partition(".")[0]}
    for name, loaded in list(sys.modules.items()):
        if name.partition(".")[0] not in tops or not isinstance(loaded, ModuleType):
            continue
        file = getattr(loaded, "__file__", None)
        places = [file] if file else [*getattr(loaded, "__path__", ())]
        inside = [Path(place).resolve().is_relative_to(tree) for place in places]
        if not all(inside) or (name == kernel and not file):
            return f"module {name} came from {', '.join(places) or 'nowhere'}, not from this commit's worktree"
    return ""
