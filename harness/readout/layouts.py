"""Layouts in memory: whether a kernel computes the same where q, k and v are strided, or lie beside memory that is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.readout.probing import Plan, Prober

Layout = Callable[[AttentionCall], AttentionCall]
"""(call) -> the same call, its q, k and v elsewhere in memory."""
BESIDE = 64
"""Rows of NaN before and after each tensor: a tile that is read past the end lies within them."""


def fused(call: AttentionCall) -> AttentionCall:
    """K and V as parts of one tensor [total_k, 2 * num_kv_heads, head_dim], as a fused projection leaves them."""
    if call.k.shape != call.v.shape:
        return call
    both = torch.cat([call.k, call.v], 1)
    heads = call.k.shape[1]
    wide = torch.cat([call.q, torch.zeros_like(call.q)], 1)
    return replace(call, q=wide[:, : call.q.shape[1]], k=both[:, :heads], v=both[:, heads:])


def heads_first(call: AttentionCall) -> AttentionCall:
    """Tensors whose memory is [num_heads, tokens, head_dim]."""
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v)


def beside_nan(call: AttentionCall) -> AttentionCall:
    """Tensors within larger ones, whose other rows are NaN."""
    return replace(call, q=_within(call.q), k=_within(call.k), v=_within(call.v))


def _within(x: Tensor) -> Tensor:
    larger = x.new_full((len(x) + 2 * BESIDE, *x.shape[1:]), float("nan"))
    larger[BESIDE:-BESIDE] = x
    return larger[BESIDE:-BESIDE]


LAYOUTS: tuple[tuple[Layout, str], ...] = (
    (fused, "where q, k and v are strided by token, as parts of fused tensors"),
    (heads_first, "where the memory of q, k and v is [heads, tokens, dims]"),
    (beside_nan, "where the memory beside q, k and v is NaN: rows outside of them are read"),
)
"""Layouts that servers have, and what a kernel that is wrong in them alone ignores."""


def layout_notes(prober: Prober, plans: list[Plan], error: float) -> tuple[str, ...]:
    """In which layouts a kernel computes something else than with contiguous tensors, in words.

    Args:
        prober: the kernel.
        plans: calls that it is asked for.
        error: relative error of a query from which on two outputs are not the same.

    Raises:
        BudgetSpentError: the budget is spent.
    """
    found = []
    for layout, words in LAYOUTS:
        differs = raised = 0
        for plan in plans:
            call = plan.make(prober.device)
            plain = prober(call)
            if plain is None:
                continue
            other = prober(layout(call), as_it_lies=True)
            again = prober(call)
            if again is None or _apart(plain, again, error):
                continue  # the output depends on the calls before, whatever the layout
            raised += other is None
            differs += other is not None and _apart(plain, other, error)
        if differs:
            found.append(f"the output is another one {words}")
        elif raised:
            found.append(f"the kernel does not answer {words}")
    return tuple(found)


def _apart(plain: Tensor, other: Tensor, error: float) -> bool:
    """Whether two outputs of one call differ; NaN equals NaN."""
    gap = (plain - other).abs().sum(-1)
    size = plain.abs().sum(-1)
    same = (gap <= error * size) | (plain.isnan().any(-1) & other.isnan().any(-1))
    return not bool(same.all())
