"""SGLang's Triton kernels ``extend_attention_fwd`` and ``decode_attention_fwd``, of any module.

K and V lie in a pool of slots. ``kv_indices`` names those of each sequence: in extend of its cached prefix, in decode of all its
tokens. ``sliding_window_size`` is the number of keys before a query's own. Decode has no such parameter: SGLang names the slots of
the window alone, and so does the adapter. Decode takes the position of a query from their number, so no temperature is passed on
to it. Beside a pool in FP8, which has one scale of K and one of V, both cast queries and weights to its dtype; extend takes the new
tokens' K and V in that of Q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    WITHOUT_SCALE,
    Adapter,
    Attend,
    Parameters,
    out_of,
    scaled,
    scales_of,
)
from assay.harness.attention.call import WITHOUT_LSE, AttentionCall, KernelRefused, Outputs, cumulative
from assay.harness.attention.paging import paged

# Parts into which decode splits the keys of a sequence, as SGLang's `--triton-attention-num-kv-splits`.
_SPLITS = 8
_UNEQUAL = "with unequal splits"
# Not e5m2: the cost of casting Q and weights to it is not a named noise family.
_STORED = ("stored_kv: e4m3 per tensor",)


def _asked(function: Any, call: AttentionCall) -> dict[str, Any]:
    """Return both functions' arguments for the requests of a call's spec."""
    k_scale, v_scale = scales_of(call, _STORED) or (1.0, 1.0)
    asked: dict[str, Any] = {**scaled(call, "sm_scale"), "k_scale": float(k_scale), "v_scale": float(v_scale)}
    if call.spec.softcap:
        asked["logit_cap"] = call.spec.softcap
    if call.spec.sinks:
        asked["sinks"] = torch.tensor(call.spec.sinks, device=call.q.device)
    if call.spec.temperature:
        asked["xai_temperature_len"] = call.spec.temperature
    return asked


def _extend(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    pool = paged(call, 1)
    new = torch.cat([torch.arange(n) >= p for n, p in zip(call.lens_k, call.prefixes, strict=True)]).to(call.q.device)
    passed = _asked(function, call) | {
        "q_extend": call.q.contiguous(), "k_extend": call.k[new], "v_extend": call.v[new],
        "k_buffer": pool.k.flatten(0, 1), "v_buffer": pool.v.flatten(0, 1), "qo_indptr": call.cu_seqlens_q,
        "kv_indptr": cumulative(call.prefixes, call.q.device), "kv_indices": pool.slots[~new], "custom_mask": None,
        "is_causal": call.causal, "mask_indptr": None, "max_len_extend": max(call.lens_q),
    }  # fmt: skip
    if call.spec.mask.window:
        passed["sliding_window_size"] = call.spec.mask.window - 1
    has_lse = "lse_extend" in parameters.names and WITHOUT_LSE not in call.spec.ways

    def attend() -> Tensor | Outputs:
        out = out_of(call)
        if not has_lse:
            function(**passed, o_extend=out)
            return out
        lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
        function(**passed, o_extend=out, lse_extend=lse)
        return Outputs(out, lse)

    return attend


def _splits_of(call: AttentionCall) -> Tensor:
    """Return the number of splits of each sequence's keys: SGLang splits long sequences into more parts than short ones."""
    most = torch.full((len(call.lens_q),), _SPLITS, dtype=torch.int32, device=call.q.device)
    return 1 + torch.arange(len(most)).to(most) % _SPLITS if _UNEQUAL in call.spec.ways else most


def _decode(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    if max(call.lens_q) != 1 or min(call.lens_q) != 1:
        raise KernelRefused("decode_attention_fwd computes one query of each sequence")
    pool, device = paged(call, 1), call.q.device
    window = call.spec.mask.window
    seen = torch.cat([torch.arange(n) >= (n - window if window else 0) for n in call.lens_k]).to(device)
    batch, heads = call.q.shape[:2]
    splits = call.q.new_empty(batch, heads, _SPLITS, call.v.shape[2], dtype=torch.float32)
    passed = _asked(function, call) | {
        "q": call.q.contiguous(), "k_buffer": pool.k.flatten(0, 1), "v_buffer": pool.v.flatten(0, 1),
        "kv_indptr": cumulative((min(n, window or n) for n in call.lens_k), device), "kv_indices": pool.slots[seen],
        "attn_logits": splits, "attn_lse": torch.empty_like(splits[..., 0]), "max_kv_splits": _SPLITS,
        "num_kv_splits": _splits_of(call),
    }  # fmt: skip

    def attend() -> Tensor:
        out = out_of(call)
        function(**passed, o=out)
        return out

    return attend


_ASKS = {"softcap": ("logit_cap",), "sinks": ("sinks",), **dict.fromkeys(_STORED, ())}
_IN_FEWER_BITS = ("stored_kv",)
EXTEND = Adapter(
    "sglang-triton",
    (
        "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr", "kv_indices",
        "custom_mask", "is_causal", "mask_indptr", "max_len_extend", "k_scale", "v_scale", "sm_scale",
    ),
    _ASKS | {
        "window": ("sliding_window_size",), "temperature": ("xai_temperature_len",),
        "lse": ("lse_extend",), "padding": (),
    },
    _extend,
    phases=("extend",),
    ways={WITHOUT_LSE: ("lse_extend",), WITHOUT_SCALE: ("sm_scale",)},
    in_fewer_bits=_IN_FEWER_BITS,
)  # fmt: skip
DECODE = Adapter(
    "sglang-triton",
    (
        "q", "k_buffer", "v_buffer", "o", "kv_indptr", "kv_indices", "attn_logits", "attn_lse", "num_kv_splits",
        "max_kv_splits", "sm_scale", "k_scale", "v_scale",
    ),
    _ASKS | {"window": ()},
    _decode,
    phases=("decode",),
    ways={WITHOUT_SCALE: ("sm_scale",), _UNEQUAL: ()},
    in_fewer_bits=_IN_FEWER_BITS,
)  # fmt: skip
