"""The kernel contract: one packed ("varlen") attention call, with the engine's paging already resolved.

The same kernel therefore runs in a CPU server, a GPU server, a replay and a unit test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # the command line reads what kernels declare and must not wait for torch
    import torch
    from torch import Tensor

INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
"""The tensors of a call."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention call over a batch of sequences laid end to end.

    Attributes:
        q: queries [total_q, num_q_heads, head_dim].
        k: keys [total_k, num_kv_heads, head_dim], cached prefix included.
        v: values [total_k, num_kv_heads, head_dim_v], cached prefix included.
        cu_seqlens_q: int32 [batch + 1]; sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
        cu_seqlens_k: int32 [batch + 1], the same for k and v.
        scale: softmax scale, natural-exponent convention: weights are softmax(scale * q k^T).
        causal: right-aligned: query i of a sequence sees keys j <= i + (len_k - len_q).
        layer: index of the calling layer.
        phase: "extend" (prefill, with or without a cached prefix) or "decode".
        first_head: number in the model of the first q head: in a call of one tensor-parallel process, or of some heads.
        layout: how `clone` lays q, k and v out in memory: "packed"; "sliced", in which each is a part of a wider tensor, as where a
            model splits one projection into the three; "heads first", in which all tokens of a head lie together; or "each its
            own", in which q is packed, and k and v are parts of tensors of different widths. The last axis is contiguous in each.
        grad_mode: mode of autograd under which checks call a kernel: "inference_mode", "no_grad" or "enable_grad", as functions of
            PyTorch are named; empty for that of the caller.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    scale: float
    causal: bool
    layer: int = 0
    phase: str = "extend"
    first_head: int = 0
    layout: str = "packed"
    grad_mode: str = ""

    @property
    def lens_q(self) -> list[int]:
        """New tokens per sequence."""
        return list(self.cu_seqlens_q.diff().tolist())

    @property
    def lens_k(self) -> list[int]:
        """All tokens per sequence: cached prefix and new tokens."""
        return list(self.cu_seqlens_k.diff().tolist())

    @property
    def prefixes(self) -> list[int]:
        """Cached prefix per sequence, in tokens: len_k - len_q."""
        return [k - q for q, k in zip(self.lens_q, self.lens_k, strict=True)]

    def clone(self) -> AttentionCall:
        """The same call on copies of its tensors, laid out as `layout` says, for a kernel that may write to its inputs."""
        copies = {name: getattr(self, name).clone() for name in INPUTS}
        if self.layout != "packed":
            laid = _LAID_OUT[self.layout]
            copies |= {name: lay(copies[name]) for name, lay in zip(("q", "k", "v"), laid, strict=True)}
        return replace(self, **copies)

    def grad_context(self) -> AbstractContextManager[object]:
        """A context with the call's mode of autograd."""
        import torch

        modes = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "enable_grad": torch.enable_grad}
        return modes[self.grad_mode]() if self.grad_mode else nullcontext()

    def to(self, device: torch.device | str) -> AttentionCall:
        """The same call with its tensors on a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in INPUTS})


def _sliced(tensor: Tensor, more: int = 1) -> Tensor:
    """The same numbers as the first heads of a wider tensor, whose other heads are NaN."""
    rows, heads, dim = tensor.shape
    wide = tensor.new_full((rows, heads + more, dim), float("nan"))
    wide[:, :heads] = tensor
    return wide[:, :heads]


def _heads_first(tensor: Tensor) -> Tensor:
    """The same numbers with the tokens of a head side by side."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


_LAID_OUT: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "sliced": (_sliced,) * 3,
    "heads first": (_heads_first,) * 3,
    "each its own": (lambda q: q, _sliced, lambda v: _sliced(v, 2)),
}
"""How q, k and v are laid out, by layout."""


def default_device() -> str:
    """Where calls run unless a device is named: "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


Kernel = Callable[[AttentionCall], "Tensor"]
"""Takes a call and returns [total_q, num_q_heads, head_dim_v] in the dtype of q. It must not write to its inputs."""


@runtime_checkable
class PreparedKernel(Protocol):
    """A kernel with work that an engine does once for all layers of a forward pass, such as laying K and V out in a pool."""

    def prepared(self, call: AttentionCall) -> AbstractContextManager[Callable[[], Tensor]]:
        """A context inside which that work is done. It gives a function that does the rest: what is timed."""


class KernelRefused(RuntimeError):
    """A kernel cannot serve this call. There is no silent fallback to another kernel."""


def refusal_behind(error: BaseException) -> KernelRefused | None:
    """The refusal that an exception was raised from, as where Triton's interpreter wraps whatever is raised inside a kernel."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KernelRefused):
        cause = cause.__cause__
    return cause


def cumulative(lens: Iterable[int], device: torch.device | str = "cpu") -> Tensor:
    """Cumulative sequence lengths with a leading zero, int32 [len(lens) + 1]."""
    import torch

    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32, device=device)
