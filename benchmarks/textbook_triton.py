"""Twelve attention kernels in Triton as authors write them: plain wrappers without declarations, three right and nine wrong.

Each body is that of a tutorial: online softmax over tiles, `tl.dot`, GQA by `head // group`. `WRONG` names the one mistake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay import AttentionCall

BLOCK_M, BLOCK_N, PAGE, SPLITS = 32, 32, 16, 4
# What stands for a constant of the kernel in each wrapper.
RIGHT, TOP_LEFT, TOTAL_NOT_RESCALED, ACC_NOT_RESCALED, TILES_LOST, HEAD_NOT_DIVIDED, HEAD_MODULO, STORE_NOT_MASKED = (
    range(8)
)
TAIL_NOT_MASKED, PLAIN_MEAN = 8, 9


@triton.jit
def _varlen(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_q_ptr, cu_k_ptr, scale, stride_q, stride_k, stride_v, stride_out,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
    WRONG: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    if block * BLOCK_M >= len_q:
        return
    kv_head = head // GROUP
    if WRONG == 5:  # HEAD_NOT_DIVIDED
        kv_head = head
    if WRONG == 6:  # HEAD_MODULO
        kv_head = head % KV_HEADS
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(
        q_ptr + (start_q + rows)[:, None] * stride_q + head * HEAD_DIM + dims[None, :],
        mask=rows[:, None] < len_q,
        other=0.0,
    )
    prefix = len_k - len_q
    if WRONG == 1:  # TOP_LEFT
        prefix = 0
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = tl.minimum(len_k, prefix + (block + 1) * BLOCK_M)
    if WRONG == 4:  # TILES_LOST: without the cached prefix
        end = tl.minimum(len_k, (block + 1) * BLOCK_M)
    for first in range(0, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        at = (start_k + columns)[:, None]
        inside = columns[:, None] < len_k
        k = tl.load(k_ptr + at * stride_k + kv_head * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + at * stride_v + kv_head * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (columns[None, :] <= prefix + rows[:, None]) & (columns[None, :] < len_k)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        if WRONG == 2:  # noqa: SIM108 (TOTAL_NOT_RESCALED)
            total = total + tl.sum(weights, 1)
        else:
            total = total * shrink + tl.sum(weights, 1)
        if WRONG != 3:  # ACC_NOT_RESCALED
            acc = acc * shrink[:, None]
        acc = acc + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    at_out = (start_q + rows)[:, None] * stride_out + head * HEAD_DIM + dims[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    if WRONG == 7:  # STORE_NOT_MASKED
        tl.store(out_ptr + at_out, out)
    else:
        tl.store(out_ptr + at_out, out, mask=rows[:, None] < len_q)


@triton.jit
def _paged(
    q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, cu_q_ptr, len_k_ptr, scale, stride_q, stride_page, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PAGE: tl.constexpr, WRONG: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_q = tl.load(cu_q_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(len_k_ptr + sequence)
    if block * BLOCK_M >= len_q:
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims, slots = tl.arange(0, HEAD_DIM), tl.arange(0, PAGE)
    at_q = (start_q + rows)[:, None] * stride_q + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at_q, mask=rows[:, None] < len_q, other=0.0)
    prefix = len_k - len_q
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    pages = tl.cdiv(len_k, PAGE)
    if WRONG == 4:  # TILES_LOST: the last page, unless it is full
        pages = len_k // PAGE
    for number in range(pages):
        page = tl.load(table_ptr + sequence * stride_table + number)
        columns = number * PAGE + slots
        at_k = page * stride_page + slots[:, None] * (stride_page // PAGE) + (head // GROUP) * HEAD_DIM + dims[None, :]
        k, v = tl.load(k_ptr + at_k), tl.load(v_ptr + at_k)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = columns[None, :] <= prefix + rows[:, None]
        scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_q, out, mask=rows[:, None] < len_q)


@triton.jit
def _split(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, row_sequence_ptr, cu_q_ptr, cu_k_ptr, scale, stride_q, stride_k,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,  # noqa: N803
    WRONG: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(row_sequence_ptr + row)
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    visible = len_k - len_q + row - start_q + 1
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + row * stride_q + head * HEAD_DIM + dims).to(tl.float32)
    each = tl.cdiv(tl.cdiv(visible, SPLITS), BLOCK_N) * BLOCK_N
    best, total = -1.0e30, 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in range(split * each, tl.minimum(split * each + each, visible), BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        at = (start_k + columns)[:, None] * stride_k + (head // GROUP) * HEAD_DIM + dims[None, :]
        if WRONG == 8:  # TAIL_NOT_MASKED
            k, v = tl.load(k_ptr + at).to(tl.float32), tl.load(v_ptr + at).to(tl.float32)
            scores = tl.sum(q[None, :] * k, 1) * scale
        else:
            inside = (columns < visible)[:, None]
            k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
            scores = tl.where(columns < visible, tl.sum(q[None, :] * k, 1) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * v, 0)
        best = higher
    slot = (row * HEADS + head) * SPLITS + split
    tl.store(part_ptr + slot * HEAD_DIM + dims, acc / tl.maximum(total, 1.0e-30))
    tl.store(lse_ptr + slot, best + tl.log(tl.maximum(total, 1.0e-30)))


@triton.jit
def _merge(
    part_ptr, lse_ptr, out_ptr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, WRONG: tl.constexpr  # noqa: N803
):  # fmt: skip
    slot = tl.program_id(0) * HEADS + tl.program_id(1)
    dims, splits = tl.arange(0, HEAD_DIM), tl.arange(0, SPLITS)
    lse = tl.load(lse_ptr + slot * SPLITS + splits)
    parts = tl.load(part_ptr + (slot * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :])
    weights = tl.exp(lse - tl.max(lse, 0))
    if WRONG == 9:  # PLAIN_MEAN
        weights = tl.where(lse > -1.0e29, 1.0, 0.0)
    merged = tl.sum(weights[:, None] * parts, 0) / tl.sum(weights, 0)
    tl.store(out_ptr + slot * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty))


def _run_varlen(call: AttentionCall, wrong: int) -> Tensor:
    q, k, v = call.q.contiguous(), call.k.contiguous(), call.v.contiguous()
    out = torch.empty_like(q)
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    grid = (triton.cdiv(max(call.lens_q), BLOCK_M), heads, len(call.lens_q))
    _varlen[grid](
        q, k, v, out, call.cu_seqlens_q, call.cu_seqlens_k, call.scale, q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, WRONG=wrong,
    )  # fmt: skip
    return out


def _run_paged(call: AttentionCall, wrong: int) -> Tensor:
    q, (kv_heads, head_dim) = call.q.contiguous(), call.k.shape[1:]
    counts = [triton.cdiv(length, PAGE) for length in call.lens_k]
    k_pages, v_pages = (call.k.new_zeros(sum(counts), PAGE, kv_heads, head_dim) for _ in range(2))
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=q.device)
    start = page = 0
    for sequence, (length, count) in enumerate(zip(call.lens_k, counts, strict=True)):
        table[sequence, :count] = torch.arange(page, page + count)
        k_pages[page : page + count].view(-1, kv_heads, head_dim)[:length] = call.k[start : start + length]
        v_pages[page : page + count].view(-1, kv_heads, head_dim)[:length] = call.v[start : start + length]
        start, page = start + length, page + count
    out, heads = torch.empty_like(q), q.shape[1]
    grid = (triton.cdiv(max(call.lens_q), BLOCK_M), heads, len(counts))
    _paged[grid](
        q, k_pages, v_pages, table, out, call.cu_seqlens_q, call.cu_seqlens_k.diff(), call.scale, q.stride(0), k_pages.stride(0),
        table.stride(0), GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, PAGE=PAGE, WRONG=wrong,
    )  # fmt: skip
    return out


def _run_split(call: AttentionCall, wrong: int) -> Tensor:
    q, k, v = call.q.contiguous(), call.k.contiguous(), call.v.contiguous()
    rows, heads, head_dim = q.shape
    part = torch.empty(rows, heads, SPLITS, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, SPLITS, dtype=torch.float32, device=q.device)
    sequence = torch.repeat_interleave(torch.arange(len(call.lens_q), device=q.device), call.cu_seqlens_q.diff()).int()
    out = torch.empty_like(q)
    shape = {"HEADS": heads, "HEAD_DIM": head_dim, "SPLITS": SPLITS, "WRONG": wrong}
    _split[rows, heads, SPLITS](
        q, k, v, part, lse, sequence, call.cu_seqlens_q, call.cu_seqlens_k, call.scale, q.stride(0), k.stride(0),
        GROUP=heads // k.shape[1], BLOCK_N=BLOCK_N, **shape,
    )  # fmt: skip
    _merge[rows, heads](part, lse, out, **shape)
    return out


def varlen(call: AttentionCall) -> Tensor:
    """Right: packed sequences."""
    return _run_varlen(call, RIGHT)


def paged(call: AttentionCall) -> Tensor:
    """Right: K and V in pages of 16 tokens."""
    return _run_paged(call, RIGHT)


def split_kv(call: AttentionCall) -> Tensor:
    """Right: the keys of a query in 4 parts, merged by their log-sum-exp."""
    return _run_split(call, RIGHT)


def top_left(call: AttentionCall) -> Tensor:
    """Wrong: the causal mask knows no cached prefix."""
    return _run_varlen(call, TOP_LEFT)


def total_not_rescaled(call: AttentionCall) -> Tensor:
    """Wrong: the denominator is not rescaled when the maximum rises."""
    return _run_varlen(call, TOTAL_NOT_RESCALED)


def acc_not_rescaled(call: AttentionCall) -> Tensor:
    """Wrong: the numerator is not rescaled when the maximum rises."""
    return _run_varlen(call, ACC_NOT_RESCALED)


def tiles_lost(call: AttentionCall) -> Tensor:
    """Wrong: the loop over tiles ends at the diagonal of a call without a cached prefix."""
    return _run_varlen(call, TILES_LOST)


def head_not_divided(call: AttentionCall) -> Tensor:
    """Wrong: a q head reads the kv head of its own number, beyond the last one where there are fewer."""
    return _run_varlen(call, HEAD_NOT_DIVIDED)


def head_modulo(call: AttentionCall) -> Tensor:
    """Wrong: kv heads are taken in turn."""
    return _run_varlen(call, HEAD_MODULO)


def store_not_masked(call: AttentionCall) -> Tensor:
    """Wrong: whole tiles of queries are stored, into the next sequence and beyond the output."""
    return _run_varlen(call, STORE_NOT_MASKED)


def last_page_lost(call: AttentionCall) -> Tensor:
    """Wrong: a page that is not full is not read."""
    return _run_paged(call, TILES_LOST)


def parts_averaged(call: AttentionCall) -> Tensor:
    """Wrong: the parts of a query's keys are averaged, whatever their weights."""
    return _run_split(call, PLAIN_MEAN)


CORRECT: tuple[Callable[[AttentionCall], Tensor], ...] = (varlen, paged, split_kv)
WRONG: tuple[Callable[[AttentionCall], Tensor], ...] = (
    top_left, total_not_rescaled, acc_not_rescaled, tiles_lost, head_not_divided, head_modulo, store_not_masked, last_page_lost,
    parts_averaged,
)  # fmt: skip
