"""PyTorch's scaled_dot_product_attention as a kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import sequences


@declares(about="PyTorch's scaled_dot_product_attention, one sequence at a time")
def torch_sdpa(call: AttentionCall) -> Tensor:
    """Run PyTorch's own attention, one sequence at a time; on a GPU, FlashAttention for half precision.

    It is slower than a packed kernel for batches of many short sequences.
    """
    outs = []
    for rows, keys in sequences(call):
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[rows], call.k[keys], call.v[keys]))
        masked, uncached = call.causal and q.shape[2] > 1, q.shape[2] == k.shape[2]
        mask = _lower_right(q.shape[2], k.shape[2], q.device) if masked and not uncached else None
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=masked and uncached,
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _lower_right(new: int, keys: int, device: torch.device) -> Tensor:
    """Make the causal mask of some new tokens after a cached prefix."""
    if device.type == "cpu":
        return torch.ones(new, keys, dtype=torch.bool).tril_(keys - new)
    from torch.nn.attention.bias import causal_lower_right  # brings PyTorch's compiler along, which takes seconds

    return causal_lower_right(new, keys)
