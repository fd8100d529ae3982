"""An SGLang batch with paged K and V as one packed `AttentionCall`, for served kernels and for the shadow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, Mask, cumulative
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


def spec_of(layer: Any, arguments: Mapping[str, Any], phase: Literal["extend", "decode"], who: str) -> CallSpec:
    """Read what an SGLang layer asks of a call.

    SGLang's layers have the window of the model's configuration minus one, the number of keys before a query's own; -1 is none.

    Args:
        layer: SGLang's RadixAttention.
        arguments: the call's keyword arguments beyond the common ones, for example ``sinks``. A plain layer passes none.
        phase: "extend" or "decode".
        who: what would have to compute the call, for the error.

    Raises:
        KernelRefused: the contract does not express what the layer needs, or an argument other than ``sinks`` is not None.
    """
    cap, before = float(layer.logit_cap or 0.0), layer.sliding_window_size
    method = getattr(layer, "logit_capping_method", "tanh")
    wants = {
        f"a logit cap by {method!r}": bool(cap) and method != "tanh",
        "cross attention": layer.is_cross_attention,
        "non-causal attention": layer.attn_type.value != "decoder",
        "chunked local attention": getattr(layer, "use_irope", False),
    } | {f"the argument {name!r}": value is not None for name, value in arguments.items() if name != "sinks"}
    if any(wants.values()):
        what = " and ".join(feature for feature, wanted in wants.items() if wanted)
        raise KernelRefused(
            f"layer {layer.layer_id} needs {what}, which the kernel contract does not express, so {who} cannot serve it"
        )
    sinks = arguments.get("sinks")
    return CallSpec(
        layer.scaling,
        mask=Mask(window=before + 1 if before is not None and before > -1 else 0),
        layer=layer.layer_id,
        phase=phase,
        softcap=cap,
        temperature=max(0, getattr(layer, "xai_temperature_len", None) or 0),
        sinks=() if sinks is None else tuple(sinks.tolist()),
    )


class Pages:
    """The KV pool of a running server, read as packed calls. Paging is resolved once per batch.

    Where layers with a window have a pool of their own, with slots of its own, the slots of the table are translated to it.
    """

    def __init__(self, runner: Any) -> None:
        self._requests = runner.req_to_token_pool
        self._cache = runner.token_to_kv_pool
        self._virtual = getattr(getattr(runner, "kv_index_translator", None), "is_translating", False)
        self._paging: _Paging | None = None

    def write(self, layer: Any, batch: Any, k: Tensor, v: Tensor | None) -> None:
        """Write the new tokens' K and V to the pool.

        Raises:
            KernelRefused: see `packed_call`.
        """
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        of_window = self._is_of_window(layer)
        window = self._cache.translate_loc_from_full_to_swa(batch.out_cache_loc) if of_window else None
        self._cache.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, window), k, v)

    def packed_call(
        self, spec: CallSpec, q: Tensor, layer: Any, batch: Any, new: list[int], prefix: list[int]
    ) -> AttentionCall:
        """Pack the call: K and V of each complete sequence, gathered (copied) from the pool. q is a view.

        Args:
            spec: what the layer asks for.
            q: [tokens, heads * head_dim].
            layer: SGLang's RadixAttention.
            batch: SGLang's ForwardBatch. Its K and V are in the pool.
            new: new tokens per sequence.
            prefix: cached prefix per sequence.

        Raises:
            KernelRefused: the pool's dtype is not that of q, its slots are not those of the table, or it holds no longer all keys.
        """
        paging = self._paging
        if paging is None or paging.batch is not batch or paging.lens != (new, prefix):
            paging = self._paging = _Paging.of(batch, new, prefix, self._requests.req_to_token)
        slots = paging.slots
        if self._is_of_window(layer):
            slots = paging.slots_of_window(self._cache)
            if paging.evicted:
                raise KernelRefused(
                    f"layer {layer.layer_id} no longer has {paging.evicted} keys that were outside of its window, and the kernel "
                    "contract has only calls with all keys"
                )
        keys, values = self._cache.get_key_buffer(layer.layer_id), self._cache.get_value_buffer(layer.layer_id)
        if keys.dtype != q.dtype:
            raise KernelRefused(
                f"the KV cache is {keys.dtype} and q is {q.dtype}; start the server without --kv-cache-dtype"
            )
        return AttentionCall(
            q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k=keys[slots],
            v=values[slots],
            cu_seqlens_q=paging.cu_seqlens_q,
            cu_seqlens_k=paging.cu_seqlens_k,
            spec=spec,
        )

    def _is_of_window(self, layer: Any) -> bool:
        """Return True if the layer's K and V are in a pool for layers with a window."""
        if self._virtual or getattr(self._cache, "swa_req_ring_size", None) is not None:
            raise KernelRefused(
                "the slots of the KV pool are virtual or a ring; start the server with SGLang's default pool"
            )
        of_layers: Mapping[int, tuple[int, bool]] = getattr(self._cache, "layers_mapping", {})
        return bool(of_layers.get(layer.layer_id, (0, False))[1])


@dataclass
class _Paging:
    """The places of a batch's tokens in the pool: the same for every layer, but for those with a pool of their own."""

    batch: Any
    lens: tuple[list[int], list[int]]
    slots: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    evicted: int = 0
    _of_window: Tensor | None = None

    @classmethod
    def of(cls, batch: Any, new: list[int], prefix: list[int], table: Tensor) -> _Paging:
        lens_k = [n + p for n, p in zip(new, prefix, strict=True)]
        requests = batch.req_pool_indices.tolist()
        slots = slots_of(table, requests, lens_k)
        return cls(batch, (new, prefix), slots, cumulative(new, table.device), cumulative(lens_k, table.device))

    def slots_of_window(self, cache: Any) -> Tensor:
        """Translate the slots to the pool of layers with a window, and count the keys that it no longer has."""
        if self._of_window is None:
            self._of_window = cache.translate_loc_from_full_to_swa(self.slots)
            self.evicted = int((self._of_window <= 0).sum())  # 0 is SGLang's padding
        return self._of_window
