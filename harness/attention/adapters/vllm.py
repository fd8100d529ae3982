"""vLLM's Triton kernel ``unified_attention``, of any module: K and V in a paged cache, with a block table.

``window_size`` has the numbers of keys before and after a query's own, (-1, -1) for no window. A cache in FP8 has one scale of K
and one of V, and is dequantised to the dtype of Q.

vLLM passes buffers in which decode of small batches computes the keys in segments, and in CUDA graphs the length of the context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    FP8_PER_TENSOR,
    ROUNDED_K,
    ROUNDED_Q,
    Adapter,
    Attend,
    Parameters,
    block_table,
    longest,
    out_of,
    scales_of,
)
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.paging import paged

# Tokens per page: vLLM's default.
_PAGE = 16
# Segments of a sequence's keys, and the most sequences that are computed in them, times kv heads: vLLM's.
_SEGMENTS, _SEGMENTED = 16, 128
_WITH_SEGMENTS = "with segments"
_BUFFERS = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    pool, device = paged(call, _PAGE), call.q.device
    window = call.spec.mask.window
    shape = len(call.lens_k), call.k.shape[1]
    most_q, most_k = longest(call)
    table = block_table(pool, _PAGE, most_k)
    unscaled = torch.ones(1, device=device)
    k_descale, v_descale = (scale.expand(shape) for scale in scales_of(call) or (unscaled, unscaled))
    passed: dict[str, Any] = {
        "q": call.q, "k": pool.k, "v": pool.v, "cu_seqlens_q": call.cu_seqlens_q, "max_seqlen_q": most_q,
        "seqused_k": call.cu_seqlens_k.diff(), "max_seqlen_k": most_k, "softmax_scale": call.scale,
        "causal": call.causal, "window_size": (window - 1, 0) if window else (-1, -1), "block_table": table,
        "softcap": call.spec.softcap, "q_descale": None, "k_descale": k_descale, "v_descale": v_descale,
    }  # fmt: skip
    if call.spec.sinks:
        passed["sinks"] = torch.tensor(call.spec.sinks, device=device)

    if _WITH_SEGMENTS in call.spec.ways:
        most = _SEGMENTED // call.k.shape[1]
        segments = most, call.q.shape[1], _SEGMENTS
        shapes = (*segments, 1 << (call.v.shape[2] - 1).bit_length()), segments, segments
        passed |= {"seq_threshold_3D": most, "num_par_softmax_segments": _SEGMENTS}
        passed |= {name: torch.empty(each, device=device) for name, each in zip(_BUFFERS, shapes, strict=True)}

    def attend() -> Tensor:
        out = out_of(call)
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
    also=("seq_threshold_3D", "num_par_softmax_segments", *_BUFFERS),
    ways={ROUNDED_Q: (), ROUNDED_K: (), _WITH_SEGMENTS: _BUFFERS},
)  # fmt: skip
