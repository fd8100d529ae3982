"""A FlashAttention-style kernel in Triton, for packed sequences with cached prefixes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay import AttentionCall, KernelRefused, declares

BLOCK_M, BLOCK_N = 64, 64


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_q_ptr, cu_k_ptr,
    scale, stride_q, stride_k, stride_out,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: N803
):  # fmt: skip
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_q, start_k = tl.load(cu_q_ptr + sequence), tl.load(cu_k_ptr + sequence)
    len_q = tl.load(cu_q_ptr + sequence + 1) - start_q
    len_k = tl.load(cu_k_ptr + sequence + 1) - start_k
    if block * BLOCK_M >= len_q:
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    at_q = (start_q + rows)[:, None] * stride_q + head * HEAD_DIM + dims[None, :]
    at_out = (start_q + rows)[:, None] * stride_out + head * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at_q, mask=rows[:, None] < len_q, other=0.0)

    prefix = len_k - len_q
    # One past the last key that any row of this block sees; nothing beyond it is read.
    end = tl.minimum(len_k, prefix + (block + 1) * BLOCK_M)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in range(0, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        at_k = (start_k + columns)[:, None] * stride_k + (head // GROUP) * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + at_k, mask=columns[:, None] < len_k, other=0.0)
        v = tl.load(v_ptr + at_k, mask=columns[:, None] < len_k, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (columns[None, :] <= prefix + rows[:, None]) & (columns[None, :] < len_k)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    tl.store(out_ptr + at_out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=rows[:, None] < len_q)


@declares(
    about="FlashAttention in Triton, for packed sequences",
    kernels=("^_attend$",),
    head_dims=(16, 32, 64, 128, 256),
    dtypes=("float16", "bfloat16"),
)
def forward(call: AttentionCall) -> Tensor:
    """Attention of a packed batch, [total_q, heads, head_dim].

    Raises:
        KernelRefused: The call is not causal, or its dtype or head_dim is not supported.
    """
    heads, head_dim = call.q.shape[1:]
    if not call.causal:
        raise KernelRefused("only causal attention is supported")
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        raise KernelRefused(f"{call.q.dtype} is not supported, only float16 and bfloat16")
    if head_dim not in (16, 32, 64, 128, 256) or call.v.shape[2] != head_dim:
        raise KernelRefused(f"head_dim {head_dim} with head_dim_v {call.v.shape[2]} is not supported")
    # Triton's interpreter has no bfloat16 dot; compiled, the kernel computes in the dtype of the call.
    computed = torch.float32 if call.q.dtype == torch.bfloat16 and not call.q.is_cuda else call.q.dtype
    q, k, v = (tensor.to(computed).contiguous() for tensor in (call.q, call.k, call.v))
    out = torch.empty_like(q)
    grid = (triton.cdiv(max(call.lens_q), BLOCK_M), heads, len(call.lens_q))
    _attend[grid](
        q, k, v, out, call.cu_seqlens_q, call.cu_seqlens_k, call.scale, q.stride(0), k.stride(0), out.stride(0),
        GROUP=heads // k.shape[1], HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return out.to(call.q.dtype)
