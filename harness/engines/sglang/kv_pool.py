"""An SGLang batch with paged K and V as one packed `AttentionCall`, for served kernels and for the shadow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, cumulative
from assay.harness.attention.paging import slots_of

_EXTEND_MODES = ("EXTEND", "MIXED")
"""SGLang's forward modes that are the extend phase of the contract. Others are speculative, diffusion or split prefill."""


def lengths(phase: str, batch: Any, who: str) -> tuple[list[int], list[int]]:
    """Return new tokens and cached prefix per sequence of an SGLang ``ForwardBatch``.

    Raises:
        KernelRefused: the batch's mode is not a phase of the contract.
    """
    if phase == "decode":
        lens = [int(n) for n in batch.seq_lens.tolist()]
        return [1] * len(lens), [n - 1 for n in lens]
    mode = batch.forward_mode.name
    if mode not in _EXTEND_MODES:
        raise KernelRefused(
            f"{who} cannot run {mode} batches; expected {' or '.join(_EXTEND_MODES)}: start the server without that feature"
        )
    return [int(n) for n in batch.extend_seq_lens_cpu], [int(n) for n in batch.extend_prefix_lens_cpu]


def refuse_unsupported(layer: Any, arguments: Mapping[str, Any], who: str) -> None:
    """Refuse an SGLang call whose attention the kernel contract cannot express.

    Args:
        layer: SGLang's RadixAttention.
        arguments: the call's keyword arguments beyond the common ones, for example ``sinks``. A plain layer passes none.
        who: what would have to compute the call, for the error.

    Raises:
        KernelRefused: the layer needs more than causal attention, or an argument is not None.
    """
    wants = {
        "a sliding window": (layer.sliding_window_size or -1) > -1,
        "a logit cap": bool(layer.logit_cap),
        "cross attention": layer.is_cross_attention,
        "non-causal attention": layer.attn_type.value != "decoder",
        "chunked local attention": getattr(layer, "use_irope", False),
        "an attention temperature": (getattr(layer, "xai_temperature_len", None) or 0) > 0,
    } | {f"the argument {name!r}": value is not None for name, value in arguments.items()}
    if any(wants.values()):
        what = " and ".join(feature for feature, wanted in wants.items() if wanted)
        raise KernelRefused(
            f"layer {layer.layer_id} needs {what}, which the kernel contract does not express, so {who} cannot serve it"
        )


class Pages:
    """The KV pool of a running server, read as packed calls. Paging is resolved once per batch."""

    def __init__(self, runner: Any) -> None:
        self._requests = runner.req_to_token_pool
        self._cache = runner.token_to_kv_pool
        self._paging: _Paging | None = None

    def write(self, layer: Any, batch: Any, k: Tensor, v: Tensor | None) -> None:
        """Write the new tokens' K and V to the pool."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        self._cache.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)

    def packed_call(
        self, phase: Literal["extend", "decode"], q: Tensor, layer: Any, batch: Any, new: list[int], prefix: list[int]
    ) -> AttentionCall:
        """Pack the call: K and V of each complete sequence, gathered (copied) from the pool. q is a view.

        Args:
            phase: "extend" or "decode".
            q: [tokens, heads * head_dim].
            layer: SGLang's RadixAttention.
            batch: SGLang's ForwardBatch. Its K and V are in the pool.
            new: new tokens per sequence.
            prefix: cached prefix per sequence.

        Raises:
            KernelRefused: the pool's dtype is not that of q.
        """
        paging = self._paging
        if paging is None or paging.batch is not batch or paging.lens != (new, prefix):
            paging = self._paging = _Paging.of(batch, new, prefix, self._requests.req_to_token)
        keys, values = self._cache.get_key_buffer(layer.layer_id), self._cache.get_value_buffer(layer.layer_id)
        if keys.dtype != q.dtype:
            raise KernelRefused(
                f"the KV cache is {keys.dtype} and q is {q.dtype}; start the server without --kv-cache-dtype"
            )
        return AttentionCall(
            q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k=keys[paging.slots],
            v=values[paging.slots],
            cu_seqlens_q=paging.cu_seqlens_q,
            cu_seqlens_k=paging.cu_seqlens_k,
            spec=CallSpec(layer.scaling, layer=layer.layer_id, phase=phase),
        )


@dataclass(frozen=True)
class _Paging:
    """The places of a batch's tokens in the pool: the same for every layer."""

    batch: Any
    lens: tuple[list[int], list[int]]
    slots: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @classmethod
    def of(cls, batch: Any, new: list[int], prefix: list[int], table: Tensor) -> _Paging:
        lens_k = [n + p for n, p in zip(new, prefix, strict=True)]
        requests = batch.req_pool_indices.tolist()
        slots = slots_of(table, requests, lens_k)
        return cls(batch, (new, prefix), slots, cumulative(new, table.device), cumulative(lens_k, table.device))
