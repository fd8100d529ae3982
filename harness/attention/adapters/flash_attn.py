"""FlashAttention's functions: ``flash_attn_varlen_func`` of FlashAttention 2, 3 and 4, of vLLM's fork, and of SGLang's kernels;
``flash_attn_with_kvcache`` of the same; and vLLM's Triton kernel ``unified_attention``, of any module.

Their causal mask is aligned bottom-right, as that of the contract. ``window_size`` has the numbers of keys before and after a
query's own. Sinks are named ``s_aux``, ``sinks`` or ``learnable_sink``; the Triton kernel's alone are not bfloat16. Log-sum-exps
are natural, [heads, total_q]. FlashAttention 3 takes K and V in FP8 with a Q in FP8 alone, and returns bfloat16: Q is cast as it
comes, as SGLang's fa3 does.

vLLM passes `block_table`, `seqused_k` in place of the cumulative lengths, and `out`; FlashAttention 4 and SGLang name the table
`page_table`; FlashAttention 2 has the lengths in `cu_seqlens_k` all the same. Neither engine asks for log-sum-exps but to merge
parts, and both pass the length of the context in CUDA graphs, vLLM also all rows of a mixed batch. Both pass `num_splits`: 1 for
results that do not depend on the batch, in CUDA graphs the most that they have memory for.

SGLang's fa3 and fa4 call ``flash_attn_with_kvcache`` in extend and decode, with Q packed; in extend with the cumulative lengths of
all keys in `cu_seqlens_k_new`, which speak of new K and V where these are passed. That of FlashAttention 2 has no cumulative
lengths: engines (vLLM before its version 1, nano-vllm) call it in decode, with one query of each sequence. Whoever passes new K and
V has the function write them to the cache.

``unified_attention`` dequantises a cache in FP8, with one scale of K and one of V, to the dtype of Q. vLLM passes buffers in which
decode of small batches computes the keys in segments, and in CUDA graphs the length of the context.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    FP8_PER_TENSOR,
    PAGED,
    ROUNDED_K,
    ROUNDED_Q,
    WITH_OUT,
    WITHOUT_SCALE,
    Adapter,
    Attend,
    Parameters,
    beside_each_other,
    block_table,
    longest,
    out_of,
    scaled,
    scales_of,
)
from assay.harness.attention.call import WITHOUT_LSE, AttentionCall, KernelRefused, Outputs
from assay.harness.attention.paging import STALE, PagedKV, paged

_SINKS = ("s_aux", "sinks", "learnable_sink")
_STORED = ("stored_kv: e4m3 per tensor", "stored_kv: e4m3 per head")
_LSE = ("return_softmax_lse", "return_attn_probs", "return_lse")
_TABLES = ("block_table", "page_table")
_SPLITS = {"in one part": 1, "in 32 parts": 32}
_WITH_NEW = "with new K and V"
_WITH_LENGTHS = "with lengths of all keys"
_TOKEN_PAGES = "with pages of a token"


def _asked(parameters: Parameters, call: AttentionCall) -> dict[str, Any]:
    """Return FlashAttention's arguments for a call's spec, and Q and the scales of stored K and V."""
    spec = call.spec
    asked: dict[str, Any] = {"q": call.q, "causal": call.causal} | scaled(call, "softmax_scale")
    if scales := scales_of(call, _STORED):
        if call.q.dtype != torch.bfloat16:
            raise KernelRefused("with a stored_kv in FP8, FlashAttention computes only bfloat16")
        shape = len(call.lens_k), call.k.shape[1]
        asked |= {name: scale.expand(shape) for name, scale in zip(("k_descale", "v_descale"), scales, strict=True)}
        asked["q"] = call.q.to(torch.float8_e4m3fn)
    if spec.mask.window:
        asked["window_size"] = (spec.mask.window - 1, 0)
    if spec.softcap:
        asked["softcap"] = spec.softcap
    if spec.sinks:
        asked[parameters.first(_SINKS)] = torch.tensor(spec.sinks, dtype=torch.bfloat16, device=call.q.device)
    if lse := "" if WITHOUT_LSE in spec.ways else parameters.first(_LSE):
        asked[lse] = True
    if parts := [parts for way, parts in _SPLITS.items() if way in spec.ways]:
        asked["num_splits"] = max(parts)
    return asked


def _computed(function: Any, passed: dict[str, Any], call: AttentionCall) -> Tensor | Outputs:
    """Call a function of FlashAttention: Q, and so its outputs, may have an axis of one query for each sequence."""
    out = {"out": out_of(call).view(passed["q"].shape[:-1] + call.v.shape[2:])} if WITH_OUT in call.spec.ways else {}
    made: Tensor | tuple[Tensor, ...] = function(**passed, **out)
    first, *more = made if isinstance(made, tuple) else (made,)
    first = out.get("out", first).reshape(*call.q.shape[:2], -1)
    if not more or not any(passed.get(name) for name in _LSE):
        return first
    return Outputs(first, more[0].squeeze(-1) if passed["q"].dim() == 4 else more[0].T)


def _pages(parameters: Parameters) -> tuple[int, ...]:
    """Return the page sizes that a function accepts, the engines' size first."""
    if "page_table" in parameters.names:
        return 128, 64  # FlashAttention 4 copies pages that are not a tile of 128 keys in another way
    # vLLM's fork takes multiples of 16, and FlashAttention 2 of 256
    return (16, 32) if "seqused_k" in parameters.names else (256, 512)


def _varlen(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    most_q, most_k = longest(call)
    given = call.stored or call
    passed = _asked(parameters, call) | {
        "k": given.k, "v": given.v, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": most_q, "max_seqlen_k": most_k,
    }  # fmt: skip
    if page := next((page for page in _pages(parameters) if f"{PAGED}: pages of {page} tokens" in call.spec.ways), 0):
        table, used = parameters.first(_TABLES), "seqused_k" in parameters.names
        pool = paged(call, page)
        passed |= {"k": pool.k, "v": pool.v, table: block_table(pool, page, most_k)}
        passed |= {"cu_seqlens_k": None, "seqused_k": call.cu_seqlens_k.diff()} if used else {}
    return partial(_computed, function, passed, call)


def _with_kvcache(function: Any, parameters: Parameters, call: AttentionCall, packed: bool) -> Attend:
    if not packed and set(call.lens_q) != {1}:
        raise KernelRefused("without cu_seqlens_q, engines call it with one query of each sequence")
    ways = call.spec.ways
    most_q, most_k = longest(call)
    page = 256 if not packed else 1 if _TOKEN_PAGES in ways else 128
    asked, pool = _asked(parameters, call), paged(call, page)
    passed = asked | {
        "k_cache": pool.k, "v_cache": pool.v, "cache_seqlens": call.cu_seqlens_k.diff(), "k": None, "v": None,
        "page_table" if packed else "block_table": block_table(pool, page, most_k),
    }  # fmt: skip
    if packed:
        passed |= {"cu_seqlens_q": call.cu_seqlens_q, "max_seqlen_q": most_q}
    else:
        passed["q"] = asked["q"][:, None]
    if _WITH_LENGTHS in ways:
        passed["cu_seqlens_k_new"] = call.cu_seqlens_k
    if _WITH_NEW not in ways or call.stored or min(call.prefixes) < 0:
        return partial(_computed, function, passed, call)
    lens_q, lens_k = call.cu_seqlens_q.diff(), call.cu_seqlens_k.diff()
    new = torch.cat([torch.arange(n) >= p for n, p in zip(call.lens_k, call.prefixes, strict=True)]).to(call.k.device)
    shape = (-1,) if packed else (-1, 1)
    passed |= {name: x[new].view(*shape, *x.shape[1:]) for name, x in (("k", call.k), ("v", call.v))}
    passed["cache_seqlens"] = lens_k - lens_q
    if packed:
        passed["cu_seqlens_k_new"] = call.cu_seqlens_q
    return partial(_appended, function, passed, call, pool, pool.slots[new])


def _appended(function: Any, passed: dict[str, Any], call: AttentionCall, pool: PagedKV, slots: Tensor) -> Any:
    """Call a function that should write new K and V to stale slots of a pool.

    Raises:
        ValueError: it did not write them.
    """
    for cache in (pool.k, pool.v):
        cache.flatten(0, 1)[slots] = STALE
    made = _computed(function, passed, call)
    for name, cache in (("k", pool.k), ("v", pool.v)):
        if not torch.equal(cache.flatten(0, 1)[slots], passed[name].flatten(0, -3)):
            raise ValueError(f"after the call, {name}_cache does not hold {name}, which was passed to be appended")
    return made


FLASH_ATTN = Adapter(
    "flash_attn",
    (
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
    ),
    {
        "window": ("window_size",), "softcap": ("softcap",), "sinks": _SINKS, "lse": _LSE,
        "padding": (), "not_causal": (),
    } | dict.fromkeys(_STORED, ("k_descale",)),
    _varlen,
    in_fewer_bits=("stored_kv",),
    ways={
        WITHOUT_LSE: _LSE, WITHOUT_SCALE: ("softmax_scale",), WITH_OUT: ("out",), ROUNDED_Q: (), ROUNDED_K: (),
        PAGED: (*_TABLES, "paged"), **dict.fromkeys(_SPLITS, ("num_splits",)),
    },
    pages=_pages,
)  # fmt: skip
_CACHED = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "softmax_scale", "causal")
_CACHED_ASKS = {name: parameters for name, parameters in FLASH_ATTN.asks.items() if name != "padding"}
_CACHED_WAYS = {way: FLASH_ATTN.ways[way] for way in (WITHOUT_LSE, WITHOUT_SCALE, WITH_OUT, ROUNDED_K, *_SPLITS)}
PACKED_KVCACHE = Adapter(
    "flash_attn_with_kvcache",
    (*_CACHED, "page_table", "cu_seqlens_q", "max_seqlen_q"),
    FLASH_ATTN.asks,
    partial(_with_kvcache, packed=True),
    in_fewer_bits=("stored_kv",),
    ways=_CACHED_WAYS | {
        ROUNDED_Q: (), _WITH_NEW: ("cu_seqlens_k_new", "in-place"), _WITH_LENGTHS: ("cu_seqlens_k_new",),
        _TOKEN_PAGES: ("page_table", "page size", "page_size"),
    },
)  # fmt: skip
BATCHED_KVCACHE = Adapter(
    "flash_attn_with_kvcache",
    (*_CACHED, "block_table"),
    _CACHED_ASKS,
    partial(_with_kvcache, packed=False),
    phases=("decode",),
    in_fewer_bits=("stored_kv",),
    ways=_CACHED_WAYS | {_WITH_NEW: ()},
)

# Tokens per page: vLLM's default, and others that it takes.
_PAGES = (16, 32, 64)
# Segments of a sequence's keys, and the most sequences that are computed in them, times kv heads: vLLM's.
_SEGMENTS, _SEGMENTED = 16, 128
_WITH_SEGMENTS = "with segments"
_BUFFERS = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")


def _unified(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    page = next((page for page in _PAGES if f"{PAGED}: pages of {page} tokens" in call.spec.ways), _PAGES[0])
    pool, device = beside_each_other(paged(call, page)), call.q.device
    window = call.spec.mask.window
    shape = len(call.lens_k), call.k.shape[1]
    most_q, most_k = longest(call)
    table = block_table(pool, page, most_k)
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
    _unified,
    also=("seq_threshold_3D", "num_par_softmax_segments", *_BUFFERS),
    ways={ROUNDED_Q: (), ROUNDED_K: (), PAGED: (), _WITH_SEGMENTS: _BUFFERS},
    pages=lambda _: _PAGES,
)  # fmt: skip
