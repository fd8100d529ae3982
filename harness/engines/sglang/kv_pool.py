"""An SGLang batch with paged K and V as one packed `AttentionCall`, for served kernels and for the shadow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, KernelRefused, Mask, StoredKV, cumulative
from assay.harness.attention.paging import slots_of

# SGLang's forward modes for the extend phase of the contract. Others are speculative, diffusion or split prefill.
_EXTEND_MODES = ("EXTEND", "MIXED")
# Arguments with the last dims of q and k, which some backends of latent attention take separately.
_OF_LATENTS = ("q_rope", "k_rope")
# Dtypes of a KV pool that stores K and V divided by one scale each.
_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
_PATH = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NUMBER = "assay_layer"


def number_layers(model: Any) -> None:
    """Store the decoder layer's number in each attention module of a model; one without a numbered path keeps its ``layer_id``.

    SGLang's ``layer_id`` names a place in the KV pool, and several layers may read the same one: Gemma 3n and 4 have layers that
    read K and V of an earlier one. The two attentions of a DeepSeek layer, on latents and on K and V made from them, share a
    number.
    """
    for path, module in model.named_modules():
        numbers = _PATH.findall(path)
        if hasattr(module, "layer_id") and hasattr(module, "tp_q_head_num") and numbers:
            setattr(module, _NUMBER, int(numbers[-1]))


def layer_number(attention: Any) -> int:
    """Return the number of the decoder layer that an attention module is in."""
    return int(getattr(attention, _NUMBER, attention.layer_id))


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
    """Read the requests of a call of an SGLang layer, which `who` would have to compute, with arguments beyond the common ones.

    SGLang's layers have the configured window minus one, the number of keys before a query's own; -1 means that there is no
    window.

    Raises:
        KernelRefused: the contract does not express what the layer needs, or one of its arguments.
    """
    known = ("sinks", *_OF_LATENTS) if _reads_v_in_k(layer) else ("sinks",)
    cap, before = float(layer.logit_cap or 0.0), layer.sliding_window_size
    method = getattr(layer, "logit_capping_method", "tanh")
    wants = {
        f"a logit cap by {method!r}": bool(cap) and method != "tanh",
        "cross attention": layer.is_cross_attention,
        "non-causal attention": layer.attn_type.value != "decoder",
        "chunked local attention": getattr(layer, "use_irope", False),
    } | {f"the argument {name!r}": value is not None for name, value in arguments.items() if name not in known}
    if any(wants.values()):
        what = " and ".join(feature for feature, wanted in wants.items() if wanted)
        raise KernelRefused(
            f"layer {layer_number(layer)} needs {what}, which the kernel contract does not express, so {who} cannot serve it"
        )
    sinks = arguments.get("sinks")
    return CallSpec(
        layer.scaling,
        mask=Mask(window=before + 1 if before is not None and before > -1 else 0),
        layer=layer_number(layer),
        phase=phase,
        softcap=cap,
        temperature=max(0, getattr(layer, "xai_temperature_len", None) or 0),
        sinks=() if sinks is None else tuple(sinks.tolist()),
    )


def _scales_of(layer: Any) -> tuple[float, float]:
    """Return the factors of a layer's stored K and V, or 1 if its checkpoint has no scales."""
    scales = []
    for name in ("k_scale", "v_scale"):
        number = getattr(layer, f"{name}_float", None)
        # A number from --quantization-param-path, or None.
        scale = getattr(layer, name, None) if number is None else number
        scales.append(1.0 if scale is None else float(scale))
    return scales[0], scales[1]


def _reads_v_in_k(layer: Any) -> bool:
    """Return True for the one kv head of absorbed latent attention, whose v are the first dims of k."""
    dims: tuple[int, int] = (layer.qk_head_dim, getattr(layer, "v_head_dim", layer.qk_head_dim))
    return dims[0] > dims[1] and layer.tp_k_head_num == 1


def joined_rope(q: Tensor, k: Tensor | None, layer: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Append the dims of q and k that come as separate arguments, if latent attention separates them."""
    if arguments.get("q_rope") is not None:
        q = torch.cat([x.reshape(len(q), layer.tp_q_head_num, -1) for x in (q, arguments["q_rope"][: len(q)])], -1)
    if k is not None and arguments.get("k_rope") is not None:
        k = torch.cat([x.reshape(len(k), 1, -1) for x in (k, arguments["k_rope"][: len(k)])], -1)
    return q, k


def _gathered(buffer: Tensor, slots: Tensor) -> Tensor:
    """Copy rows of a buffer. PyTorch does not index FP8, so the bytes are copied."""
    return buffer.view(torch.uint8)[slots].view(buffer.dtype) if buffer.dtype in _STORED else buffer[slots]


class Pages:
    """The KV pool of a running server, read as packed calls. Paging is resolved once per batch.

    If layers with a window have a separate pool, the slots of the table are translated to its slots.
    """

    def __init__(self, runner: Any) -> None:
        self._requests = runner.req_to_token_pool
        self._cache = runner.token_to_kv_pool
        self._latents: int = getattr(getattr(self._cache, "full_kv_pool", self._cache), "kv_lora_rank", 0)
        self._virtual = getattr(getattr(runner, "kv_index_translator", None), "is_translating", False)
        self._paging: _Paging | None = None

    def stores_fewer_bits(self, layer: Any, k: Tensor | None) -> bool:
        """Return True if the pool stores K and V of a layer in fewer bits than the layer gives them."""
        return k is not None and self._cache.get_key_buffer(layer.layer_id).dtype != k.dtype

    def write(self, layer: Any, batch: Any, k: Tensor, v: Tensor) -> None:
        """Write the new tokens' K and V to the pool, divided by the layer's scales if it stores fewer bits.

        Raises:
            KernelRefused: see `packed_call`.
        """
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        of_window = self._is_of_window(layer)
        window = self._cache.translate_loc_from_full_to_swa(batch.out_cache_loc) if of_window else None
        where = KVWriteLoc(batch.out_cache_loc, window)
        if self._latents:  # a pool of latents takes no scales
            self._cache.set_kv_buffer(
                layer, where, k / _scales_of(layer)[0] if self.stores_fewer_bits(layer, k) else k, v
            )
        elif self.stores_fewer_bits(layer, k):  # SGLang divides the given tensor in place
            self._cache.set_kv_buffer(layer, where, k.clone(), v.clone(), *_scales_of(layer))
        else:
            self._cache.set_kv_buffer(layer, where, k, v)

    def packed_call(
        self, spec: CallSpec, q: Tensor, layer: Any, batch: Any, new: list[int], prefix: list[int],
        own: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> AttentionCall:  # fmt: skip
        """Pack the call: K and V of each complete sequence, gathered (copied) from the pool. q is a view.

        If the pool has latents, a layer reads them as they are (`CallSpec.layout` "v in k"), or its own K and V that it made from
        them.

        Args:
            q: [tokens, heads * head_dim].
            batch: SGLang's ForwardBatch. Its K and V are in the pool.
            own: K and V that the layer was given.

        Raises:
            KernelRefused: the pool has another dtype or other slots, or lacks a key, or K and V are of a part of the keys.
        """
        paging = self._paging
        if paging is None or paging.batch is not batch or paging.lens != (new, prefix):
            paging = self._paging = _Paging.of(batch, new, prefix, self._requests.req_to_token)
        if self._latents and layer.v_head_dim != self._latents:
            return _of_layer(spec, q, layer, own, paging)
        kept = paging.of_window(self._cache, spec) if self._is_of_window(layer) else paging.all
        keys, values = self._cache.get_key_buffer(layer.layer_id), self._cache.get_value_buffer(layer.layer_id)
        if keys.dtype not in (q.dtype, *_STORED):
            raise KernelRefused(
                f"the KV cache is {keys.dtype} and q is {q.dtype}; start the server without --kv-cache-dtype, or with fp8_e4m3"
            )
        stored, latent = None, bool(self._latents)
        if latent and keys.shape[-1] != layer.qk_head_dim:
            raise KernelRefused(
                f"the KV cache packs latents into {keys.shape[-1]} numbers; start SGLang with its default pool"
            )
        k = _gathered(keys, kept.slots)
        v = k[..., : layer.v_head_dim] if latent else _gathered(values, kept.slots)
        if keys.dtype != q.dtype:
            scales = [torch.full((1, 1, 1), scale, device=q.device) for scale in _scales_of(layer)]
            stored = StoredKV(k, v, *scales)
            k, v = ((x.float() * scale).to(q.dtype) for x, scale in zip((k, v), scales, strict=True))
            v = k[..., : layer.v_head_dim] if latent else v
        return AttentionCall(
            q=q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k=k,
            v=v,
            cu_seqlens_q=paging.cu_seqlens_q,
            cu_seqlens_k=kept.cu_seqlens,
            spec=replace(spec, layout="v in k") if latent else spec,
            stored=stored,
        )

    def _is_of_window(self, layer: Any) -> bool:
        """Return True if the layer's K and V are in a pool for layers with a window.

        Raises:
            KernelRefused: its slots are not those of the table.
        """
        if self._virtual or getattr(self._cache, "swa_req_ring_size", None) is not None:
            raise KernelRefused(
                "the slots of the KV pool are virtual or a ring; start the server with SGLang's default pool"
            )
        of_layers: Mapping[int, tuple[int, bool]] = getattr(self._cache, "layers_mapping", {})
        return bool(of_layers.get(layer.layer_id, (0, False))[1])


def _of_layer(
    spec: CallSpec, q: Tensor, layer: Any, own: tuple[Tensor | None, Tensor | None], paging: _Paging
) -> AttentionCall:
    """Pack the call of a layer that made K and V from the latents itself, for all tokens of the sequences."""
    k, v = own
    keys = int(paging.all.cu_seqlens[-1])
    if k is None or v is None or len(k) != keys:
        raise KernelRefused(
            f"layer {layer_number(layer)} attends to {0 if k is None else len(k)} of {keys} keys in one of several parts that are "
            "merged later, which are not observed"
        )
    heads, dims = layer.tp_q_head_num, (layer.qk_head_dim, layer.v_head_dim)
    k, v = (x.reshape(keys, -1, dim) for x, dim in zip((k, v), dims, strict=True))
    return AttentionCall(q.view(-1, heads, dims[0]), k, v, paging.cu_seqlens_q, paging.all.cu_seqlens, spec)


@dataclass(frozen=True)
class _Kept:
    """The keys of a batch that a pool has: their slots, int64 [keys], and their cumulative number by sequence, int32 [batch + 1].

    The pool no longer has the first `evicted` ones of each sequence.
    """

    slots: Tensor
    cu_seqlens: Tensor
    evicted: Sequence[int]


@dataclass
class _Paging:
    """The places of a batch's tokens: the same for every layer of a pool."""

    batch: Any
    lens: tuple[list[int], list[int]]
    all: _Kept
    cu_seqlens_q: Tensor
    _of_window: _Kept | None = None

    @classmethod
    def of(cls, batch: Any, new: list[int], prefix: list[int], table: Tensor) -> _Paging:
        lens_k = [n + p for n, p in zip(new, prefix, strict=True)]
        slots = slots_of(table, batch.req_pool_indices.tolist(), lens_k)
        every = _Kept(slots, cumulative(lens_k, table.device), [0] * len(lens_k))
        return cls(batch, (new, prefix), every, cumulative(new, table.device))

    def of_window(self, cache: Any, spec: CallSpec) -> _Kept:
        """Return the keys that the pool of layers with a window has: the last ones of each sequence.

        SGLang drops keys that no later query sees. A call with the others is the same attention, since a mask counts from the
        right.

        Raises:
            KernelRefused: a query needs dropped keys, or has a temperature, which depends on the number of all keys.
        """
        if self._of_window is None:
            self._of_window = self._translated(cache)
        seen_from = [max(0, p + 1 - spec.mask.window) if spec.mask.window else 0 for p in self.lens[1]]
        if any(dropped > first for dropped, first in zip(self._of_window.evicted, seen_from, strict=True)):
            raise KernelRefused(
                f"layer {spec.layer} needs keys that the KV pool no longer has: of each sequence, the first "
                f"{', '.join(map(str, self._of_window.evicted))}"
            )
        if spec.temperature and any(self._of_window.evicted):
            raise KernelRefused(
                f"layer {spec.layer} has a temperature, and the KV pool no longer has the first keys of its "
                "sequences: a call of the others would have other positions"
            )
        return self._of_window

    def _translated(self, cache: Any) -> _Kept:
        lens_k = [n + p for n, p in zip(*self.lens, strict=True)]
        slots = cache.translate_loc_from_full_to_swa(self.all.slots)
        has = slots > 0  # 0 is SGLang's padding, which marks a dropped key
        device = slots.device
        position = torch.cat([torch.arange(length, device=device) for length in lens_k])
        sequence = torch.repeat_interleave(
            torch.arange(len(lens_k), device=device), torch.tensor(lens_k, device=device)
        )
        first = torch.zeros(len(lens_k), dtype=torch.int64, device=device)
        first.scatter_reduce_(0, sequence, torch.where(has, 0, position + 1), "amax")
        evicted = first.tolist()
        kept = [length - dropped for length, dropped in zip(lens_k, evicted, strict=True)]
        return _Kept(slots[position >= first[sequence]], cumulative(kept, device), evicted)
