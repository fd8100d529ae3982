"""``flash_attn_varlen_func``: of FlashAttention 2, 3 and 4, of vLLM's fork, and of SGLang's kernels.

Its causal mask is aligned bottom-right, as that of the contract. ``window_size`` has the numbers of keys before and after a query's
own. Sinks are named ``s_aux``, ``sinks`` or ``learnable_sink``, and are bfloat16. Log-sum-exps are natural, [heads, total_q].
FlashAttention 3 takes K and V in FP8 with a Q in FP8 alone, and returns bfloat16: Q is cast as it comes, as SGLang's fa3 does.

vLLM passes `block_table`, `seqused_k` in place of the cumulative lengths, and `out`; FlashAttention 4 and SGLang name the table
`page_table`; FlashAttention 2 has the lengths in `cu_seqlens_k` all the same. Neither engine asks for log-sum-exps but to merge
parts, and both pass the length of the context in CUDA graphs, vLLM also all rows of a mixed batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    PAGED,
    ROUNDED_K,
    ROUNDED_Q,
    WITH_OUT,
    WITHOUT_SCALE,
    Adapter,
    Attend,
    Parameters,
    block_table,
    longest,
    out_of,
    scaled,
    scales_of,
)
from assay.harness.attention.call import WITHOUT_LSE, AttentionCall, KernelRefused, Outputs
from assay.harness.attention.paging import paged

_SINKS = ("s_aux", "sinks", "learnable_sink")
_STORED = ("stored_kv: e4m3 per tensor", "stored_kv: e4m3 per head")
_LSE = ("return_softmax_lse", "return_attn_probs", "return_lse")
_TABLES = ("block_table", "page_table")


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    spec = call.spec
    most_q, most_k = longest(call)
    passed: dict[str, Any] = {
        "q": call.q, "k": call.k, "v": call.v, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": most_q, "max_seqlen_k": most_k, "causal": call.causal,
    } | scaled(call, "softmax_scale")  # fmt: skip
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
    if lse := "" if WITHOUT_LSE in spec.ways else parameters.first(_LSE):
        passed[lse] = True
    if PAGED in spec.ways:
        passed |= _paged(parameters, call, most_k)

    def attend() -> Tensor | Outputs:
        out = {"out": out_of(call)} if WITH_OUT in spec.ways else {}
        made: Tensor | tuple[Tensor, ...] = function(**passed, **out)
        first, *more = made if isinstance(made, tuple) else (made,)
        first = out.get("out", first)
        return Outputs(first, more[0].T if lse and more else None) if more else first

    return attend


def _paged(parameters: Parameters, call: AttentionCall, keys: int) -> dict[str, Any]:
    """Return what is passed of K and V in a paged cache."""
    table, used = parameters.first(_TABLES), "seqused_k" in parameters.names
    # FlashAttention 2 takes multiples of 256; vLLM's pages have 16, and those of FlashAttention 4 the 128 of its tiles.
    page = 128 if table == "page_table" else 16 if used else 256
    pool = paged(call, page)
    lens = {"cu_seqlens_k": None, "seqused_k": call.cu_seqlens_k.diff()} if used else {}
    return {"k": pool.k, "v": pool.v, table: block_table(pool, page, keys), **lens}


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
    ways={
        WITHOUT_LSE: _LSE, WITHOUT_SCALE: ("softmax_scale",), WITH_OUT: ("out",), ROUNDED_Q: (), ROUNDED_K: (),
        PAGED: (*_TABLES, "paged"),
    },
)  # fmt: skip
