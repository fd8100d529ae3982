"""Runs an arbitrary kernel on many calls. A breach of the contract is recorded, and the other calls still run."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, cycle

import torch
from torch import Tensor

from assay.harness.attention.call import (
    WITHOUT_LSE,
    AttentionCall,
    Kernel,
    KernelRefused,
    Outputs,
    refusal_behind,
    tensor_of,
)
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.kernels import lse_fault, missing_package, output_fault, refuse_features
from assay.harness.errors import AssayError
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.cells import deviation, same_values
from assay.harness.localize.guarded_memory import Flipped, within_guards
from assay.harness.localize.kernel_runs import CallResult, KernelRun, measure
from assay.harness.localize.raised import raised, traceback_of
from assay.harness.localize.threads import budget_clock, kernel_threads
from assay.harness.stats.error_sums import relative_l1
from assay.harness.text import percent
from assay.worker import UNREAD, Journal

MAX_REPEATED = 32
"""Calls to repeat after all others: enough to expose a kernel that keeps state or is not deterministic, without tripling the time
of an interpreted kernel."""

# Outputs to hold, as a caller might, to see whether a later output reuses their memory.
_HELD = 16
# From this many keys on, kernels work in several partitions, whose launches they may count.
_SEVERAL = 256


class _CopiedError(Exception):
    """A kernel forked its process, and a call returned in the copy too."""


class Guard:
    """A kernel as assay calls it: everything around one call to the user's function.

    A call turns every breach of the contract into a refusal, and records it.

    Args:
        kernel: the kernel.
        declared: its declaration; by default its own.
        journal: receives each call as a step, since the kernel may end its process in any call, and the number of runs.
        memory: see the attribute.

    Attributes:
        kernel: the kernel.
        assay: its declaration.
        breaches: description of each breach of the contract -> the traceback, or an empty string if nothing was raised.
        written: calls in which it wrote outside of its tensors, and where, phrased to follow "the kernel".
        shared: calls whose output reuses the memory of an earlier output.
        changed: names of the inputs that it wrote to in its last call with guarded memory.
        memory: whether calls use guarded memory, which takes longer than a small call.
        runs: the number of runs so far.
        expected: the number of planned runs, for the journal.
    """

    def __init__(
        self,
        kernel: Kernel,
        declared: Declaration | None = None,
        journal: Journal = UNREAD,
        memory: bool = True,
    ) -> None:
        self.kernel, self.assay = kernel, declared or declaration(kernel)
        self.breaches: dict[str, str] = {}
        self.written: list[tuple[AttentionCall, str]] = []
        self.shared: list[AttentionCall] = []
        self.changed: tuple[str, ...] = ()
        self.runs = self.expected = 0
        self._journal, self.memory = journal, memory
        self._held: deque[tuple[Tensor, int, int]] = deque(maxlen=_HELD)
        self._process, self._copied = os.getpid(), mmap.mmap(-1, 1)  # copies of the process share this byte

    def __call__(self, call: AttentionCall) -> Outputs:
        """Compute a call, with log-sum-exps if the kernel declares them. Without guarded memory, it may write to the call.

        Raises:
            KernelRefused: the kernel refuses the call, does not declare a feature that it asks for, or breaks the contract.
            UsageError: a package that the kernel imports is not installed.
        """
        __tracebackhide__ = True
        refuse_features("the kernel", self, call)
        self.runs += 1
        try:
            returned = self.ask(call, memory=self.memory)
        except ImportError as error:
            raise missing_package(error) from error
        except (KernelRefused, KeyboardInterrupt):
            raise
        # A kernel may raise anything, and the other calls still have to run. Its sys.exit(0) must not become assay's own exit code,
        # nor its pytest.skip() the outcome of a test.
        except BaseException as error:
            if refusal := refusal_behind(error):
                raise refusal from None
            raise self._breach(raised(error), traceback_of(error)) from error
        finally:
            if self.runs <= self.expected:
                self._journal.write("runs", done=self.runs, total=self.expected)
        out = tensor_of(returned)
        lse = returned.lse if isinstance(returned, Outputs) and "lse" in self.assay.features else None
        has_lse = "lse" in self.assay.features and WITHOUT_LSE not in call.spec.ways
        fault = output_fault(call, out) or (has_lse and lse_fault(call, lse))
        if fault:
            raise self._breach(f"returned: {fault}")
        # The earlier outputs are held, so no allocator has given their memory away.
        begin, end = _span(out)
        if any(
            max(begin, start) < min(end, stop) and out.device == earlier.device for earlier, start, stop in self._held
        ):
            self.shared.append(call)
        self._held.append((out, begin, end))
        return Outputs(out, lse)

    def ask(self, call: AttentionCall, flipped: Flipped | None = None, memory: bool = True) -> Tensor | Outputs:
        """Have the kernel compute a call, and pass on whatever it raises or returns. On a GPU, wait until it is computed.

        If the kernel forks its process, the copy ends where its call returns: otherwise it would continue the check, and fork
        again. Each later call then raises `_CopiedError` without running the kernel.

        Args:
            call: the call.
            flipped: see `within_guards`.
            memory: whether the call uses guarded memory.
        """
        __tracebackhide__ = True
        if self._copied[0]:
            raise _CopiedError("it forked its process, and its call returned in the copy too")
        self._journal.begin(describe(call))
        try:
            with kernel_threads(), call.grad_context():
                guarded = memory and within_guards(self.kernel, call, flipped)
                out, written, self.changed = guarded or (self.kernel(call), "", ())
            if call.q.is_cuda:
                torch.cuda.synchronize()
        finally:
            if os.getpid() != self._process:
                self._copied[0] = 1
                os._exit(0)
            self._journal.end()
        if written:
            self.written.append((call, written))
        return out

    def strictly(self, call: AttentionCall) -> Outputs:
        """Compute a call like `__call__`, but raise an AssayError at a breach, with the traceback in its details."""
        __tracebackhide__ = True
        try:
            return self(call)
        except KernelRefused as refusal:
            if (how := str(refusal)) not in self.breaches:
                raise
            details = self.breaches[how]
            raise AssayError(
                f"The kernel {how if details else how.replace(':', '', 1)}.",
                "an output of the contract, or KernelRefused",
                "fix the kernel",
                details=details,
            ) from refusal.__cause__

    def asked_freely(self, declared: Declaration | None = None) -> Kernel:
        """Return a function that runs the kernel within guarded memory, and passes on whatever it raises or returns."""

        def ask(call: AttentionCall) -> Tensor | Outputs:
            return self.ask(call)

        vars(ask)["assay"] = declared or self.assay
        return ask

    def _breach(self, how: str, details: str = "") -> KernelRefused:
        self.breaches.setdefault(how, details)
        return KernelRefused(how)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's addresses [start, end), or (0, 0) if it has no elements."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def compute(kernel: Kernel, call: AttentionCall) -> Outputs:
    """Compute a kernel's outputs on a call, with log-sum-exps if it declares them. The kernel may write to the call.

    Raises:
        AssayError: the kernel breaks the contract, unless it is a `Guard`.
        UsageError: a package that the kernel imports is not installed.
        KernelRefused: the kernel refuses the call, or does not declare a feature that it asks for.
    """
    __tracebackhide__ = True
    return kernel(call) if isinstance(kernel, Guard) else Guard(kernel, memory=False).strictly(call)


def attempt(kernel: Kernel, call: AttentionCall) -> CallResult:
    """Have a kernel compute a copy of a call. Raises like `compute`, and a ValueError if numbers overflow the dtype."""
    given = call if isinstance(kernel, Guard) and kernel.memory else call.clone()
    before = len(kernel.written) if isinstance(kernel, Guard) else 0
    out = compute(kernel, given)
    names = () if given is call else call.tensors
    changed = tuple(name for name in names if not same_values(given.tensors[name], call.tensors[name]))
    # The output may be a view of an input, or of a buffer that the next call overwrites.
    kept = Outputs(out.out.clone(), None if out.lse is None else out.lse.clone())
    outside = [where for _, where in kernel.written[before:]] if isinstance(kernel, Guard) else []
    result = measure(call, kept, declaration(kernel).noise)
    return replace(result, mutated=changed or getattr(kernel, "changed", ()), outside=next(iter(outside), ""))


def runs_of(calls: int, repeats: int = MAX_REPEATED) -> int:
    """Return how many times `run_calls` runs a kernel that computes all of this many calls."""
    return calls + 2 * len(range(0, calls, _step(calls, repeats)))


def _step(results: int, repeats: int) -> int:
    return -(-results // repeats) or 1


def run_calls(
    kernel: Kernel,
    calls: Sequence[AttentionCall],
    repeats: int = MAX_REPEATED,
    each: Callable[[CallResult], None] = lambda result: None,
    order: Sequence[AttentionCall] | None = None,
    enough: Callable[[Sequence[CallResult]], bool] = lambda results: False,
) -> KernelRun:
    """Run each call once, then repeat up to `repeats` of the computed ones, spread over all of them.

    The kernel gets copies of the inputs, so that writing to them is detected and does not affect other calls. Calls in PyTorch's
    inference mode are made last, and not repeated: a buffer that a kernel allocates in this mode cannot be written outside of it,
    and an engine stays in one mode.

    Args:
        kernel: the kernel, preferably as a `Guard`, which turns breaches of the contract into refusals.
        calls: the calls.
        repeats: most calls to repeat.
        each: receives each call's result as soon as it is computed.
        order: the same calls in the order to make them. The results are in the order of `calls`.
        enough: receives the results so far, and returns True if the remaining calls are not needed.

    Raises:
        AssayError: an output of a kernel without a guard breaks the contract.
    """
    declared, place = declaration(kernel), {id(call): number for number, call in enumerate(calls)}
    if isinstance(kernel, Guard):
        kernel.expected = runs_of(len(calls), repeats) if repeats else len(calls)
    results: list[CallResult] = []
    refused: list[tuple[AttentionCall, str]] = []
    failed: list[tuple[AttentionCall, str]] = []
    begun: list[AttentionCall] = []
    made = calls if order is None else order

    def make(calls: Iterable[AttentionCall]) -> bool:
        for call in (call for call in calls if call.phase in declared.phases):
            begun.append(call)
            try:
                results.append(attempt(kernel, call))
            except KernelRefused as error:
                refused.append((call, str(error)))
                continue
            each(results[-1])
            if enough(results):
                return True
        return False

    ended = make(call for call in made if call.spec.grad_mode != "inference_mode")
    results.sort(key=lambda result: place[id(result.call)])
    for number in range(0, len(results), _step(len(results), repeats)) if repeats else ():
        try:
            results[number] = _repeated(kernel, results[number])
        except KernelRefused as error:
            failed.append((results[number].call, str(error)))
    if not ended:
        make(call for call in made if call.spec.grad_mode == "inference_mode")
        results.sort(key=lambda result: place[id(result.call)])
    return KernelRun(
        tuple(results),
        delegated=tuple(call for call in made if call.phase not in declared.phases),
        refused=tuple(sorted(refused, key=lambda pair: place[id(pair[0])])),
        failed_repeats=tuple(failed),
        made=begun,
    )


def _repeated(kernel: Kernel, result: CallResult) -> CallResult:
    """Run a call twice in a row, ideally after all other calls, and compare the outputs with the earlier one and each other."""
    late, again = (compute(kernel, result.call.clone()).out.clone() for _ in range(2))
    late_error, late_differs = _difference(result, result.out, late)
    error, differs = _difference(result, late, again)
    return result.updated(late=late_error, late_differs=late_differs, repeat=error, repeats_differ=differs)


def _difference(result: CallResult, first: Tensor, other: Tensor) -> tuple[float, bool]:
    """Compute the largest relative L1 between two outputs of a call, and whether any bit differs."""
    if same_values(first[: result.call.rows], other[: result.call.rows]):
        return 0.0, False
    expected = torch.where(first.isfinite(), first.double(), float("inf"))
    return float(relative_l1(deviation(other, expected, result.cells)).max()), True


def run_and_repeat(kernel: Kernel, calls: Sequence[AttentionCall]) -> KernelRun:
    """Run a kernel on each call once, and then on each call twice more in a row.

    Raises:
        AssayError: no call was computed (none given, all delegated or refused), which is never a pass; or an output
            breaks the contract.
        KernelRefused: the kernel refuses a call that it computed before.
    """
    run = run_calls(kernel, calls, len(calls))
    run.require_results()
    for _, why in run.failed_repeats:
        raise KernelRefused(why)
    return run


def endure(guard: Guard, results: Sequence[CallResult], runs: int, seconds: float) -> tuple[AttentionCall, str] | None:
    """Run the kernel until it has run this often in total, without guards around its memory from now on.

    It first gets pairs of calls with the same shapes in the same buffers, like from an engine that replays graphs. Then it gets
    two correct calls of each phase and dtype in turn: the cheapest, and the cheapest with more than `_SEVERAL` keys.

    Args:
        guard: the kernel.
        results: its earlier results; calls within their bounds are asked again.
        runs: the total number of runs to reach.
        seconds: the time limit, on `budget_clock`.

    Returns:
        The call on which it became wrong, and how (phrased to follow "the kernel"), or None if it did not.
    """
    right = sorted(
        (result for result in results if not result.fails),
        key=lambda result: (result.call.q.numel() + result.call.k.numel(), result.call.k.shape[0]),
    )
    cheapest: dict[tuple[object, ...], CallResult] = {}
    for result in right:
        cheapest.setdefault((result.call.phase, result.call.q.dtype, max(result.call.lens_k) > _SEVERAL), result)
    clock, guard.memory = budget_clock(right[0].call.q.device.type if right else "cpu"), False
    many = ((result, result.call.clone(), "") for result in cycle(cheapest.values()))
    for result, given, buffers in chain(_in_kept_buffers(right), many):
        if guard.runs >= runs or clock() > seconds:
            break
        try:
            out = guard(given).out
        except KernelRefused as error:
            return result.call, f"{error}, in its run {guard.runs}{buffers}"
        if not same_values(out, result.out) and (now := measure(result.call, out.clone(), result.noise)).fails:
            own, bound = now.worst_cell
            how = f"is wrong in its run {guard.runs}{buffers} on a call that it computed correctly before"
            return result.call, f"{how}: error {percent(own)}; rounding explains at most {percent(bound)}"
    return None


def _in_kept_buffers(results: Sequence[CallResult]) -> Iterator[tuple[CallResult, AttentionCall, str]]:
    """Yield pairs of calls in the same buffers: a plan that a kernel caches by address then belongs to another call."""
    by_shape: dict[tuple[object, ...], list[CallResult]] = {}
    for result in results:
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in result.call.tensors.items()]
        by_shape.setdefault((*shapes, replace(result.call.spec, ways=())), []).append(result)
    pairs: dict[tuple[object, ...], list[tuple[CallResult, CallResult, bool]]] = {}
    for first, second in (pair for some in by_shape.values() for pair in combinations(some, 2)):
        alike = (first.call.lens_q, first.call.lens_k) == (second.call.lens_q, second.call.lens_k)
        pairs.setdefault((first.call.phase, first.call.q.dtype, alike), []).append((first, second, alike))
    # For each phase and dtype, with other lengths and with the same lengths: the smallest pairs first, then the largest.
    for first, second, alike in [some[0] for some in pairs.values()] + [
        some[-1] for some in pairs.values() if some[1:]
    ]:
        kept = first.call.clone()
        yield first, kept, ""
        for name, tensor in second.call.tensors.items():
            kept.tensors[name].copy_(tensor)
        yield second, kept, f", in the buffers of a call with {'the same' if alike else 'other'} lengths,"
