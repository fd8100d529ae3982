"""A plain function of a paged cache, by the names that its parameters usually have: q, both caches, a block table and lengths.

The caches are [pages, page, num_kv_heads, head_dim]. With the cumulative lengths of Q, it computes packed Q in extend and decode;
without them one query of each sequence, [batch, num_q_heads, head_dim], or as FlashAttention has it where the lengths are named
`cache_seqlens`, [batch, 1, num_q_heads, head_dim]. A function without a parameter for it is causal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from assay.harness.attention.adapters.adapter import (
    PAGED,
    ROUNDED_K,
    SIZE_WORDS,
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
)
from assay.harness.attention.call import AttentionCall, KernelRefused, Outputs
from assay.harness.attention.paging import PagedKV, paged

_PAGES = (16, 32, 64)
# Of a function that says that it takes another size, the first that it takes is tried.
_LARGER = {16: 32, 32: 64, 64: 128, 128: 256}
_ROLES = {
    "q": ("q", "query"),
    "k_cache": ("k_cache", "key_cache"),
    "v_cache": ("v_cache", "value_cache"),
    "block_table": ("block_table", "block_tables", "page_table", "page_tables"),
    "seq_lens": ("seq_lens", "seqlens", "context_lens", "cache_seqlens", "seqused_k", "kv_lens"),
}
_EDGES = ("cu_seqlens_q", "query_start_loc", "qo_indptr")
_SCALES, _OUTS, _CAUSAL = ("softmax_scale", "scale", "sm_scale"), ("out", "output"), ("causal", "is_causal")
_SOFTCAP = ("softcap", "soft_cap", "logits_soft_cap")
_LONGEST_Q = ("max_seqlen_q", "max_query_len")
_LONGEST_K = ("max_seqlen_k", "max_seq_len", "max_context_len")
_PAGE, _KV_HEADS = ("page_size", "block_size"), ("num_kv_heads",)


@dataclass(frozen=True)
class _Spelled(Adapter):
    """A signature whose parameters have one of several names."""

    def missing(self, parameters: Parameters) -> tuple[str, ...]:
        return tuple(name for name in self.passes if not parameters.first(_ROLES.get(name, _EDGES)))


def _laid_out(pool: PagedKV, layout: str) -> PagedKV:
    """Lay the caches out as a call's K and V are: both or K as parts of a cache, or with the tokens of a head together."""
    if layout == "heads first":
        k, v = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (pool.k, pool.v))
        return replace(pool, k=k, v=v)
    if layout in ("sliced", "each its own"):
        both = beside_each_other(pool)
        return both if layout == "sliced" else replace(both, v=pool.v)
    return pool


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall, usual: int = _PAGES[0]) -> Attend:
    edges = parameters.first(_EDGES)
    if not edges and set(call.lens_q) != {1}:
        raise KernelRefused("without cu_seqlens_q, it takes one query of each sequence")
    page = next((page for page in _PAGES if f"{PAGED}: pages of {page} tokens" in call.spec.ways), usual)
    pool, (most_q, most_k) = _laid_out(paged(call, page), call.spec.layout), longest(call)
    name = {role: parameters.first(names) for role, names in _ROLES.items()}
    batched = not edges and name["seq_lens"] == "cache_seqlens"
    table = block_table(pool, page, most_k)
    passed: dict[str, Any] = {
        name["q"]: call.q[:, None] if batched else call.q, name["k_cache"]: pool.k, name["v_cache"]: pool.v,
        name["block_table"]: table, name["seq_lens"]: call.cu_seqlens_k.diff(),
    }  # fmt: skip
    others = (
        (_EDGES, call.cu_seqlens_q), (_CAUSAL, call.causal), (_LONGEST_Q, most_q), (_LONGEST_K, most_k), (_PAGE, page),
        (_KV_HEADS, call.k.shape[1]),
    )  # fmt: skip
    passed |= {known: value for names, value in others if (known := parameters.first(names))}
    passed |= scaled(call, parameters.first(_SCALES)) if parameters.first(_SCALES) else {}
    passed |= {parameters.first(_SOFTCAP): call.spec.softcap} if call.spec.softcap else {}
    if (written := parameters.first(_OUTS)) and (WITH_OUT in call.spec.ways or written in parameters.required):
        passed[written] = out_of(call)[:, None] if batched else out_of(call)

    def attend() -> Tensor | Outputs:
        try:
            made = function(**passed)
        except Exception as error:
            asked = any(way.startswith(PAGED) for way in call.spec.ways)
            if asked or page not in _LARGER or not any(word in str(error).lower() for word in SIZE_WORDS):
                raise
            return _lay_out(function, parameters, call, _LARGER[page])()
        first: Tensor = passed[written] if written in passed else made[0] if isinstance(made, tuple) else made
        return first.reshape(*call.q.shape[:2], -1)

    return attend


_ALSO = tuple(
    name
    for names in (*_ROLES.values(), _LONGEST_Q, _LONGEST_K, _PAGE, _KV_HEADS, _CAUSAL, _SCALES, _OUTS)
    for name in names
)
_ASKS = {"softcap": _SOFTCAP, "not_causal": _CAUSAL}
_WAYS = {WITHOUT_SCALE: _SCALES, WITH_OUT: _OUTS, ROUNDED_K: _LONGEST_K, PAGED: ()}
PAGED_CACHE = _Spelled(
    "paged", (*_ROLES, "cu_seqlens_q"), _ASKS, _lay_out, also=(*_ALSO, *_EDGES), ways=_WAYS, pages=lambda _: _PAGES
)
PAGED_CACHE_DECODE = _Spelled(
    "paged", tuple(_ROLES), _ASKS, _lay_out, phases=("decode",), also=_ALSO, ways=_WAYS, pages=lambda _: _PAGES
)
