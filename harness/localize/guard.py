"""Running an arbitrary kernel on many calls: a breach of the contract is recorded, and the other calls still run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Outputs, refusal_behind, tensor_of
from assay.harness.attention.kernels import Declaration, lse_fault, output_fault
from assay.harness.localize.kernel_runs import CallResult, KernelRun, repeat, run_once
from assay.harness.localize.raised import raised, traceback_of
from assay.harness.localize.threads import kernel_threads

CONTRACT_BROKEN = "contract-broken"
"""Id of the finding that a kernel broke its contract."""
MAX_REPEATED = 32
"""Calls that are repeated after all others: enough to expose a kernel that keeps state or is not deterministic, without tripling
the time of an interpreted kernel."""

_HELD = 16
"""Outputs that are held, as a caller may hold them, to see whether a later one lies in their memory."""


class Guard:
    """A kernel that turns every breach of the contract into a refusal, and remembers it.

    Attributes:
        assay: the kernel's declaration.
        breaches: how it broke the contract, in words.
        tracebacks: of the exceptions among them, by breach.
        failed_repeats: calls that it computed once and then failed to compute again, and why.
        shared: calls whose output lies in the memory of an earlier output.
        runs: how many times the kernel ran.
    """

    def __init__(self, kernel: Kernel, declared: Declaration) -> None:
        self.assay = declared
        self.breaches: set[str] = set()
        self.tracebacks: dict[str, str] = {}
        self.failed_repeats: list[tuple[AttentionCall, str]] = []
        self.shared: list[AttentionCall] = []
        self.runs = 0
        self._kernel = kernel
        self._held: deque[tuple[Tensor, int, int]] = deque(maxlen=_HELD)

    def __call__(self, call: AttentionCall) -> Outputs:
        self.runs += 1
        try:
            with kernel_threads(), call.grad_context():
                returned = self._kernel(call)
        except (KernelRefused, ImportError):
            raise  # the contract allows a refusal, and a missing package is not a breach of it
        except KeyboardInterrupt:
            raise
        # A kernel may raise anything, and the other calls still have to run. Its sys.exit(0) must not become assay's own exit code,
        # nor its pytest.skip() the outcome of a test.
        except BaseException as error:
            if refusal := refusal_behind(error):
                raise refusal from None
            breach = self._breach(raised(error))
            self.tracebacks.setdefault(str(breach), traceback_of(error))
            raise breach from error
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
    run = replace(
        run,
        results=tuple(sorted(run.results, key=lambda result: place[id(result.call)])),
        refused=tuple(sorted(run.refused, key=lambda pair: place[id(pair[0])])),
    )
    step = _step(len(run.results), repeats)
    return replace(run, results=tuple(_repeat(guard, o) if n % step == 0 else o for n, o in enumerate(run.results)))


def _repeat(guard: Guard, result: CallResult) -> CallResult:
    try:
        return repeat(guard, result)
    except KernelRefused as error:
        guard.failed_repeats.append((result.call, str(error)))
        return result
