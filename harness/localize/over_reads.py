"""Finds heads that read beyond their inputs: what lies around the inputs is changed, and where the output follows, it was read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.localize.guarded_memory import SIDES, Guarded, GuardedKernel, Side, guards_of
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.text import counted, listed

_MAX_CALLS = 3
"""Failing calls that are tried, the smallest first."""


def over_reads(kernel: GuardedKernel, results: Sequence[CallResult]) -> tuple[AttentionCall, str] | None:
    """Find a call in which a kernel reads outside of its inputs, and describe what in words after "the kernel"; None if none is.

    Args:
        kernel: the kernel.
        results: calls that it computed; of those that fail, the smallest are tried.
    """
    failing = sorted(
        (result.call for result in results if result.fails), key=lambda call: (call.k.numel(), call.q.numel())
    )
    for call in failing[:_MAX_CALLS]:
        try:
            if words := _words(kernel, call):
                return call, words
        except KernelRefused:
            continue
        except KeyboardInterrupt:
            raise
        except BaseException:  # a kernel that raises now and then is found elsewhere
            return None
    return None


def _words(kernel: GuardedKernel, call: AttentionCall) -> str:
    """Describe what the heads of a call read outside of its inputs; empty if nothing, or if the output varies."""
    usual = kernel(call.clone()).clone()
    if not _same(usual, kernel(call.clone())):
        return ""
    found: list[tuple[str, str]] = []
    for guard in guards_of(call):
        for side in SIDES:
            if heads := _heads(kernel, call, usual, guard, side, 0):
                far = _farthest(kernel, call, usual, guard, side)
                where = "beyond the end" if side == "back" else "before the start"
                readers = f"q head{'s' * (len(heads) > 1)} {listed([str(head) for head in heads])}"
                distance = counted(-(-far // call.q.shape[2]), "head")
                found.append((f"{readers} read {{}} up to {distance} {where}", guard.name.upper()))
    parts = [
        text.format(" and ".join(name for _, name in group))
        for text, group in ((text, list(group)) for text, group in groupby(sorted(found), key=lambda pair: pair[0]))
    ]
    return f"reads outside of its inputs: {'; '.join(parts)}" if parts else ""


def _heads(
    kernel: GuardedKernel, call: AttentionCall, usual: Tensor, guard: Guarded, side: Side, beyond: int
) -> list[int]:
    """List the q heads whose output follows the numbers more than `beyond` elements outside on a side of an input."""
    numbers = guard.side(side).clone()
    changed = numbers[beyond:] if side == "back" else numbers[: len(numbers) - beyond]
    changed.neg_()
    out = kernel.among(call.clone(), {(guard.name, side): numbers})
    differs = (out != usual) & ~(out.isnan() & usual.isnan())
    found: list[int] = differs.any(-1).any(0).nonzero().ravel().tolist()
    return found


def _farthest(kernel: GuardedKernel, call: AttentionCall, usual: Tensor, guard: Guarded, side: Side) -> int:
    """Find by how many elements the farthest number that is read is outside."""
    low, high = 0, len(guard.side(side))  # beyond `low` something is read, beyond `high` nothing
    while high - low > 1:
        middle = (low + high) // 2
        if _heads(kernel, call, usual, guard, side, middle):
            low = middle
        else:
            high = middle
    return high


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
