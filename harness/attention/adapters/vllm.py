"""vLLM's Triton kernel ``unified_attention``, of any module: K and V in a paged cache, with a block table.

``window_size`` has the numbers of keys before and after a query's own, (-1, -1) for no window. A cache in FP8 has one scale of K
and one of V, and is dequantised to the dtype of Q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import FP8_PER_TENSOR, Adapter, Attend, Parameters, scales_of
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.paging import paged

# Tokens per page: vLLM's default.
_PAGE = 16


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    pool, device = paged(call, _PAGE), call.q.device
    window = call.spec.mask.window
    shape = len(call.lens_k), call.k.shape[1]
    unscaled = torch.ones(1, device=device)
    k_descale, v_descale = (scale.expand(shape) for scale in scales_of(call) or (unscaled, unscaled))
    passed: dict[str, Any] = {
        "q": call.q, "k": pool.k, "v": pool.v, "cu_seqlens_q": call.cu_seqlens_q, "max_seqlen_q": max(call.lens_q),
        "seqused_k": call.cu_seqlens_k.diff(), "max_seqlen_k": max(call.lens_k), "softmax_scale": call.scale,
        "causal": call.causal, "window_size": (window - 1, 0) if window else (-1, -1), "block_table": pool.block_table,
        "softcap": call.spec.softcap, "q_descale": None, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    if call.spec.sinks:
        passed["sinks"] = torch.tensor(call.spec.sinks, device=device)

    def attend() -> Tensor:
        out = call.q.new_empty(*call.q.shape[:2], call.v.shape[2])
        function(**passed, out=out)
        return out

    return attend


UNIFIED_ATTENTION = Adapter(
    "vllm",
    (
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal",
        "window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale",
    ),
    {"sinks": ("sinks",)}
    | dict.fromkeys(("window", "softcap", "padding", "not_causal", *FP8_PER_TENSOR), ()),
    _lay_out,
)  # fmt: skip
