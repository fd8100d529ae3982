"""Running a kernel again, in buffers that are kept, and on one cheap call of each phase many times: does it become wrong?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, cycle

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.localize.cells import same_values
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, compute, measure
from assay.harness.text import percent

_SEVERAL = 256
"""Keys of a call from which on kernels work in several partitions, whose launches they may count."""


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
    right = sorted((result for result in results if not result.fails), key=_size)
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


def _size(result: CallResult) -> tuple[int, int]:
    return result.call.q.numel() + result.call.k.numel(), result.call.k.shape[0]


def _in_kept_buffers(results: Sequence[CallResult]) -> Iterator[tuple[CallResult, AttentionCall, str]]:
    """Yield the calls to make next, in buffers in which another call of the same shapes was just made.

    Of each phase and dtype, with other lengths and with the same, the smallest pair and the largest, if there are such.

    What a kernel keeps by address, such as a plan or a quantised K, is then that of another call.
    """
    by_shape: dict[tuple[object, ...], list[CallResult]] = {}
    for result in results:
        by_shape.setdefault(_shapes(result.call), []).append(result)
    smallest: dict[tuple[object, ...], tuple[CallResult, CallResult]] = {}
    largest: dict[tuple[object, ...], tuple[CallResult, CallResult]] = {}
    for pair in (pair for some in by_shape.values() for pair in combinations(some, 2)):
        first, second = pair
        kind = (first.call.phase, first.call.q.dtype, _lens(first.call) == _lens(second.call))
        smallest.setdefault(kind, pair)
        largest[kind] = pair
    others = (pair for kind, pair in largest.items() if pair is not smallest[kind])
    for first, second in (*smallest.values(), *others):
        a, b = first.call, second.call
        alike = _lens(a) == _lens(b)
        kept = a.clone()
        yield first, kept, ""
        for name, tensor in b.tensors.items():
            getattr(kept, name).copy_(tensor)
        yield second, kept, f", in the buffers of a call with {'the same' if alike else 'other'} lengths,"


def _lens(call: AttentionCall) -> tuple[list[int], list[int]]:
    return call.lens_q, call.lens_k


def _shapes(call: AttentionCall) -> tuple[object, ...]:
    """Return all that two calls must have in common for one to be made in the other's buffers."""
    return (
        *((name, tensor.shape, tensor.dtype) for name, tensor in call.tensors.items()),
        call.spec,
    )  # fmt: skip
