"""Checks a kernel on the op-level matrix, without a server or a model: finds the conditions of its errors and names the bug.

`assay check`, the pytest plugin and a kernel repository's own tests run this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.kernels import exits_raised
from assay.harness.attention.matrix import Case, Size
from assay.harness.attention.matrix_data import excluded
from assay.harness.attention.noise import family
from assay.harness.attention.shapes import Shape, shape_of
from assay.harness.checks.check_findings import MatrixRun, keeps_state, not_endured, outside_first
from assay.harness.checks.coverage import coverage_of
from assay.harness.checks.early import clearly_wrong, first_ones, in_order
from assay.harness.checks.kernel_matrix import (
    MatrixOptions,
    command_of,
    declared_with,
    declined,
    matrix_of,
    named,
    narrowed,
)
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_result import CaseWhy, KernelResult, MeasuredCall
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.diagnose import STATE_KEPT, diagnose
from assay.harness.localize.experiment import (
    NOTHING_TRIED,
    Experiments,
    agreeing,
    experiment,
    known_of_wrong,
    standing,
)
from assay.harness.localize.faults import OUTPUT, Came, Fault, WrongOutputs
from assay.harness.localize.guard import MAX_REPEATED, Guard, endure, run_calls
from assay.harness.localize.kernel_runs import CallResult, KernelRun, measure, worst_of
from assay.harness.localize.lab import Lab, Place, drawn_call
from assay.harness.localize.lse import LSE_FINDINGS
from assay.harness.localize.shrink import smallest_call
from assay.harness.localize.threads import budget_clock, few_threads
from assay.harness.text import percent
from assay.harness.verdict import Finding, serious
from assay.worker import UNREAD, Journal

if TYPE_CHECKING:  # importing the read-out takes a third of a second, and a correct kernel does not need it
    from assay.harness.checks.observed import Reader

CALLS: dict[Size, int] = {"small": 1000, "full": 2000}
"""Total number of runs of a kernel, since it may become wrong after many calls. The runs after the matrix take at most
`_ENDURANCE_S` seconds."""
_ENDURANCE_S: dict[Size, float] = {"small": 2.0, "full": 20.0}
# Most seconds of a read-out for a kernel that fails an assertion on one call.
_ASSERTED_S = 10.0
# Most seconds, on `budget_clock`, for finding the condition of one fault; failing calls to start from; and most faults to
# explore.
_EXPERIMENTS_S, _BASES, _MOST_FAULTS = 10.0, 6, 3


@dataclass(frozen=True)
class _Task:
    """A kernel, and the calls on which it is checked.

    Attributes:
        path: the path by which a command or a test imports the kernel, or an empty string if it cannot be imported.
        declared: its declaration, with the allowed noise.
        asked: the requested phases.
        made: the cases that its declaration does not exclude, with their calls.
        excluded: the cases that it excludes, and by what.
        whole: whether to make all calls even if the kernel is clearly wrong.
        runs: the total number of runs of the kernel.
        again: a command that repeats the check.
        quick: the only dtype and head_dim of a quick check, or an empty string for any other check.
    """

    name: str
    path: str
    kernel: Kernel
    declared: Declaration
    asked: tuple[str, ...]
    made: Sequence[tuple[Case, AttentionCall]]
    excluded: tuple[tuple[Case, str], ...]
    whole: bool
    runs: int
    again: str
    quick: str

    @property
    def calls(self) -> list[AttentionCall]:
        return [call for _, call in self.made]


def check(
    kernel: str | Kernel,
    *,
    noise: str | None = None,
    case: str | None = None,
    cases: Sequence[Case] | None = None,
    again: str = "",
    repeats: int = MAX_REPEATED,
    calls: int | None = None,
    read_out: float | Reader | None = None,
    journal: Journal = UNREAD,
    **options: Unpack[MatrixOptions],
) -> KernelResult:
    """Run a kernel on the op-level matrix in this process; see `assay.harness.checks.jobs.check`.

    Args:
        kernel: see there, like `noise`, `case`, `calls`, and `options`.
        cases: run these instead of the matrix.
        again: a command that repeats the check, for the findings; by default built from the arguments, unless `cases` are
            given.
        repeats: most calls to repeat, to test whether the kernel is deterministic.
        read_out: most seconds for the read-out of a wrong kernel, 0 to skip both the read-out and the experiments, or a reader,
            which keeps the read-out. None means 30 s.
        journal: receives each call, and the results so far, as the events of `assay.harness.checks.jobs`.

    Raises:
        TypeError: no such option.
        UsageError: see there.
    """
    start = time.monotonic()
    task = _task(kernel, options, noise, case, cases, again, calls)
    guard = Guard(task.kernel, task.declared, journal)
    journal.write("asked", kernel=task.name, cases=len(task.made), again=task.again)
    with few_threads(task.calls):
        examined = _examined(task, guard, repeats, journal)
        findings = examined.findings()
        seconds, late = _ENDURANCE_S[options.get("size", "small")], None
        if not serious(findings) and (wrong := endure(guard, examined.run.results, task.runs, seconds)):
            findings.append(not_endured(*wrong, task.again))
            late = wrong[0]
        result = _result(task, examined, findings, options)
        run, other, read = examined.run, examined.other, NOTHING_TRIED
        known = not isinstance(read_out, float | int | None) and read_out.knows(findings)
        tries = read_out != 0 and not known and len(task.made) > 1
        if tries and run.results and examined.faults and not _changes(run.results):
            journal.write("stands", result=result, reading=False)
            came = [(shape, what) for shape, _, what in examined.came]
            experiments = explore(guard, task.calls, came, journal, examined.faults)
            first = next(iter(experiments.values()))
            if other is not None and first.place is not None:  # the simplest
                other = drawn_call(first.place.shape, str(other[0].q.device)), other[1]
            result = result.model_copy(update={"findings": tuple(examined.findings(experiments)), **first.said})
            read = experiments.get(OUTPUT, NOTHING_TRIED)
    result = concluded(result, guard, run, task.path, read_out, journal, read, late, other)
    return result.model_copy(update={"seconds": time.monotonic() - start})


def _changes(results: Sequence[CallResult]) -> bool:
    """Return True if a call was correct at first and wrong later, or wrong by chance: no condition on a call describes that."""
    changed = [(max(result.late, result.repeat), result) for result in results if result.late or result.repeat]
    return any(not result.fails and off > result.limits.largest_bound for off, result in changed)


def concluded(
    result: KernelResult,
    guard: Guard,
    run: KernelRun,
    path: str,
    read_out: float | Reader | None,
    journal: Journal,
    experiments: Experiments = NOTHING_TRIED,
    late: AttentionCall | None = None,
    other: tuple[AttentionCall, Fault] | None = None,
) -> KernelResult:
    """Add the smallest failing call and the read-out of a wrong kernel to a result.

    Args:
        result: the result without either.
        guard: the kernel.
        run: its results.
        path: the path by which a test imports it, or an empty string if it cannot be imported.
        read_out: see `check`.
        journal: receives the result before each step, since the kernel may end the process.
        experiments: the results of experiments on the kernel.
        late: a call on which it became wrong after many runs.
        other: see `smallest_call`.
    """
    journal.write("stands", result=result, reading=False)
    if not serious(result.findings):
        return result
    run = replace(run, results=(*run.results, *(computed for _, computed in experiments.kept)))
    from assay.harness.checks.fresh import in_fresh_process
    from assay.harness.checks.observed import READ_OUT_S, Reader

    with few_threads([computed.call for computed in run.results]):
        smallest = smallest_call(guard, run, result.findings, path, other)
        wrong = known_of_wrong(smallest.wrong)
        stands = {"tried": result.tried and standing(result.tried, wrong), "axes": agreeing(result.axes, wrong)}
        result = result.model_copy(update=stands)
        smallest, findings = in_fresh_process(smallest, guard, run, result.findings, path, late)
    findings = smallest.named_in(findings)
    shown = {"findings": outside_first(findings), "smallest": smallest.words, "test": smallest.test(findings)}
    # A call that is wrong in this process alone differs by what was called before, not by its numbers.
    result = result.model_copy(update=shown | {"by_numbers": result.by_numbers and smallest.alone})
    if keeps_state(findings):  # its read-out and experiments depend on earlier calls
        return result.model_copy(update={"tried": None, "axes": (), "by_numbers": False})

    reader = read_out if isinstance(read_out, Reader) else Reader(READ_OUT_S if read_out is None else read_out)
    # Correct calls do not show what a kernel does to its inputs, or at random.
    fails = any(computed.fails for computed in run.results) or any(finding.id == STATE_KEPT for finding in findings)
    wanted = fails and reader.wants(findings, run.results)
    journal.write("stands", result=result, reading=wanted)
    if not wanted:
        return result
    observed = reader.observe(findings, guard, run.results, replace(experiments, tried=result.tried))
    shown = {"findings": outside_first(observed.findings), "test": smallest.test(observed.findings)}
    return result.model_copy(update=shown)


def _task(
    kernel: str | Kernel,
    options: MatrixOptions,
    noise: str | None,
    case: str | None,
    cases: Sequence[Case] | None,
    again: str,
    calls: int | None,
) -> _Task:
    """Choose the calls of a check."""
    name, loaded = named(kernel)
    declared = declared_with(declaration(loaded), noise)
    path = name if isinstance(kernel, str) or kernels.is_path(name) else ""
    phases, size = options.get("phases"), options.get("size", "small")
    asked = declared.phases if phases is None else tuple(phases)
    if path and cases is None and not again:
        again = command_of(path, options, noise, calls, case)
    quick = ""
    if options.get("quick"):
        options = narrowed(declared, options)
        quick = "{dtypes[0]}, head_dim {head_dims[0]}".format(**options)
        calls = calls or 0
    # A backend of SGLang accepts any request of a layer; `assay backends --honours` shows what it does with it.
    drawn = replace(declared, features=()) if path.startswith("sglang:") else declared
    chosen = matrix_of(drawn, **options) if cases is None else cases
    if case is not None:
        all_of_them, chosen = chosen, [known for known in chosen if case in known.name]
        if not chosen:
            example = f"part of a name, for example of {all_of_them[0].name}"
            raise UsageError(f"No case's name contains {case!r}.", example, "try another")
    some = cases is not None or case is not None
    runs = (0 if some else CALLS[size]) if calls is None else calls
    with few_threads(()):
        every = [(each, call) for each in chosen if (call := each.draw()).phase in asked]
    made, left = [], []
    for each, call in every:
        if why := excluded(family(declared.noise), each.condition.get("data", "")) or declared.excludes(call):
            left.append((each, why))
        else:
            made.append((each, call))
    made = first_ones(made) if quick else made
    if not made:
        why = f": its declaration excludes {', '.join(dict.fromkeys(why for _, why in left))}." if left else "."
        raise UsageError(
            f"The matrix has no case of {' or '.join(asked)} for {name}{why}",
            "at least one that its declaration does not exclude",
            "choose other cases or phases",
        )
    whole = some or size == "full"
    return _Task(name, path, loaded, declared, asked, made, tuple(left), whole, runs, again, quick)


def _examined(task: _Task, guard: Guard, repeats: int, journal: Journal) -> MatrixRun:
    """Run the kernel on the matrix, or until it is clearly wrong."""
    case_of = {id(call): case for case, call in task.made}

    def each(result: CallResult) -> None:
        case, (own, bound) = case_of[id(result.call)], result.judged_cell
        # If an earlier case was closer to its bound, this bound may be a lower limit.
        journal.write("computed", case=case.name, condition=case.condition, fails=result.fails, own=own, bound=bound)

    def enough(results: Sequence[CallResult]) -> bool:
        return not task.whole and clearly_wrong(results, guard.runs, len(task.made))

    order = None if task.whole else in_order(task.made)
    return MatrixRun(run_calls(guard, task.calls, repeats, each, order, enough), guard, task.made, task.again)


def explore(
    guard: Guard,
    calls: Sequence[AttentionCall],
    came: Sequence[tuple[Shape, Came]],
    journal: Journal,
    faults: Mapping[str, Fault],
) -> dict[str, Experiments]:
    """Find the condition of each fault of a kernel by experiments on calls like these.

    Args:
        guard: the kernel.
        calls: the calls whose head dims, dtypes and device to use.
        came: their outcomes, with their shapes, smallest first.
        journal: receives each call.
        faults: the faults that some of them show, by name.
    """
    device = str(calls[0].q.device)
    dims = frozenset((call.q.shape[2], call.v.shape[2]) for call in calls)
    dtypes = tuple(dict.fromkeys(call.q.dtype for call in calls))
    tried: dict[str, Experiments] = {}
    for name, fault in list(faults.items())[:_MOST_FAULTS]:
        asked = Guard(guard.kernel, guard.assay, journal, guard.memory)
        spent = _spent(device, _EXPERIMENTS_S)
        lab = Lab(asked, dims, dtypes, device, spent, fault=fault, name=name)
        told = [(shape, lab.told(shape, what)) for shape, what in came]
        failing = [Place(shape, wrong.index(True)) for shape, wrong in told if True in wrong]
        try:
            tried[name] = experiment(lab, failing[:_BASES], came)
        except Exception as error:  # a kernel's answers can be anything; the findings without a condition stand
            why = f"its condition could not be tested: {type(error).__name__}: {str(error)[:200]}"
            tried[name] = Experiments(failed=(why,))
    return tried


def _spent(device: str, seconds: float) -> Callable[[], float]:
    """Return a function that returns the used share of this much time from now on."""
    clock = budget_clock(device)
    return lambda: clock() / seconds


def _result(task: _Task, examined: MatrixRun, findings: Sequence[Finding], options: MatrixOptions) -> KernelResult:
    """Make the result of a kernel that ran on its calls."""
    run, broken = examined.run, examined.broken
    refused = tuple(pair for pair in examined.refused if pair not in broken)
    worst = worst_of(run.results)
    own, bound = worst.worst_cell if worst else (None, None)
    wrong = [case for case, result in examined.results if result.fails]
    named_dtypes = options.get("dtypes") is not None or task.declared.dtypes is not None
    return KernelResult(
        kernel=task.name,
        calls=len(examined.computed) + len(broken),
        failing=tuple(case.name for case in (*wrong, *(case for case, _ in broken))),
        worst_own=own,
        worst_bound=bound,
        refused=_why(refused),
        excluded=_why(task.excluded),
        broken=_why(broken),
        left_out=len(examined.left_out),
        quick=task.quick,
        measured=tuple(
            MeasuredCall(case=case.name, condition=case.condition, error=own, bound=bound, wrong=result.fails)
            for case, result in examined.results
            for own, bound in [result.judged_cell]
        ),
        coverage=coverage_of(
            examined.results,
            refused,
            task.excluded,
            declined(task.declared, options),
            examined.left_out,
            examined.guard.runs,
            task.kernel,
        ),
        missing=examined.missing(task.asked, len(task.excluded), not named_dtypes),
        findings=tuple(findings),
        again=task.again,
        traceback=next(filter(None, (examined.guard.breaches[why] for _, why in broken)), ""),
    )


def _why(cases: Sequence[tuple[Case, str]]) -> tuple[CaseWhy, ...]:
    return tuple(CaseWhy(case=case.name, why=why) for case, why in cases)


def assert_correct(kernel: str | Kernel, call: AttentionCall, *, noise: str | None = None) -> None:
    """Raise unless a kernel is correct on a call: its error against the oracle is within the bound of the call.

    If the kernel is wrong, a read-out of at most 10 seconds follows; the message describes the operator if that explains the
    output on this call.

    Args:
        kernel: a published name, ``module:function``, or the kernel itself.
        call: the call.
        noise: the quantisation whose noise is allowed, such as "int8_qk", or None for the kernel's declaration.

    Raises:
        AssertionError: the error is out of bounds, and the message names the bug where a hypothesis fits; or the kernel writes
            to its inputs, or outside of its tensors.
        AssayError: its output breaks the contract.
        UsageError: no such kernel or noise, or a package that the kernel imports is not installed.
        KernelRefused: the kernel refuses the call.
    """
    __tracebackhide__ = True  # pytest shows the test and the kernel
    if why := why_wrong(kernel, call, noise):
        raise AssertionError(why)


def why_wrong(kernel: str | Kernel, call: AttentionCall, noise: str | None = None, reads: bool = True) -> str:
    """Explain why a kernel is wrong on a call, or return an empty string if it is correct. Raises like `assert_correct`.

    Args:
        kernel: the kernel.
        call: the call.
        noise: quantisation whose noise is allowed.
        reads: whether a read-out of a wrong kernel follows.
    """
    __tracebackhide__ = True
    name, loaded = named(kernel)
    declared = declared_with(declaration(loaded), noise)
    guard = Guard(loaded, declared)
    where = f"{name} on {describe(call)}"
    with exits_raised():
        out = guard.strictly(call)
    result = measure(call, out, declared.noise)
    if guard.changed:
        return f"{where}: the kernel writes to its inputs: {', '.join(guard.changed)}; work on copies of them"
    if guard.written:
        return f"{where}: the kernel {guard.written[0][1]}"
    if result.lse_errors is not None and result.lse_errors.wrong:
        [wrong] = [finding for finding in diagnose(KernelRun((result,))) if finding.id in LSE_FINDINGS]
        return f"{where}: {wrong.diagnosis}"
    if not result.fails:
        return ""
    own, bound = result.worst_cell
    off = f"{where}: error {percent(own)}; rounding explains at most {percent(bound)}"
    if not reads:
        return off
    [bug, *_] = findings = diagnose(KernelRun((result,)))
    observed = _asserted(guard, result, findings)
    return f"{off}; {bug.diagnosis.rstrip('.')}{observed and '; observed: '}{observed}"


def _asserted(guard: Guard, result: CallResult, findings: Sequence[Finding]) -> str:
    """Describe the operator of a kernel that fails an assertion, or return "" unless it explains all outputs."""
    from assay.harness.checks.observed import Reader

    with few_threads([result.call]):
        came = [(shape_of(result.call), result)]
        experiments = explore(guard, [result.call], came, UNREAD, {OUTPUT: WrongOutputs()})[OUTPUT]
        reader, kept = Reader(_ASSERTED_S), [computed for _, computed in experiments.kept]
        observed = reader.observe(findings, guard, [result, *kept], experiments)
    return observed.findings[0].operator if observed.read and observed.read.exact else ""
