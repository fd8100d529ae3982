"""Detects reads and writes of a kernel outside of its tensors, by placing inputs and outputs in larger allocations.

Before and after each of q, k and v, and each tensor that a kernel allocates through PyTorch, lie rows that no sequence owns.
Around inputs they are NaN, which a weight of 0 does not remove; elsewhere they are known numbers. A kernel that writes there
changes them. A kernel that reads there gives another output once they are numbers: see `over_reads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Outputs, tensor_of
from assay.harness.attention.interpreter_bounds import memory
from assay.harness.localize.cells import same_values
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.text import listed

_Side = Literal["before the start", "beyond the end"]
_SIDES: tuple[_Side, ...] = ("before the start", "beyond the end")
Flipped = tuple[str, _Side]
"""An input by its name, and a side of it; no name for none."""
_Ask = Callable[[AttentionCall, Flipped | None], Tensor | Outputs]
# Least rows, of all heads, before and after an input: the largest tile in use.
_ROWS = 128
# The alignment of PyTorch's allocations on a GPU, in bytes.
_ALIGNED = 512
_OUTPUT_BYTES = 2**16
_SEED = 25
# Most failing calls to try for reads outside, smallest first.
_MAX_CALLS = 3


@dataclass(frozen=True)
class _Guarded:
    """A contiguous tensor within a larger allocation; `name` is the input's name or a description."""

    name: str
    tensor: Tensor
    whole: Tensor
    # Elements before the tensor, and all elements around it (as many as `whole` has without the tensor).
    before: int
    fill: Tensor

    def side(self, side: _Side) -> Tensor:
        """Return the memory before or after the tensor."""
        return self.whole[: self.before] if side == _SIDES[0] else self.whole[self.before + self.tensor.numel() :]

    def written(self) -> str:
        """Describe writes around it ("up to 32 elements beyond the end of its output"), or return an empty string."""
        regions = []
        for side, expected in zip(_SIDES, (self.fill[: self.before], self.fill[self.before :]), strict=True):
            if same_values(self.side(side), expected):
                continue
            now = self.side(side)
            changed = ((now != expected) & ~(now.isnan() & expected.isnan())).nonzero().ravel()
            far = self.before - int(changed.min()) if side == _SIDES[0] else int(changed.max()) + 1
            regions.append(f"up to {far:,} elements {side} of {self.name}")
        return " and ".join(regions)


def _guarded(tensor: Tensor, name: str, around: int, owned: bool = True) -> _Guarded:
    """Copy a tensor contiguously, with at least `around` elements before and after it: known numbers if `owned`, else NaN."""
    step = max(1, _ALIGNED // tensor.element_size())
    around = -(-around // step) * step
    numbers = (_numbers if owned else _nothing)(2 * around, tensor.dtype, str(tensor.device))
    whole = torch.cat([numbers[:around], tensor.detach().reshape(-1), numbers[around:]])
    return _Guarded(name, whole[around : around + tensor.numel()].view(tensor.shape), whole, around, numbers)


def _numbers(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return known numbers from a fixed seed, normally distributed, [count]."""
    return _drawn(_at_least(count), dtype, device)[:count]


def _nothing(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return possible contents of unwritten memory, [count]."""
    return _unwritten(_at_least(count), dtype, device)[:count]


def _at_least(count: int) -> int:
    """Round up to a power of two, so that few different counts are drawn."""
    return int(2 ** math.ceil(math.log2(max(count, _ALIGNED))))


@lru_cache(maxsize=24)
def _drawn(count: int, dtype: torch.dtype, device: str) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    return drawn.to(device, dtype)


@lru_cache(maxsize=24)
def _unwritten(count: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((count,), float("nan"), dtype=dtype, device=device)


def within_guards(
    kernel: Kernel, call: AttentionCall, flipped: Flipped | None
) -> tuple[Tensor | Outputs, str, tuple[str, ...]]:
    """Run a kernel with its inputs and allocations within guarded memory.

    Args:
        kernel: the kernel.
        call: the call; the kernel gets a copy.
        flipped: the only side of an input that keeps NaN, with known numbers on all others; or None for NaN on all.

    Returns:
        The kernel's return value; where it wrote outside of its tensors, phrased to follow "the kernel", or an empty string; and
        the names of the inputs that it wrote to.
    """
    __tracebackhide__ = True
    packed = call.spec.layout == "packed"
    laid = call if packed else call.clone()
    inputs = _guards_of(laid)
    for guarded in inputs:
        for side in _SIDES if flipped else ():
            if flipped != (guarded.name, side):
                around = guarded.side(side)
                around.copy_(_numbers(len(around), around.dtype, str(around.device)))
    tensors = {guarded.name: guarded.tensor for guarded in inputs}
    if call.spec.layout == "v in k":
        tensors["v"] = tensors.get("k", laid.k)[..., : call.v.shape[2]]
    given = call.clone(tensors) if packed else laid.with_tensors(tensors)
    made: list[_Guarded] = []
    for guarded in inputs:
        _bound(guarded)
    try:
        with memory.watching() as seen, _Allocations(made, call.q.device):
            out = kernel(given)
    finally:
        for guarded in (*inputs, *made):
            memory.inside.pop(guarded.whole.untyped_storage().data_ptr(), None)
    changed = tuple(name for name, tensor in call.tensors.items() if not same_values(given.tensors[name], tensor))
    stores = [overrun.words for overrun in seen if overrun.does == "writes"]
    stores += [f"writes {words}" for guarded in (*inputs, *made) if not flipped and (words := guarded.written())]
    return out, stores[0] if stores else "", changed


def _guards_of(call: AttentionCall) -> list[_Guarded]:
    """Make guarded copies of the inputs of a call, except inputs that are not one block of memory."""
    guards = []
    for name in ("q", "k") if call.spec.layout == "v in k" else ("q", "k", "v"):
        tensor = getattr(call, name)
        if tensor.is_contiguous() and tensor.numel():
            heads = max(call.q.shape[1], _ROWS * tensor.shape[1])
            guards.append(_guarded(tensor, name, heads * tensor.shape[2], owned=False))
    return guards


def _bound(guard: _Guarded) -> None:
    storage, size = guard.whole.untyped_storage(), guard.whole.element_size()
    start = storage.data_ptr()
    memory.inside[start] = (start + guard.before * size, start + (guard.before + guard.tensor.numel()) * size)


_ALLOCATE: frozenset[Callable[..., Any]] = frozenset({
    torch.empty, torch.empty_like, Tensor.new_empty, torch.zeros, torch.zeros_like, Tensor.new_zeros
})  # fmt: skip


class _Allocations(TorchFunctionMode):
    """Guards the tensors that are allocated through PyTorch on one device, except while a kernel is compiled."""

    def __init__(self, guards: list[_Guarded], device: torch.device) -> None:
        super().__init__()
        self._guards, self._device = guards, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _ALLOCATE or torch.compiler.is_compiling():
            return made
        plain = made.device == self._device and made.is_contiguous() and made.is_floating_point() and made.numel()
        if not plain or made.requires_grad or (kwargs or {}).get("out") is not None:
            return made
        row = made[0].numel() if made.dim() == 3 else 0
        around = max(_OUTPUT_BYTES // made.element_size(), _ROWS * row)
        kept = _guarded(made, "its output" if row else "a tensor that it allocated", around)
        self._guards.append(kept)
        _bound(kept)
        return kept.tensor


def over_reads(ask: _Ask, results: Sequence[CallResult]) -> tuple[AttentionCall, str] | None:
    """Find a call in which a kernel reads outside of its inputs.

    Args:
        ask: has the kernel compute a call within guards; see `within_guards`.
        results: computed calls. The smallest failing ones are tried.

    Returns:
        The call and a description that follows "the kernel", or None if no call shows it.
    """
    failing = [result.call for result in results if result.fails]
    for call in sorted(failing, key=lambda call: (call.k.numel(), call.q.numel()))[:_MAX_CALLS]:
        try:
            reads = _reads_outside(ask, call)
        except KernelRefused:
            continue
        except KeyboardInterrupt:
            raise
        except BaseException:  # another check finds kernels that raise now and then
            return None
        if reads:
            words = (f"{heads} read {side} of {listed(names)}" for (heads, side), names in reads.items())
            return call, f"reads outside of its inputs: {'; '.join(words)}"
    return None


def _reads_outside(ask: _Ask, call: AttentionCall) -> dict[tuple[str, _Side], list[str]]:
    """Map readers and sides to the inputs that they read outside of; return an empty dict if the output varies anyway."""
    nothing: Flipped = ("", _SIDES[0])
    usual = tensor_of(ask(call.clone(), nothing)).clone()
    reads: dict[tuple[str, _Side], list[str]] = {}

    def repeats(out: Tensor, flipped: Flipped) -> bool:
        return same_values(out[: call.rows], tensor_of(ask(call.clone(), flipped))[: call.rows])

    if not repeats(usual, nothing):
        return reads
    for guard in _guards_of(call):
        for side in _SIDES:
            out = tensor_of(ask(call.clone(), (guard.name, side))).clone()
            differs = ((out != usual) & ~(out.isnan() & usual.isnan()))[: call.rows]
            heads = [str(head) for head in differs.any(-1).any(0).nonzero().ravel().tolist()]
            # The memory makes the difference only if both answers come again: a kernel may err now and then.
            if heads and repeats(out, (guard.name, side)) and repeats(usual, nothing):
                readers = f"q head{'s' * (len(heads) > 1)} {listed(heads)}"
                reads.setdefault((readers, side), []).append(guard.name.upper())
    return reads
