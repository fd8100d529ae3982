"""Four kernels for a nightly sweep: one is right, one is slow to write, and two are wrong in ways that smoke tests do not see."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from assay import declares


def _attend(call, diagonal, scale=1.0):
    """Compute attention sequence by sequence; `diagonal` tells from the new and all keys where the causal mask begins."""
    out = []
    for b in range(len(call.cu_seqlens_q) - 1):
        q = call.q[call.cu_seqlens_q[b] : call.cu_seqlens_q[b + 1]].transpose(0, 1)
        k, v = (x[call.cu_seqlens_k[b] : call.cu_seqlens_k[b + 1]].transpose(0, 1) for x in (call.k, call.v))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(
            diagonal(q.shape[1], k.shape[1])
        )
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale * scale, enable_gqa=True)
        out.append(o.transpose(0, 1))
    return torch.cat(out)


def right(call):
    """Attention as it should be."""
    return _attend(call, lambda new, all_: all_ - new)


@declares(phases=("decode",))
def decode_only(call):
    """The same, in decode alone: the engine's own backend computes prefill."""
    return right(call)


def top_left(call):
    """Wrong with a cached prefix: the causal mask is aligned top-left."""
    return _attend(call, lambda new, all_: 0)


def off_by_a_percent(call):
    """Wrong a little, everywhere: the scale of the scores is 1 % too large."""
    return _attend(call, lambda new, all_: all_ - new, scale=1.01)
