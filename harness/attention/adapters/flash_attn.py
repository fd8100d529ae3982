"""``flash_attn_varlen_func``: of FlashAttention 2, 3 and 4, of vLLM's fork, and of SGLang's kernels.

Its causal mask is aligned bottom-right, as that of the contract. ``window_size`` has the numbers of keys before and after a query's
own. Sinks are named ``s_aux``, ``sinks`` or ``learnable_sink``, and are bfloat16. Log-sum-exps are natural, [heads, total_q].
FlashAttention 3 takes K and V in FP8 with a Q in FP8 alone, and returns bfloat16: Q is cast as it comes, as SGLang's fa3 does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import Adapter, Attend, Parameters, scales_of
from assay.harness.attention.call import AttentionCall, KernelRefused, Outputs

_SINKS = ("s_aux", "sinks", "learnable_sink")
_STORED = ("stored_kv: e4m3 per tensor", "stored_kv: e4m3 per head")
_LSE = ("return_softmax_lse", "return_attn_probs", "return_lse")


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    spec = call.spec
    passed: dict[str, Any] = {
        "q": call.q, "k": call.k, "v": call.v, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": max(call.lens_q), "max_seqlen_k": max(call.lens_k), "softmax_scale": call.scale, "causal": call.causal,
    }  # fmt: skip
    if call.stored and (scales := scales_of(call, _STORED)):
        if call.q.dtype != torch.bfloat16:
            raise KernelRefused("beside a stored_kv in FP8, FlashAttention computes bfloat16")
        shape = len(call.lens_k), call.k.shape[1]
        passed |= {"q": call.q.to(torch.float8_e4m3fn), "k": call.stored.k, "v": call.stored.v}
        passed |= {name: scale.expand(shape) for name, scale in zip(("k_descale", "v_descale"), scales, strict=True)}
    if spec.mask.window:
        passed["window_size"] = (spec.mask.window - 1, 0)
    if spec.softcap:
        passed["softcap"] = spec.softcap
    if spec.sinks:
        passed[parameters.first(_SINKS)] = torch.tensor(spec.sinks, dtype=torch.bfloat16, device=call.q.device)
    if name := parameters.first(_LSE):
        passed[name] = True

    def attend() -> Tensor | Outputs:
        made: Tensor | tuple[Tensor, ...] = function(**passed)
        return Outputs(made[0], made[1].T if name else None) if isinstance(made, tuple) else made

    return attend


FLASH_ATTN = Adapter(
    "flash_attn",
    (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
    ),
    {
        "window": ("window_size",), "softcap": ("softcap",), "sinks": _SINKS, "lse": _LSE,
        "padding": (), "not_causal": (),
    } | dict.fromkeys(_STORED, ("k_descale",)),
    _lay_out,
    in_fewer_bits=("stored_kv",),
)  # fmt: skip
