"""Inputs and outputs of a kernel that lie in larger allocations, so that what it reads or writes around them is seen.

In front of and behind each of q, k and v, and of what a kernel allocates through PyTorch, lie rows of known numbers. A kernel that
writes there has changed them. They are finite, normal numbers, so that one that reads there gives an output that can be described;
see `assay.harness.localize.over_reads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.interpreter_bounds import memory
from assay.harness.attention.kernels import declaration
from assay.harness.localize.threads import kernel_threads
from assay.harness.localize.values import same_values

Side = Literal["front", "back"]
SIDES: tuple[Side, ...] = ("front", "back")
_GUARDED = ("q", "k", "v")
_ROWS = 128
"""Least rows, of all heads, before and behind an input: the largest tile in use."""
_ALIGNED = 512
"""Bytes: the alignment of PyTorch's allocations on a GPU."""
_OUTPUT_BYTES = 2**16
_SEED = 25


@dataclass(frozen=True)
class Guarded:
    """A tensor within a larger allocation.

    Attributes:
        name: name of the input, or what it is in words.
        tensor: the tensor, contiguous.
        whole: the allocation, one-dimensional.
        before: elements in front of the tensor.
        fill: what lies around it, one-dimensional, as long as `whole` less the tensor.
    """

    name: str
    tensor: Tensor
    whole: Tensor
    before: int
    fill: Tensor

    def side(self, side: Side) -> Tensor:
        """Return the memory in front of the tensor, or behind it."""
        return self.whole[: self.before] if side == "front" else self.whole[self.before + self.tensor.numel() :]

    def written(self) -> str:
        """Describe what was written around it: "beyond the end of the output, up to 32 elements"; empty if nothing was."""
        found = []
        for side, actual, expected in (
            ("before the start", self.side("front"), self.fill[: self.before]),
            ("beyond the end", self.side("back"), self.fill[self.before :]),
        ):
            if same_values(actual, expected):
                continue
            changed = (actual != expected).nonzero().ravel()
            far = int(changed.max()) + 1 if side == "beyond the end" else self.before - int(changed.min())
            found.append(f"up to {far:,} elements {side} of {self.name}")
        return " and ".join(found)


def _guarded(tensor: Tensor, name: str, around: int) -> Guarded:
    """Copy a tensor contiguously, with at least this many elements of known numbers before and behind it."""
    step = max(1, _ALIGNED // tensor.element_size())
    around = -(-around // step) * step
    numbers = _numbers(2 * around, tensor.dtype, str(tensor.device))
    whole = torch.cat([numbers[:around], tensor.detach().reshape(-1), numbers[around:]])
    return Guarded(name, whole[around : around + tensor.numel()].view(tensor.shape), whole, around, numbers)


@lru_cache(maxsize=64)
def _numbers(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Draw known numbers: from a seed, of normal size."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float32)
    return drawn.to(device, dtype)


class GuardedKernel:
    """A kernel whose inputs and allocations are guarded.

    Attributes:
        assay: the kernel's declaration.
        written: calls in which it wrote outside of its tensors, and where, in words that follow "the kernel".
    """

    def __init__(self, kernel: Kernel) -> None:
        self.assay = declaration(kernel)
        self.written: list[tuple[AttentionCall, str]] = []
        self._kernel = kernel

    def __call__(self, call: AttentionCall) -> Tensor:
        __tracebackhide__ = True
        return self.among(call, {})

    def among(self, call: AttentionCall, numbers: Mapping[tuple[str, Side], Tensor]) -> Tensor:
        """Compute the output with other numbers on some sides of some inputs, each as long as `Guarded.front`; see `guards_of`."""
        __tracebackhide__ = True
        inputs = guards_of(call)
        for guarded in inputs:
            for side in SIDES:
                if (guarded.name, side) in numbers:
                    guarded.side(side).copy_(numbers[guarded.name, side])
        tensors: dict[str, Any] = {guarded.name: guarded.tensor for guarded in inputs}
        given = replace(call, **tensors)
        made: list[Guarded] = []
        for guarded in inputs:
            _bound(guarded)
        try:
            with memory.watching() as seen, _Allocations(made, call.q.device), kernel_threads():
                out = tensor_of(self._kernel(given))
        finally:
            for guarded in (*inputs, *made):
                memory.inside.pop(guarded.whole.untyped_storage().data_ptr(), None)
        for guarded in inputs:  # a kernel that writes to its inputs is found by whoever gave them
            original = getattr(call, guarded.name)
            if not same_values(guarded.tensor, original):
                original.copy_(guarded.tensor)
        stores = [overrun.words for overrun in seen if overrun.does == "writes"]
        stores += [f"writes {words}" for guarded in (*inputs, *made) if not numbers and (words := guarded.written())]
        if stores:
            self.written.append((call, stores[0]))
        return out


def guards_of(call: AttentionCall) -> list[Guarded]:
    """Make guarded copies of the inputs of a call; an input that is no block of memory is left as it lies."""
    found = []
    for name in _GUARDED:
        tensor = getattr(call, name)
        if tensor.is_contiguous() and tensor.numel():
            heads = max(call.q.shape[1], _ROWS * tensor.shape[1])
            found.append(_guarded(tensor, name, heads * tensor.shape[2]))
    return found


def _bound(one: Guarded) -> None:
    storage, size = one.whole.untyped_storage(), one.whole.element_size()
    start = storage.data_ptr()
    memory.inside[start] = (start + one.before * size, start + (one.before + one.tensor.numel()) * size)


_ALLOCATE: tuple[Callable[..., Any], ...] = (
    torch.empty, torch.empty_like, Tensor.new_empty, torch.zeros, torch.zeros_like, Tensor.new_zeros
)  # fmt: skip


class _Allocations(TorchFunctionMode):
    """Guards the tensors that are allocated through PyTorch on one device; while a kernel is compiled, none."""

    def __init__(self, found: list[Guarded], device: torch.device) -> None:
        super().__init__()
        self._found, self._device = found, device

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
        self._found.append(kept)
        _bound(kept)
        return kept.tensor
