"""Faults: correct outputs and kernels with one known bug, in chosen layers, heads and sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.oracle import oracle


def rounded_oracle(call: AttentionCall) -> Tensor:
    """Run the oracle as a kernel: float64 inside, rounded once to the dtype of q. Rows that belong to no sequence are NaN."""
    out = oracle(call).to(call.q.dtype)
    padded = call.spec.padded_rows
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padded), value=float("nan")) if padded else out


def seeded(bug: Bug, call: AttentionCall, out: Tensor, truth: Tensor | None = None) -> Tensor:
    """Apply a bug to a correct output. Values that the bug leaves undefined (a query that sees no key) are zero.

    Args:
        bug: the bug.
        call: the call.
        out: its correct output, [total_q, num_q_heads, head_dim_v], which is not modified.
        truth: the exact output, float64, if `out` has the noise of a quantisation, which is then added to the wrong output; None
            if it only rounds.

    Returns:
        `out` itself if the bug cannot show, or else another tensor in its dtype.
    """
    wrong = bug.compute(call)
    if wrong is None:
        return out
    wrong = wrong.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    return (wrong if truth is None else with_noise(wrong, out, truth)).to(out.dtype)


def with_noise(wrong: Tensor, out: Tensor, truth: Tensor) -> Tensor:
    """Add the noise of a correct output to an exact wrong one, scaled by the ratio of their sizes in each row and head."""
    # A quantisation's noise is relative: where a query sees more keys, output and noise shrink alike. Noise of the same size on a
    # smaller output would hide the name of the bug.
    size = truth.norm(dim=-1, keepdim=True)
    share = torch.where(size > 0, wrong.double().norm(dim=-1, keepdim=True) / size, 0.0)
    return wrong + share.nan_to_num(nan=0.0, posinf=0.0) * (out.double() - truth)


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
        layers: layers with the bug, by default all.
        heads: q heads with the bug, by default all.
        when: (new tokens, cached prefix) of a sequence -> whether it has the bug; by default every sequence has it.

    Raises:
        KeyError: the hypothesis does not exist; the message lists those that do.
    """
    if hypothesis not in BY_ID:
        raise KeyError(f"unknown hypothesis {hypothesis!r}; expected one of {', '.join(BY_ID)}")

    def kernel(call: AttentionCall) -> Tensor:
        out = tensor_of(base_kernel(call))
        if layers is not None and call.layer not in layers:
            return out
        wrong = seeded(BY_ID[hypothesis], call, out)
        if wrong is out:
            return out
        out = out.clone()
        chosen = [h for h in range(out.shape[1]) if heads is None or h in heads]
        edges = pairwise(call.cu_seqlens_q.tolist())
        for (start, stop), new, prefix in zip(edges, call.lens_q, call.prefixes, strict=True):
            if when is None or when(new, prefix):
                out[start:stop, chosen] = wrong[start:stop, chosen]
        return out

    return kernel
