"""Running an arbitrary kernel on many calls: a breach of the contract is recorded, and the other calls still run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, cycle

from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Outputs, refusal_behind, tensor_of
from assay.harness.attention.kernels import Declaration, lse_fault, output_fault
from assay.harness.localize.cells import same_values
from assay.harness.localize.kernel_runs import CallResult, KernelRun, compute, measure, repeat, run_once
from assay.harness.localize.raised import raised, traceback_of
from assay.harness.text import percent

CONTRACT_BROKEN = "contract-broken"
"""Id of the finding that a kernel broke its contract."""
MAX_REPEATED = 32
"""Calls that are repeated after all others: enough to expose a kernel that keeps state or is not deterministic, without tripling
the time of an interpreted kernel."""

# Outputs that are held, as a caller may hold them, to see whether a later one lies in their memory.
_HELD = 16
# Keys of a call from which on kernels work in several partitions, whose launches they may count.
_SEVERAL = 256


class Guard:
    """A kernel that turns every breach of the contract into a refusal, and remembers it.

    Args:
        kernel: the kernel.
        declared: its declaration.
        on_run: receives after each run how many there were.

    Attributes:
        assay: the kernel's declaration.
        breaches: how it broke the contract, in words.
        tracebacks: of the exceptions among them, by breach.
        failed_repeats: calls that it computed once and then failed to compute again, and why.
        shared: calls whose output lies in the memory of an earlier output.
        runs: how many times the kernel ran.
    """

    def __init__(
        self, kernel: Kernel, declared: Declaration, on_run: Callable[[int], None] = lambda runs: None
    ) -> None:
        self.assay = declared
        self.breaches: set[str] = set()
        self.tracebacks: dict[str, str] = {}
        self.failed_repeats: list[tuple[AttentionCall, str]] = []
        self.shared: list[AttentionCall] = []
        self.runs = 0
        self._kernel, self._on_run = kernel, on_run
        self._held: deque[tuple[Tensor, int, int]] = deque(maxlen=_HELD)

    def __call__(self, call: AttentionCall) -> Outputs:
        self.runs += 1
        try:
            returned = self._kernel(call)
        except (KernelRefused, ImportError, KeyboardInterrupt):
            raise  # the contract allows a refusal, and a missing package is not a breach of it
        # A kernel may raise anything, and the other calls still have to run. Its sys.exit(0) must not become assay's own exit code,
        # nor its pytest.skip() the outcome of a test.
        except BaseException as error:
            if refusal := refusal_behind(error):
                raise refusal from None
            breach = self._breach(raised(error))
            self.tracebacks.setdefault(str(breach), traceback_of(error))
            raise breach from error
        finally:
            self._on_run(self.runs)
        out = tensor_of(returned)
        lse = returned.lse if isinstance(returned, Outputs) and "lse" in self.assay.features else None
        fault = output_fault(call, out) or ("lse" in self.assay.features and lse_fault(call, lse))
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

    def _breach(self, how: str) -> KernelRefused:
        self.breaches.add(how)
        return KernelRefused(how)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of its first element, and that behind its last; (0, 0) if it has none."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def runs_of(calls: int, repeats: int = MAX_REPEATED) -> int:
    """Count how many times `run_guarded` runs a kernel that computes all of so many calls."""
    return calls + 2 * len(range(0, calls, _step(calls, repeats)))


def _step(results: int, repeats: int) -> int:
    return -(-results // repeats) or 1


def run_guarded(
    guard: Guard,
    calls: Sequence[AttentionCall],
    repeats: int = MAX_REPEATED,
    each: Callable[[CallResult], None] | None = None,
    order: Sequence[AttentionCall] | None = None,
    enough: Callable[[Sequence[CallResult]], bool] | None = None,
) -> KernelRun:
    """Run each call once, then repeat up to `repeats` of those that were computed, spread over all of them.

    Args:
        guard: the kernel.
        calls: the calls.
        repeats: most calls that are repeated.
        each: receives the result of each call, as soon as it is computed.
        order: the same calls in the order in which they are made. The results are in that of `calls`.
        enough: receives the results so far, and says whether the other calls are not needed.
    """
    run = run_once(guard, calls if order is None else order, each, enough)
    place = {id(call): number for number, call in enumerate(calls)}
    results = sorted(run.results, key=lambda result: place[id(result.call)])
    step = _step(len(results), repeats)
    return replace(
        run,
        results=tuple(_repeat(guard, o) if n % step == 0 else o for n, o in enumerate(results)),
        refused=tuple(sorted(run.refused, key=lambda pair: place[id(pair[0])])),
    )


def _repeat(guard: Guard, result: CallResult) -> CallResult:
    try:
        return repeat(guard, result)
    except KernelRefused as error:
        guard.failed_repeats.append((result.call, str(error)))
        return result


def endure(
    guard: Guard, results: Sequence[CallResult], before: int, runs: int, seconds: float
) -> tuple[int, tuple[AttentionCall, str] | None]:
    """Run the kernel until it has run this often in all.

    First on pairs of calls of the same shapes, one after the other in the same buffers, as an engine calls it that replays graphs;
    then in turn on two right calls of each phase and dtype: the cheapest, and the cheapest with more than `_SEVERAL` keys.

    Args:
        guard: the kernel.
        results: what it computed before; those within their bounds are asked again.
        before: how many times it ran before.
        runs: how many times it is to have run in all.
        seconds: most time that this takes.

    Returns:
        How many times the kernel had run at the end, the runs before included; and the call on which it became wrong, and how, in
        words that follow "the kernel": None if it did not.
    """
    right = sorted(
        (result for result in results if not result.fails),
        key=lambda result: (result.call.q.numel() + result.call.k.numel(), result.call.k.shape[0]),
    )
    cheapest: dict[tuple[object, ...], CallResult] = {}
    for result in right:
        cheapest.setdefault((result.call.phase, result.call.q.dtype, max(result.call.lens_k) > _SEVERAL), result)
    until = time.monotonic() + seconds
    many = ((result, result.call.clone(), "") for result in cycle(cheapest.values()))
    for result, given, buffers in chain(_in_kept_buffers(right), many):
        if before + guard.runs >= runs or time.monotonic() > until:
            break
        number = before + guard.runs + 1
        try:
            out = compute(guard, given).out
        except KernelRefused as error:
            return number, (result.call, f"{error}, in its run {number}{buffers}")
        if not same_values(out, result.out) and (now := measure(result.call, out.clone(), result.noise)).fails:
            own, bound = now.worst_cell
            how = f"is wrong in its run {number}{buffers} on a call that it computed right before: own error {percent(own)}"
            return number, (result.call, f"{how}; noise explains at most {percent(bound)}")
    return before + guard.runs, None


def _in_kept_buffers(results: Sequence[CallResult]) -> Iterator[tuple[CallResult, AttentionCall, str]]:
    """Yield pairs of calls in the same buffers: what a kernel keeps by address, such as a plan, is then that of another call."""
    by_shape: dict[tuple[object, ...], list[CallResult]] = {}
    for result in results:
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in result.call.tensors.items()]
        by_shape.setdefault((*shapes, result.call.spec), []).append(result)
    pairs: dict[tuple[object, ...], list[tuple[CallResult, CallResult, bool]]] = {}
    for first, second in (pair for some in by_shape.values() for pair in combinations(some, 2)):
        alike = (first.call.lens_q, first.call.lens_k) == (second.call.lens_q, second.call.lens_k)
        pairs.setdefault((first.call.phase, first.call.q.dtype, alike), []).append((first, second, alike))
    # Of each phase and dtype, with other lengths and with the same: the smallest pairs come first, then the largest.
    for first, second, alike in [some[0] for some in pairs.values()] + [
        some[-1] for some in pairs.values() if some[1:]
    ]:
        kept = first.call.clone()
        yield first, kept, ""
        for name, tensor in second.call.tensors.items():
            kept.tensors[name].copy_(tensor)
        yield second, kept, f", in the buffers of a call with {'the same' if alike else 'other'} lengths,"
