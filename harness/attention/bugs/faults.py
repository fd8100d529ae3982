"""Faults: correct kernels with one seeded bug, in chosen layers, heads and sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.oracle import oracle


def rounded_oracle(call: AttentionCall) -> Tensor:
    """Run the oracle as a kernel: float64 inside, rounded once to the dtype of q. Rows that belong to no sequence are NaN."""
    out = oracle(call).to(call.q.dtype)
    padded = call.spec.padded_rows
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padded), value=float("nan")) if padded else out


def fault(
    hypothesis: str,
    base_kernel: Kernel = rounded_oracle,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    when: Callable[[int, int], bool] | None = None,
) -> Kernel:
    """Make a kernel that is correct except for one bug. Values that the bug leaves undefined (a query that sees no key) are zero.

    Args:
        hypothesis: id of a hypothesis of `assay.harness.attention.bugs.family.FAMILY`, such as "mask-top-left".
        base_kernel: computes everything else.
        layers: layers with the bug; None for all.
        heads: q heads with the bug; None for all.
        when: (new tokens, cached prefix) of a sequence -> whether it has the bug; None for all sequences.

    Raises:
        KeyError: there is no such hypothesis; the message lists those that exist.
    """
    if hypothesis not in BY_ID:
        raise KeyError(f"there is no hypothesis {hypothesis!r}; expected one of {', '.join(BY_ID)}")
    compute = BY_ID[hypothesis].compute

    def kernel(call: AttentionCall) -> Tensor:
        out = tensor_of(base_kernel(call))
        if layers is not None and call.layer not in layers:
            return out
        wrong = compute(call)
        if wrong is None:
            return out
        wrong = wrong.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")).to(out.dtype)
        out = out.clone()
        chosen = [h for h in range(out.shape[1]) if heads is None or h in heads]
        edges = pairwise(call.cu_seqlens_q.tolist())
        for (start, stop), new, prefix in zip(edges, call.lens_q, call.prefixes, strict=True):
            if when is None or when(new, prefix):
                out[start:stop, chosen] = wrong[start:stop, chosen]
        return out

    return kernel
