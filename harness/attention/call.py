"""The kernel contract: one packed ("varlen") attention call, with the engine's paging already resolved.

The same kernel therefore serves in a CPU server, in a GPU server, in a replay and in a unit test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
        cu_seqlens_q: int32 [batch + 1]; the queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: int32 [batch + 1], the same for keys and values.
        scale: softmax scale, natural-exponent convention: weights are softmax(scale * q k^T).
        causal: right-aligned: query i of a sequence sees keys j <= i + (len_k - len_q).
        layer: index of the layer that calls.
        phase: "extend" (prefill, with or without a cached prefix) or "decode".
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

    @property
    def lens_q(self) -> list[int]:
        """New tokens of each sequence."""
        return list(self.cu_seqlens_q.diff().tolist())

    @property
    def lens_k(self) -> list[int]:
        """All tokens of each sequence: cached prefix and new ones."""
        return list(self.cu_seqlens_k.diff().tolist())

    @property
    def prefixes(self) -> list[int]:
        """Cached prefix of each sequence, in tokens: len_k - len_q."""
        return [k - q for q, k in zip(self.lens_q, self.lens_k, strict=True)]


Kernel = Callable[[AttentionCall], Tensor]
"""Takes a call, returns [total_q, num_q_heads, head_dim_v] in the dtype of q, and writes into none of its inputs."""


class KernelRefused(RuntimeError):
    """A kernel was asked for what it cannot do. It raises; nothing ever falls back to another kernel in silence."""


def cumulative(lens: Iterable[int], device: torch.device | str = "cpu") -> Tensor:
    """Cumulative sequence lengths with a leading zero, int32 [len(lens) + 1]."""
    return torch.nn.functional.pad(torch.tensor(list(lens), dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(
        device
    )
