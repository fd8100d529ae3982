"""``torch.nn.functional.scaled_dot_product_attention``: one sequence at a time, heads before tokens.

Its ``is_causal`` aligns the mask top-left, so it is asked for only where a sequence has no cached prefix. Any other mask is passed
as ``attn_mask``. A bias of the scores is exact on a CPU, which takes it in float32 beside any Q. A GPU takes it in Q's dtype alone:
PyTorch 2.11 returns NaN for float32 beside half precision there, and a bias that the dtype rounds is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.adapters.adapter import Adapter, Attend, Parameters
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.sequence_groups import biases


def _lay_out(function: Any, parameters: Parameters, call: AttentionCall) -> Attend:
    grouped, plain = (
        call.heads.group > 1,
        not set(call.features) & {"window", "alibi", "score_bias", "custom_mask", "positions"},
    )
    sequences = []
    for number, (rows, keys) in enumerate(_sequences(call)):
        if rows.start == rows.stop:
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (call.q[rows], call.k[keys], call.v[keys]))
        passed: dict[str, Any] = {"query": q, "key": k, "value": v, "scale": call.scale}
        mask = _mask(call, number, rows, k.shape[2])
        simple = plain and mask is not None and q.shape[2] == k.shape[2]
        passed |= {"is_causal": simple, "attn_mask": None if simple else mask}
        if grouped and "enable_gqa" in parameters.names:
            passed["enable_gqa"] = True
        elif grouped:
            passed |= {name: passed[name].repeat_interleave(call.heads.group, 1) for name in ("key", "value")}
        sequences.append(passed)

    def attend() -> Tensor:
        return torch.cat([function(**passed)[0].transpose(0, 1) for passed in sequences])

    return attend


def _sequences(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of q, and those of k and v, of each sequence."""
    edges = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
    return ((slice(*rows), slice(*keys)) for rows, keys in edges)


def _mask(call: AttentionCall, number: int, packed: slice, len_k: int) -> Tensor | None:
    """Return the mask of a sequence: which keys each query sees, bool [len_q, len_k]; with a bias what is added to the scores,
    [1, heads, len_q, len_k], in float32 on a CPU and in the dtype of q elsewhere; None if all see all.

    Raises:
        KernelRefused: that dtype rounds the bias.
    """
    rows = torch.arange(packed.stop - packed.start, device=call.q.device)
    custom = None if call.custom_masks is None else call.custom_masks[number]
    first, first_key = call.places[number]
    seen = call.spec.mask.visible(rows, len_k - first + first_key, len_k, custom=custom)
    slopes = torch.tensor(call.spec.alibi, device=call.q.device)[:, None] if call.spec.alibi else None
    table = call.score_bias
    if table is not None:
        table = (table if len(table) == 1 else table[packed]).transpose(0, 1)
    bias = biases(slopes, table, rows + first - first_key, len_k)
    if bias is None:
        return None if bool(seen.all()) else seen
    bias = bias.masked_fill(~seen, -torch.inf)[None]
    return bias if bias.device.type == "cpu" else _exactly_as(bias, call.q.dtype)


def _exactly_as(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in a dtype that holds it exactly.

    Raises:
        KernelRefused: the dtype rounds it.
    """
    taken = bias.to(dtype)
    if not torch.equal(taken.to(bias.dtype), bias):
        raise KernelRefused(
            f"attn_mask has the dtype of q here, and {str(dtype).removeprefix('torch.')} rounds this bias of scores"
        )
    return taken


SDPA = Adapter(
    "sdpa",
    ("query", "key", "value", "attn_mask", "is_causal", "scale"),
    dict.fromkeys(("window", "alibi", "score_bias", "custom_mask", "positions", "not_causal"), ()),
    _lay_out,
    also=("enable_gqa",),
)
