"""SageAttention (PyPI ``sageattention`` 1.0.6) as a kernel: int8 QK, fp16 PV, Triton.

``sageattn_varlen`` aligns its causal mask top-left: query i of the new tokens sees keys 0 to i of the complete sequence. Its
documentation restricts causal to qo_len == kv_len, but nothing checks this. `sage_attn` only passes it calls that it computes
correctly. `sage_attn_as_shipped` passes it the calls that the backend of the seed case passed.

Its kernel also reads one K scale too many where a block has at most 64 of its 128 keys: the scale of the next sequence or, after
the last sequence, whatever is in memory. If that is NaN, so is the output. Both kernels here make sure that a finite number
follows; multiplied by masked keys, it has no effect.

On CUDA the package's public function is called with one more sequence of one token at the end, whose output is dropped. The public
function insists on CUDA tensors, so on the CPU its steps (smooth K, quantise per block, attend) run here one by one, with the
package's own Triton kernels under ``TRITON_INTERPRET=1`` and one more scale.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.declaration import declares

_HEAD_DIMS = (64, 128)
_PACKAGE = "sageattention"
for _name in (_PACKAGE, "triton"):
    if find_spec(_name) is None:  # both take long to import; a server should not be the first to notice
        raise ModuleNotFoundError(f"{_name} is not installed; the extra assay-harness[sage] brings it", name=_name)
_KERNELS = ("^_attn_fwd$", "^quant_per_block_int8_kernel$")
_ABOUT = "SageAttention 1.0.6, int8 QK, fp16 PV (Triton); decode is delegated"


@declares(phases=("extend",), package=_PACKAGE, about=_ABOUT, noise="int8_qk", kernels=_KERNELS)
def sage_attn(call: AttentionCall) -> Tensor:
    """Run SageAttention, correct with cached prefixes, chunked prefill, mixed lengths and grouped-query heads.

    The queries of each sequence are padded over its prefix, so that qo_len == kv_len and top-left is right-aligned. The padding
    repeats the first new query, so it never widens a block's quantisation scale. (Zeros would give a block of padding the scale 0.)

    Raises:
        KernelRefused: head_dim is not 64 or 128, head_dim_v is not head_dim, or q heads are not a multiple of kv heads.
    """
    if not call.causal or call.lens_q == call.lens_k:
        return _varlen(call)
    source: list[int] = []
    kept: list[int] = []
    start = total = 0
    for new, prefix in zip(call.lens_q, call.prefixes, strict=True):
        source += [start] * prefix + list(range(start, start + new))
        kept += range(total + prefix, total + prefix + new)
        start, total = start + new, total + prefix + new
    device = call.q.device
    padded = replace(call, q=call.q[torch.tensor(source, device=device)], cu_seqlens_q=call.cu_seqlens_k)
    return _varlen(padded)[torch.tensor(kept, device=device)]


@declares(
    phases=("extend",),
    package=_PACKAGE,
    about="called as in the seed case's backend: wrong with a cached prefix",
    noise="int8_qk",
    kernels=_KERNELS,
)
def sage_attn_as_shipped(call: AttentionCall) -> Tensor:
    """Run SageAttention on q of the new tokens and k and v of the whole sequence: the mask is top-left, as in the seed case.

    Raises:
        KernelRefused: as `sage_attn`.
    """
    return _varlen(call)


def _varlen(call: AttentionCall) -> Tensor:
    """Run ``sageattn_varlen`` on a call."""
    head_dim = call.q.shape[2]
    if head_dim not in _HEAD_DIMS or call.v.shape[2] != head_dim or call.q.shape[1] % call.k.shape[1]:
        raise KernelRefused(
            f"SageAttention cannot compute q {list(call.q.shape)}, k {list(call.k.shape)}, v {list(call.v.shape)}; it needs "
            f"head_dim 64 or 128, the same for v, and q heads that are a multiple of kv heads"
        )
    lens: dict[str, Any] = {"max_seqlen_q": max(call.lens_q), "max_seqlen_k": max(call.lens_k)}
    if not call.q.is_cuda:
        return _interpreted(call, **lens)
    from sageattention import sageattn_varlen

    q, k, v = (torch.cat([tensor, tensor[:1]]) for tensor in (call.q, call.k, call.v))  # the package writes to K
    cu = {"cu_seqlens_q": _one_more(call.cu_seqlens_q), "cu_seqlens_k": _one_more(call.cu_seqlens_k)}
    out: Tensor = sageattn_varlen(q, k, v, is_causal=call.causal, sm_scale=call.scale, **cu, **lens)
    return out[:-1]


def _one_more(cu_seqlens: Tensor) -> Tensor:
    """Append a sequence of one token to cumulative lengths."""
    return torch.cat([cu_seqlens, cu_seqlens[-1:] + 1])


def _interpreted(call: AttentionCall, max_seqlen_q: int, max_seqlen_k: int) -> Tensor:
    """Run the steps of ``sageattn_varlen``, on CPU tensors."""
    from sageattention import core

    k = call.k - call.k.mean(dim=0, keepdim=True)
    cu = (call.cu_seqlens_q, call.cu_seqlens_k)
    q_int8, q_scale, k_int8, k_scale, cu_q_scale, cu_k_scale = core.per_block_int8_varlen(
        call.q, k, *cu, max_seqlen_q, max_seqlen_k, sm_scale=call.scale
    )
    attend = core.attn_true_varlen if call.causal else core.attn_false_varlen
    scales = (q_scale, torch.cat([k_scale, k_scale[-1:]]), cu_q_scale, cu_k_scale)
    out: Tensor = attend(
        q_int8, k_int8, call.v.to(torch.float16), *cu, max_seqlen_q, *scales, output_dtype=call.q.dtype
    )
    return out
