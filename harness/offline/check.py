"""Checking a kernel on the op-level matrix: under which conditions it is wrong, and the name of the bug. No server, no model.

`assay check`, the pytest plugin and a kernel repository's own tests run this.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import INPUTS, AttentionCall, Kernel, KernelRefused, default_device, tensor_of
from assay.harness.attention.interpreter import BFLOAT16_BROKEN
from assay.harness.attention.matrix import DTYPES, HEAD_DIMS, Case, Size
from assay.harness.attention.matrix import cases as cases_of
from assay.harness.attention.matrix_data import excluded
from assay.harness.attention.model_shapes import SHAPES
from assay.harness.attention.noise import FAMILIES, family
from assay.harness.conditions import PHASES, has_cached_prefix
from assay.harness.errors import ExitCode, UsageError
from assay.harness.localize import axes
from assay.harness.localize.diagnose import CALL_REFUSED, STATE_KEPT, TITLES, describe, diagnose
from assay.harness.localize.endurance import endure
from assay.harness.localize.guard import CONTRACT_BROKEN, MAX_REPEATED, Guard, run_guarded, runs_of
from assay.harness.localize.guarded_memory import GuardedKernel
from assay.harness.localize.kernel_runs import CallResult, KernelRun, compute, measure, same_values, worst_of
from assay.harness.localize.over_reads import over_reads
from assay.harness.localize.raised import RAISED
from assay.harness.localize.smallest import smallest_call
from assay.harness.localize.threads import few_threads
from assay.harness.offline.coverage import DECLARABLE, NOTHING, Coverage, advice_on, coverage_of, separating
from assay.harness.offline.early import clearly_wrong, in_order
from assay.harness.offline.watcher import Watcher, watched
from assay.harness.text import percent, two_digits
from assay.harness.verdict import (
    UNEXPLAINED,
    Finding,
    Verdict,
    cause_of,
    exit_code_of,
    html_of,
    kernel_verdict,
    serious,
)

if TYPE_CHECKING:  # importing what reads a wrong kernel takes a third of a second, which a right one does not need
    from assay.harness.offline.observed import Reader, ReadOut

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Other words for a dtype, as engines and PyTorch have them."""
LEAST_COVERED = 0.9
"""Share of the calls of each phase that a kernel must compute, rather than refuse, to pass. What it does not support belongs in
its declaration: there it is a statement, and not a matter of what happened to be refused."""
LEAST_LEFT = 0.1
"""Share of the calls that were asked for that a declaration must leave for a pass."""
CALLS: dict[Size, int] = {"small": 1000, "full": 2000}
"""How often a kernel runs in all: one may become wrong after many calls. What the matrix leaves of them takes at most
`_ENDURANCE_S` seconds."""
_ENDURANCE_S: dict[Size, float] = {"small": 2.0, "full": 20.0}
_ONE_LAYER = 0.8
"""Share of calls in one layer from which on layers are not distinguished, unless the failing calls are those of some layers."""
_ASSERTED_S = 10.0
"""Most seconds in which a kernel is read that fails an assertion on one call."""
_NARROWING_AXES = ("cached prefix", "heads", "head_dim", "dtype", "data", "page")
"""Axes that a diagnosis does not consider: it explains sequences by their lengths and their place in the batch."""


@dataclass(frozen=True)
class Computed:
    """A case that the kernel computed.

    Attributes:
        case: the case.
        fails: whether its own error is out of bounds.
    """

    case: Case
    fails: bool


@dataclass(frozen=True)
class WorstOfMatrix:
    """The case with the largest own error relative to its bound.

    Attributes:
        case: the case.
        own: own error of the cell and head that is worst relative to its bound, relative L1.
        bound: the bound of that cell and head, relative L1.
    """

    case: Case
    own: float
    bound: float

    @property
    def ratio(self) -> float:
        """The own error as a multiple of the bound; above 1 it is out of bounds."""
        return self.own / self.bound


@dataclass(frozen=True, repr=False)
class CheckResult:
    """A kernel's result on a matrix.

    Attributes:
        kernel: its name, as given.
        computed: cases that it computed.
        worst: the case with the largest own error relative to its bound; None if none was computed.
        refused: cases that it refused, with its reasons: not covered. A pass needs `LEAST_COVERED` of the calls of each phase, and
            every value of every axis, of those that it claims. Where it raised on every call with a value that it does not claim
            (`Case.beyond`), that is no more than a refusal.
        excluded: cases that its declaration excludes, and by what, for example "head_dim 80": not run, and not covered.
        broken: cases in which it raised, or returned a shape or dtype that breaks the contract.
        missing: conditions of a pass that were not tested.
        findings: what is wrong, named where a hypothesis fits.
        smallest: the smallest failing call found, in words; empty if none is out of bounds.
        test: the source of a pytest file that shows it; empty if there is none.
        again: a command that repeats the check; empty for a kernel that no command can name.
        seconds: time taken.
        read_out: what was read off the kernel, in how many calls and seconds; None where nothing is serious, or it was not to be
            read. The first serious finding states it.
        coverage: what the computed cases cover, and the gaps.
        traceback: of the first exception that the kernel raised, from its own first frame on; empty if it raised none.
        left_out: cases of the small matrix that were not run, as the kernel was clearly wrong before.
    """

    kernel: str
    computed: tuple[Computed, ...]
    worst: WorstOfMatrix | None
    refused: tuple[tuple[Case, str], ...]
    excluded: tuple[tuple[Case, str], ...]
    broken: tuple[tuple[Case, str], ...]
    missing: tuple[str, ...]
    findings: tuple[Finding, ...]
    smallest: str
    test: str
    again: str
    seconds: float
    read_out: ReadOut | None = None
    coverage: Coverage = NOTHING
    traceback: str = ""
    left_out: tuple[Case, ...] = ()

    def __repr__(self) -> str:
        return f"<CheckResult {self.verdict}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return html_of(self.verdict, self.summary(), self.findings)

    def summary(self) -> str:
        """Summarise in a sentence: what the kernel does wrong if known, how many calls are wrong, and the worst own error."""
        cause = cause_of(self.findings)
        return self.extent(cause.does if cause else "")

    def extent(self, does: str = "") -> str:
        """Write `summary` with other words for what the kernel does wrong; empty to leave them out."""
        tried = len(self.computed) + len(self.broken)
        if self.exit_code == ExitCode.NO_VERDICT:
            verdict = f"No verdict on {self.kernel}: requirements of a pass were not tested"
        elif self.exit_code == ExitCode.PASS:
            verdict = f"{self.kernel} is correct on all {tried} calls"
        elif self.failing:
            of = f"the first {tried} of {tried + len(self.left_out)}" if self.left_out else f"{tried}"
            wrong = f"wrong on {len(self.failing)} of {of} calls"
            verdict = f"{self.kernel} {does}; {wrong}" if does else f"{self.kernel} is {wrong}"
        else:
            verdict = f"{self.kernel} is within its bounds on all {tried} calls, but has serious findings"
        worst = self.worst
        if worst is None:
            return verdict
        if not math.isfinite(worst.own):
            return f"{verdict}; an output is not finite"
        times = f"{two_digits(worst.ratio)} times its bound of {percent(worst.bound)}"
        return f"{verdict}; worst own error {percent(worst.own)}, {times}"

    @property
    def failing(self) -> list[Case]:
        """Cases that are out of bounds or broken."""
        return [*(c.case for c in self.computed if c.fails), *(case for case, _ in self.broken)]

    @property
    def right(self) -> list[Case]:
        """Cases within their bounds."""
        return [c.case for c in self.computed if not c.fails]

    @property
    def axes(self) -> list[axes.Axis]:
        """Results by each axis of the matrix."""
        return axes.by_axis(_conditions(self.failing), _conditions(self.right), _conditions(self.left_out))

    @property
    def where(self) -> str:
        """Values of at most two axes that cover all failing cases and no correct one; empty if there are none, or if what was read
        off the kernel tells which cases fail.
        """
        if self.read_out is not None and self.read_out.whole:
            return ""
        return axes.words(
            axes.confining(_conditions(self.failing), _conditions(self.right), _conditions(self.left_out))
        )

    @property
    def verdict(self) -> Verdict:
        """ "regression" if a finding is more severe than "info", else "inconclusive" if something is missing, else "pass"."""
        return kernel_verdict(self.findings, self.missing)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of ``assay check``: it follows from the verdict."""
        return exit_code_of(self.verdict)


def check(
    kernel: str | Kernel,
    *,
    phases: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    noise: str | None = None,
    size: Size = "small",
    device: str | None = None,
    head_dims: Sequence[int] | None = None,
    like: Sequence[str] | None = None,
    seed: int = 0,
    cases: Sequence[Case] | None = None,
    again: str = "",
    repeats: int = MAX_REPEATED,
    calls: int | None = None,
    read_out: float | Reader | None = None,
    before_reading: Callable[[CheckResult], None] = lambda result: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    watcher: Watcher | None = None,
) -> CheckResult:
    """Run a kernel on the op-level matrix and compare every output with the oracle, within the bound of its call.

    A kernel with serious findings is then read: it is asked on further calls what it computes, and the first of them states it.

    Args:
        kernel: a published name, ``module:function``, or the kernel itself.
        phases: phases to run; None for those that the kernel declares.
        dtypes: for example "bfloat16"; None for those that the kernel declares, of float16, bfloat16 and float32.
        noise: quantisation whose noise is allowed, for example "int8_qk"; None for what the kernel declares.
        size: of the matrix, "small" or "full". A kernel that is clearly wrong is not run on all of the small one.
        device: None for "cuda" if there is a GPU, else "cpu".
        head_dims: head dims that the kernel must compute; None for those that it declares, or else for 64 and 128. Others are then
            tried as well: a kernel that raises on them does not cover them, but must not be wrong.
        like: models whose shapes are added, for example "llama-3-8b"; None for the common ones in the full matrix.
        seed: of the matrix.
        cases: run these instead of the matrix.
        again: a command that repeats the check, for the findings; by default built from the arguments, unless `cases` are
            given.
        repeats: most calls that are repeated, to see whether the kernel is deterministic.
        calls: how often the kernel runs in all, the matrix included: the rest on one cheap call of each phase. None for 1,000, for
            2,000 with the full matrix, and for none but the matrix where `cases` are given.
        read_out: most seconds that reading a wrong kernel takes, 0 not to read it; or what reads it, and keeps that. None for 30 s.
        before_reading: receives the result before a wrong kernel is read, which a kernel that hangs does not survive.
        progress: receives how many times the kernel has run on the matrix, of how many times in all, after each.
        watcher: receives each call, and what is known so far.

    Raises:
        UsageError: no such kernel, phase, dtype, noise, size or device, no case, or a package that the kernel imports is not
            installed.
    """
    start = time.monotonic()
    name, loaded = named(kernel)
    loaded = loaded if watcher is None else watched(loaded, watcher)
    declared = kernels.declaration(loaded)
    if noise:
        _known_family(noise)
    asked = tuple(phases) if phases is not None else declared.phases
    path = name if isinstance(kernel, str) or kernels.is_path(name) else ""
    if path and cases is None and not again:
        again = _command(
            path, phases or (), dtypes or (), noise, size, device, head_dims or (), like or (), seed, calls
        )
    most_runs = calls or 0
    whole = cases is not None or size == "full"
    if cases is None:
        cases = matrix_of(
            declared, phases=phases, dtypes=dtypes, size=size, device=device, head_dims=head_dims, like=like, seed=seed
        )
        most_runs = CALLS[size] if calls is None else calls
    with few_threads(()):
        made = [(case, call) for case in cases if (call := case.make()).phase in asked]
    declared = replace(declared, noise=declared.noise if noise is None else noise)
    excluded = tuple((case, why) for case, call in made if (why := _excluded(declared, case, call)))
    made = [(case, call) for case, call in made if not _excluded(declared, case, call)]
    if not made:
        raise UsageError(
            f"There is no case of {' or '.join(asked)} for {name}"
            + (
                f": its declaration excludes {', '.join(dict.fromkeys(why for _, why in excluded))}."
                if excluded
                else "."
            ),
            "at least one that its declaration does not exclude",
            "choose other cases or phases",
        )

    if watcher is not None:
        watcher.asked(name, [case for case, _ in made], again)
    within = GuardedKernel(loaded)
    counted = _counted(within, runs_of(len(made), repeats), progress)
    guard = Guard(counted, declared)
    with few_threads([call for _, call in made]):
        case_of = {id(call): case for case, call in made}

        def computed_one(result: CallResult) -> None:
            if watcher is not None:
                watcher.computed(case_of[id(result.call)], result.fails, *result.judged_cell)

        def enough(results: Sequence[CallResult]) -> bool:
            return (
                not whole
                and results[-1].fails
                and clearly_wrong(
                    [(case_of[id(one.call)], one) for one in results], guard.runs, [case for case, _ in made]
                )
            )

        run = run_guarded(
            guard, [call for _, call in made], repeats, computed_one, None if whole else in_order(made), enough
        )
        run_on = {
            id(call) for call in (*(one.call for one in run.results), *run.delegated, *(one for one, _ in run.refused))
        }
        left_out = tuple(case for case, call in made if id(call) not in run_on)
        made = [(case, call) for case, call in made if id(call) in run_on]
        computed = tuple(Computed(case_of[id(o.call)], o.fails) for o in run.results)
        refused = tuple((case_of[id(call)], why) for call, why in run.refused)
        claimed = _claims([one.case for one in computed])
        named_dtypes = dtypes is not None or declared.dtypes is not None
        skipped = {case.name for case, why in refused if why == BFLOAT16_BROKEN and not named_dtypes}
        broken = tuple(
            (case, why)
            for case, why in refused
            if why in guard.breaches and (claimed(case) or not why.startswith(RAISED))
        )
        spared = tuple(one for one in refused if one not in broken)
        findings = _bugs(run, case_of, left_out, again) + _breaches(broken, made, computed, left_out, again)
        if guard.failed_repeats:
            call, why = guard.failed_repeats[0]
            where = f"{len(guard.failed_repeats)} calls, when repeated"
            findings.append(breach(why, where, (f"for example {describe(call)}",), again))
        if guard.shared:
            how = "returns the memory of an earlier output, which its caller may still hold"
            findings.append(
                breach(how, f"{len(guard.shared)} calls", (f"for example {describe(guard.shared[0])}",), again)
            )
        if within.written:
            call, how = min(within.written, key=lambda one: (one[0].k.numel(), one[0].q.numel()))
            number = len({id(call) for call, _ in within.written})
            findings.append(_outside(how, f"{number} calls", call, again))
        if read := over_reads(within, run.results):
            findings.append(_outside(read[1], "calls that are out of bounds", read[0], again))
        if not serious(findings):
            plain = Guard(loaded, declared)  # without guards around each tensor, which take longer than a small call
            endured = endure(plain, run.results, guard.runs, most_runs, _ENDURANCE_S[size])
            guard.runs = endured.runs
            if endured.call is not None:
                findings.append(_not_endured(endured.call, endured.how, again))
        runs, worst = guard.runs, worst_of(run.results)
    result = CheckResult(
        kernel=name,
        computed=computed,
        worst=None if worst is None else WorstOfMatrix(case_of[id(worst.call)], *worst.worst_cell),
        refused=spared,
        excluded=excluded,
        coverage=coverage_of(
            [one.call for one in run.results],
            [one.case for one in computed],
            spared,
            excluded,
            _declined(declared, dtypes, head_dims),
            left_out,
            runs,
        ),
        broken=broken,
        missing=tuple(
            _missing(asked, declared, run)
            + _hardly_declared(len(excluded), len(made) + len(left_out))
            + _refused(
                [case for case, _ in made if not (case.beyond or case.name in skipped)], [one.case for one in computed]
            )
        ),
        findings=tuple(findings),
        smallest="",
        test="",
        again=again,
        seconds=time.monotonic() - start,
        traceback=next((guard.tracebacks[why] for _, why in broken if why in guard.tracebacks), ""),
        left_out=left_out,
    )
    if watcher is not None:
        watcher.stands(result)
    with few_threads([call for _, call in made]):
        smallest = smallest_call(guard, run, findings, path)
    findings = smallest.named_in(findings)
    result = replace(
        result, findings=_outside_first(findings), smallest=smallest.words, test=smallest.test(findings),
        seconds=time.monotonic() - start,
    )  # fmt: skip
    if watcher is not None:
        watcher.stands(result)
    if not serious(findings):
        return result
    from assay.harness.offline.observed import READ_OUT_S, Reader

    reader = read_out if isinstance(read_out, Reader) else Reader(READ_OUT_S if read_out is None else read_out)
    if not reader.wants(findings, run.results):
        return result
    before_reading(result)
    observed = reader.observe(findings, loaded, guard.assay, run.results)
    return replace(
        result, findings=_outside_first(observed.findings), test=smallest.test(observed.findings), read_out=observed.read,
        seconds=time.monotonic() - start,
    )  # fmt: skip


def assert_correct(
    kernel: str | Kernel, call: AttentionCall, *, noise: str | None = None, watcher: Watcher | None = None
) -> None:
    """Raise unless a kernel is correct on a call: its own error against the oracle is within the bound of the call.

    A kernel that is wrong is read, for at most 10 seconds; the message states what it was observed to
    compute, if that gives its output on this call.

    Args:
        kernel: a published name, ``module:function``, or the kernel itself.
        call: the call.
        noise: quantisation whose noise is allowed, for example "int8_qk"; None for what the kernel declares.
        watcher: receives each call.

    Raises:
        AssertionError: the error is out of bounds, and the message names the bug where a hypothesis fits; or the kernel writes
            to its inputs, or outside of its tensors.
        AssayError: its output breaks the contract.
        UsageError: no such kernel or noise, or a package that the kernel imports is not installed.
        KernelRefused: the kernel refuses the call.
    """
    __tracebackhide__ = True  # pytest shows the test and the kernel
    name, loaded = named(kernel)
    loaded = loaded if watcher is None else watched(loaded, watcher)
    if noise:
        _known_family(noise)
    declared = kernels.declaration(loaded)
    declared = replace(declared, noise=declared.noise if noise is None else noise)
    within = GuardedKernel(loaded)
    given = call.clone()
    result = measure(call, compute(within, given), declared.noise)
    changed = [name for name in INPUTS if not same_values(getattr(given, name), getattr(call, name))]
    if changed:
        raise AssertionError(
            f"{name} on {describe(call)}: the kernel writes to its inputs: {', '.join(changed)}; work on copies of them"
        )
    if within.written:
        raise AssertionError(f"{name} on {describe(call)}: the kernel {within.written[0][1]}")
    if result.fails:
        [bug, *_] = diagnose(KernelRun((result,)))
        own, bound = result.worst_cell
        observed = _asserted().sentence(loaded, declared, result)
        raise AssertionError(
            f"{name} on {describe(call)}: own error {percent(own)}; noise explains at most "
            f"{percent(bound)}; {bug.diagnosis.rstrip('.')}{observed and '; observed: '}{observed}"
        )


@cache
def _asserted() -> Reader:
    """Make the reader of kernels that fail an assertion, which keeps what it read."""
    from assay.harness.offline.observed import Reader

    return Reader(_ASSERTED_S)


def named(kernel: str | Kernel) -> tuple[str, Kernel]:
    """Return a kernel and its name: ``module:function`` if it can be imported that way, else its own name.

    Raises:
        UsageError: no such kernel.
    """
    if isinstance(kernel, str):
        return kernel, kernels.find("", kernel)
    module, name = getattr(kernel, "__module__", ""), getattr(kernel, "__qualname__", type(kernel).__name__)
    path = f"{module}:{name}"
    try:
        importable = bool(module) and module != "__main__" and kernels.load(path) is kernel
    except KernelRefused:
        importable = False
    return (path if importable else name), kernel


def matrix_of(
    declared: kernels.Declaration,
    *,
    phases: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    size: Size = "small",
    device: str | None = None,
    head_dims: Sequence[int] | None = None,
    like: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Case]:
    """List the cases of `check` for a kernel with this declaration, with the same arguments.

    Raises:
        UsageError: no such phase, dtype, size, device or model, or none that is both asked for and declared.
    """
    return matrix(
        declared.phases if phases is None else phases,
        dtypes=declared.dtypes if dtypes is None else dtypes,
        size=size,
        device=device,
        head_dims=declared.head_dims if head_dims is None else head_dims,
        like=like,
        seed=seed,
        head_dims_v=declared.head_dims_v,
        prefix=declared.prefix,
    )


def _declined(
    declared: kernels.Declaration,
    dtypes: Sequence[torch.dtype | str] | None,
    head_dims: Sequence[int] | None,
) -> tuple[str, ...]:
    """List what a declaration leaves out of the usual matrix, where nothing else is asked for: "float32", "head_dim 128"."""
    every = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    kinds = (
        [] if declared.dtypes is None or dtypes is not None else [one for one in every if one not in declared.dtypes]
    )
    dims = declared.head_dims if head_dims is None else None
    left = [f"head_dim {dim}" for dim in HEAD_DIMS if dims is not None and dim not in dims]
    return (*kinds, *left, *["a cached prefix"] * (not declared.prefix))


def matrix(
    phases: Sequence[str],
    *,
    dtypes: Sequence[torch.dtype | str] | None = None,
    size: Size = "small",
    device: str | None = None,
    head_dims: Sequence[int] | None = None,
    like: Sequence[str] | None = None,
    seed: int = 0,
    head_dims_v: Sequence[int] = (),
    prefix: bool = True,
) -> list[Case]:
    """List the cases of `check` for a kernel without a declaration, with the same arguments.

    `head_dims_v` are head dims of v besides that of q and k; without `prefix`, no call has a cached prefix.

    Raises:
        UsageError: no such phase, dtype, size, device or model.
    """
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    words = [str(dtype).removeprefix("torch.") for dtype in (known if dtypes is None else dtypes)]
    named = [_SHORT.get(word, word) for word in words]
    of: tuple[tuple[str, Sequence[str], Sequence[str] | Mapping[str, object]], ...] = (
        ("phase", phases, PHASES),
        ("dtype", named, known),
        ("size", [size], ("small", "full")),
        ("model", like or (), SHAPES),
    )
    for what, values, expected in of:
        for value in values:
            _one_of(what, value, expected)
    on, dims = checked_device(device), None if head_dims is None else tuple(head_dims)
    return cases_of(tuple(phases), on, [known[one] for one in named], seed, size, dims, head_dims_v, like, prefix)


def checked_device(device: str | None) -> str:
    """Check that a device of PyTorch is here, and return it: the one named, or the default.

    Raises:
        UsageError: it is neither the CPU nor a GPU, or there is no such GPU.
    """
    if device is None:
        return default_device()
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(
            f"The device is {device!r}.", "cpu or cuda, or cuda:N for one of several GPUs", "name one of these"
        )
    if device.startswith("cuda") and default_device() == "cpu":
        raise UsageError(f"The device is {device}, but there is no GPU.", "cpu", "omit the device")
    if device.startswith("cuda:") and int(device[5:]) >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"The device is {device}, but there are {count} GPUs.", f"cuda:0 to cuda:{count - 1}", "name one"
        )
    return device


def _counted(kernel: Kernel, total: int, progress: Callable[[int, int], None]) -> Kernel:
    """Wrap the kernel to report after each of its first `total` runs how many there were."""
    runs = itertools.count(1)

    def counted(call: AttentionCall) -> Tensor:
        try:
            return tensor_of(kernel(call))
        finally:
            if (done := next(runs)) <= total:
                progress(done, total)

    return counted


def _excluded(declared: kernels.Declaration, case: Case, call: AttentionCall) -> str:
    """Explain why a declaration does not cover a call; empty if it does."""
    return excluded(family(declared.noise), case.condition.get("data", "")) or declared.excludes(call)


def _claims(computed: Sequence[Case]) -> Callable[[Case], bool]:
    """Return a test: a kernel claims a case if it computed others of its phase with each value that no kernel claims by itself."""
    seen = {(case.condition["phase"], axis, case.condition[axis]) for case in computed for axis in case.beyond}
    return lambda case: all((case.condition["phase"], axis, case.condition[axis]) in seen for axis in case.beyond)


def _known_family(noise: str) -> None:
    try:
        family(noise)
    except ValueError:
        parts = 'or parts such as "k:int8-token,v:e4m3-head"'
        raise UsageError(
            f"The noise is {noise!r}.", f"one of {', '.join(filter(None, FAMILIES))}, {parts}", "choose another noise"
        ) from None


def _one_of(what: str, value: str, known: Sequence[str] | Mapping[str, object]) -> None:
    if value not in known:
        raise UsageError(f"The {what} is {value!r}.", f"one of {', '.join(known)}", f"choose another {what}")


def _command(
    path: str, phases: Sequence[str], dtypes: Sequence[torch.dtype | str], noise: str | None, size: str,
    device: str | None, head_dims: Sequence[int], like: Sequence[str], seed: int, calls: int | None,
) -> str:  # fmt: skip
    words = ["assay", "check", path]
    words += [word for phase in phases for word in ("--phase", phase)]
    words += [word for dtype in dtypes for word in ("--dtype", str(dtype).removeprefix("torch."))]
    words += [word for dim in head_dims for word in ("--head-dim", str(dim))]
    words += [word for model in like for word in ("--like", model)]
    for flag, value, usual in (
        ("noise", noise, None),
        ("size", size, "small"),
        ("device", device, None),
        ("seed", seed, 0),
        ("calls", calls, None),
    ):
        words += [f"--{flag}", str(value)] * (value != usual)
    return shlex.join(words)


def _conditions(chosen: Sequence[Case]) -> list[dict[str, str]]:
    return [case.condition for case in chosen]


def _bugs(run: KernelRun, case_of: Mapping[int, Case], left_out: Sequence[Case], again: str) -> list[Finding]:
    """Diagnose computed cases. Unexplained errors are diagnosed again on the cases of the failing axis values alone."""
    conditions = [(result, case_of[id(result.call)].condition) for result in run.results]
    failing = [condition for result, condition in conditions if result.fails]
    right = [condition for result, condition in conditions if not result.fails]
    exact = axes.confining(failing, right, _conditions(left_out))
    if not any(axis.name == "layer" for axis in exact):
        conditions = list(zip(_in_one_layer([one for one, _ in conditions]), (c for _, c in conditions), strict=True))
        run = replace(run, results=tuple(result for result, _ in conditions))
    findings = [f for f in diagnose(run, again) if f.id != CALL_REFUSED]
    if not any(f.id == UNEXPLAINED for f in findings):
        return findings
    for only in (exact, axes.narrowing(failing, right, _NARROWING_AXES, _conditions(left_out))):
        if not only:
            continue
        there = KernelRun(tuple(result for result, condition in conditions if axes.holds(only, condition)))
        named = [f for f in diagnose(there, again) if f.id != CALL_REFUSED]
        if not any(f.id == UNEXPLAINED for f in named):
            return [finding.model_copy(update={"only": axes.words(only)}) for finding in named]
    return findings


def _in_one_layer(results: Sequence[CallResult]) -> list[CallResult]:
    """Move all calls to the layer of most of them, unless the calls are spread over layers.

    A diagnosis looks at each layer by itself, and so would see in a few calls of another layer a bug of their own.
    """
    [(layer, most)] = Counter(result.call.layer for result in results).most_common(1) or [(0, 0)]
    if most < _ONE_LAYER * len(results):
        return list(results)
    return [one if one.call.layer == layer else one.updated(call=one.call.with_spec(layer=layer)) for one in results]


def _breaches(
    broken: Sequence[tuple[Case, str]],
    made: Sequence[tuple[Case, AttentionCall]],
    computed: Sequence[Computed],
    left_out: Sequence[Case],
    again: str,
) -> list[Finding]:
    """Make one finding for each kind of exception, and one for outputs that break the contract."""
    others = _conditions([one.case for one in computed])  # not those that it raised on too, and does not claim
    kinds: dict[str, list[tuple[Case, str]]] = {}
    for case, why in broken:
        kinds.setdefault(why.partition(":")[0], []).append((case, why))
    call_of = {case.name: call for case, call in made}
    found = []
    for some in kinds.values():
        names = {case.name for case, _ in some}
        only = axes.words(axes.confining(_conditions([case for case, _ in some]), others, _conditions(left_out)))
        where = f"{len(some)} of {len(made)} calls" + (f", only where {only}" if only else "")
        smallest = min((call_of[name] for name in names), key=lambda call: (call.k.numel(), call.q.numel()))
        found.append(breach(some[0][1], where, (f"smallest such call: {describe(smallest)}",), again))
    return found


def _outside(how: str, where: str, call: AttentionCall, again: str) -> Finding:
    """Make the finding that a kernel accesses memory outside of its tensors."""
    return breach(how, where, (f"for example {describe(call)}",), again).model_copy(
        update={"title": "memory outside of its tensors", "does": how}
    )


def _outside_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Order the findings: an access outside comes before an error that neither a hypothesis nor the read-out explains."""
    first = [finding for finding in findings if finding.id == CONTRACT_BROKEN and finding.does]
    unread = bool(findings) and findings[0].id == UNEXPLAINED and not findings[0].operator
    return (*first, *(finding for finding in findings if finding not in first)) if unread else tuple(findings)


def _not_endured(call: AttentionCall, how: str, again: str) -> Finding:
    """Make the finding that a kernel became wrong after many runs."""
    return Finding(
        id=STATE_KEPT, title=TITLES[STATE_KEPT], severity="serious", where=f"{call.phase}, after many runs",
        diagnosis=f"the kernel {how}", evidence=(f"the call: {describe(call)}",), reproduce=again,
    )  # fmt: skip


def breach(how: str, where: str, evidence: tuple[str, ...], again: str) -> Finding:
    """Make the finding that a kernel broke its contract; `how` follows "the kernel"."""
    return Finding(
        id=CONTRACT_BROKEN, title="kernel contract broken", severity="serious", where=where, diagnosis=f"the kernel {how}",
        evidence=evidence, reproduce=again,
    )  # fmt: skip


def _missing(asked: Sequence[str], declared: kernels.Declaration, run: KernelRun) -> list[str]:
    """List conditions that were not tested: every phase, with a cached prefix and (extend only) without."""
    calls = [result.call for result in run.results]
    found = []
    for phase in asked:
        cached = [all(call.prefixes) for call in calls if call.phase == phase]
        seen = {has_cached_prefix(call.prefixes) for call in calls if call.phase == phase}
        if not cached:
            phases = declared.phases
            why = "" if phase in phases else f" (the kernel declares {' and '.join(phases)} only)"
            found.append(f"no {phase} call was computed{why}")
            continue
        if True not in seen and declared.prefix:
            found.append(f"no {phase} call with a cached prefix was computed")
        if phase == "extend" and all(cached):
            found.append("no extend call without a cached prefix was computed")
    return found


def _hardly_declared(excluded: int, left: int) -> list[str]:
    """Report what a declaration excludes, if that is nearly everything."""
    asked = excluded + left
    hardly = left < LEAST_LEFT * asked
    return [f"its declaration excludes {excluded} of {asked} calls that were asked for"] * hardly


def _refused(made: Sequence[Case], computed_cases: Sequence[Case]) -> list[str]:
    """List what a kernel refused too much of: values of an axis without a computed call, and phases with too few."""
    computed = [case.condition for case in computed_cases if not case.beyond]
    found = []
    for phase in dict.fromkeys(case.condition["phase"] for case in made):
        asked = [case.condition for case in made if case.condition["phase"] == phase]
        there = [condition for condition in computed if condition["phase"] == phase]
        if not there:
            continue  # `_missing` says so
        if len(there) < LEAST_COVERED * len(asked):
            found.append(
                f"only {len(there)} of {len(asked)} {phase} calls were computed; a pass needs {percent(LEAST_COVERED)}"
            )
        lost = [condition for condition in asked if condition not in there]
        only = separating(lost, there) if lost else []
        if len(only) == 1 and only[0].name in DECLARABLE:
            found.append(_every(phase, only[0].name, list(only[0].failing), list(only[0].right)))
            continue
        for axis in asked[0]:
            values = dict.fromkeys(condition[axis] for condition in asked)
            none = [value for value in values if value not in {condition[axis] for condition in there}]
            if none:
                found.append(_every(phase, axis, none, [value for value in values if value not in none]))
    return found


def _every(phase: str, axis: str, refused: Sequence[str], computed: Sequence[str]) -> str:
    what = "a cached prefix" if axis == "cached prefix" else f"{axis} {' or '.join(refused)}"
    return f"every {phase} call with {what} was refused{advice_on(axis, computed)}"
