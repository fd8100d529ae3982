"""From an engine's paged batch to one packed `AttentionCall`: shared by served kernels and by the shadow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, cumulative

EXTEND_MODES = ("EXTEND", "MIXED")
"""SGLang's forward modes that are the contract's extend phase; others are speculative, diffusion or split prefill."""


def lengths(phase: str, batch: Any, who: str) -> tuple[list[int], list[int]]:
    """New tokens and cached prefix of each sequence of an SGLang ``ForwardBatch``.

    Raises:
        KernelRefused: the batch's mode is none of the contract's phases.
    """
    if phase == "decode":
        lens = [int(n) for n in batch.seq_lens.tolist()]
        return [1] * len(lens), [n - 1 for n in lens]
    mode = batch.forward_mode.name
    if mode not in EXTEND_MODES:
        raise KernelRefused(f"{who} was asked to run {mode}; expected {' or '.join(EXTEND_MODES)}: start without it")
    return [int(n) for n in batch.extend_seq_lens_cpu], [int(n) for n in batch.extend_prefix_lens_cpu]


def refuse(layer: Any, who: str) -> None:
    """Refuse an SGLang layer whose attention the kernel contract cannot express.

    Raises:
        KernelRefused: it needs a sliding window, a logit cap, cross attention or attention that is not causal.
    """
    wants = {
        "a sliding window": (layer.sliding_window_size or -1) > -1,
        "a logit cap": bool(layer.logit_cap),
        "cross attention": layer.is_cross_attention,
        "attention that is not causal": layer.attn_type.value != "decoder",
    }
    if any(wants.values()):
        what = " and ".join(feature for feature, wanted in wants.items() if wanted)
        raise KernelRefused(
            f"layer {layer.layer_id} needs {what}; the kernel contract has none, so {who} cannot serve it"
        )


def compute(name: str, kernel: Kernel, call: AttentionCall) -> Tensor:
    """The kernel's output, [total_q, num_q_heads, head_dim_v].

    Raises:
        KernelRefused: its shape or dtype is not the contract's.
    """
    out = kernel(call)
    expected = (*call.q.shape[:2], call.v.shape[2])
    if out.shape != expected or out.dtype != call.q.dtype:
        raise KernelRefused(
            f"{name} returned {out.dtype} {list(out.shape)} in layer {call.layer}; "
            f"expected {call.q.dtype} {list(expected)}"
        )
    return out


class Pages:
    """The KV pool of a running server, read as packed calls."""

    def __init__(self, runner: Any) -> None:
        self._requests = runner.req_to_token_pool
        self._cache = runner.token_to_kv_pool
        self._paging = _Paging.none()

    def write(self, layer: Any, batch: Any, k: Tensor, v: Tensor | None) -> None:
        """Write the new tokens' K and V to the pool."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self._cache.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)

    def resolve(
        self, phase: str, q: Tensor, layer: Any, batch: Any, new: list[int], prefix: list[int]
    ) -> AttentionCall:
        """The packed call: K and V of each whole sequence gathered (copied) from the pool's pages; q is a view.

        Args:
            phase: "extend" or "decode".
            q: [tokens, heads * head_dim].
            layer: SGLang's RadixAttention.
            batch: SGLang's ForwardBatch, whose K and V are in the pool.
            new: new tokens of each sequence.
            prefix: cached prefix of each sequence.

        Raises:
            KernelRefused: the pool holds another dtype than q's.
        """
        if self._paging.batch is not batch or self._paging.lens != (new, prefix):
            self._paging = _Paging.of(batch, new, prefix, self._requests.req_to_token)
        keys, values = self._cache.get_key_buffer(layer.layer_id), self._cache.get_value_buffer(layer.layer_id)
        if keys.dtype != q.dtype:
            raise KernelRefused(f"the KV cache is {keys.dtype} and q is {q.dtype}; start without --kv-cache-dtype")
        return AttentionCall(
            q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k=keys[self._paging.slots],
            v=values[self._paging.slots],
            cu_seqlens_q=self._paging.cu_seqlens_q,
            cu_seqlens_k=self._paging.cu_seqlens_k,
            scale=layer.scaling,
            causal=True,
            layer=layer.layer_id,
            phase=phase,
        )


@dataclass(frozen=True)
class _Paging:
    """Where the tokens of a batch lie in the pool: the same for every layer, so resolved once a batch."""

    batch: Any
    lens: tuple[list[int], list[int]]
    slots: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def none(cls) -> _Paging:
        empty = torch.empty(0, dtype=torch.int32)
        return cls(None, ([], []), empty, empty, empty)

    @classmethod
    def of(cls, batch: Any, new: list[int], prefix: list[int], table: Tensor) -> _Paging:
        lens_k = [n + p for n, p in zip(new, prefix, strict=True)]
        requests = batch.req_pool_indices.tolist()
        slots = torch.cat([table[request, :length] for request, length in zip(requests, lens_k, strict=True)]).long()
        return cls(batch, (new, prefix), slots, cumulative(new, table.device), cumulative(lens_k, table.device))
