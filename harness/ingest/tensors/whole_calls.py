"""Dumped attention calls that hold all their keys and values: of hooks on a Hugging Face model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Mask, cumulative
from assay.harness.ingest.tensors.dump import Dump, StoredTensor

WholeCall = tuple[AttentionCall, Tensor | None]
"""A call with its dumped output; None if there is none."""
_Q, _K, _V, _OUT = ("q", "query"), ("k", "key"), ("v", "value"), ("out", "output", "attn_output", "reference")


def hooked_calls(dump: Dump, problems: list[str]) -> Iterator[WholeCall]:
    """Yield the tensors named q, k, v (and out) of a layer.

    Shapes are [batch, heads, tokens, dim], as Hugging Face's attention functions take them, or [tokens, heads, dim] of one
    sequence.
    """
    groups: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    projections = 0
    for tensor in dump.tensors:
        base, _, last = tensor.key.rpartition(".")
        kind = next((kind for kind, names in (("q", _Q), ("k", _K), ("v", _V), ("out", _OUT)) if last in names), None)
        if kind:
            groups[base][kind] = tensor
        projections += last in ("q_proj", "k_proj", "v_proj")
    for base, group in groups.items():
        if not {"q", "k", "v"} <= set(group):
            problems.append(f"{base} has only {', '.join(sorted(group))}")
            continue
        yield from _from_hooks(base, group, problems)
    if not groups and projections:
        problems.append(
            "it has outputs of q_proj, k_proj and v_proj, which precede the rotary embedding; "
            "dump what the attention function is given"
        )


def _from_hooks(base: str, group: dict[str, StoredTensor], problems: list[str]) -> Iterator[WholeCall]:
    q, k, v = (group[name].map() for name in "qkv")
    out = group["out"].map() if "out" in group else None
    layer = group["q"].place.layer or 0
    if q.ndim == 3:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        out = out[None] if out is not None else None
    batched = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and v.shape[:3] == k.shape[:3]
    if not batched or q.shape[1] % k.shape[1] or q.shape[2] > k.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        problems.append(f"{base}: shapes {shapes} are not [batch, heads, tokens, dim]")
        return
    if out is not None and out.ndim == 3:
        out = out.reshape(q.shape[0], q.shape[2], q.shape[1], -1)
    elif out is not None and out.shape[1:3] == q.shape[1:3] and q.shape[1] != q.shape[2]:
        out = out.transpose(1, 2)
    for b in range(q.shape[0]):
        rows = [x[b].transpose(0, 1).contiguous() for x in (q, k, v)]
        call = packed_call(rows[0], rows[1], rows[2], [q.shape[2]], [k.shape[2]], layer)
        yield call, None if out is None else out[b].contiguous()


def unpaged(
    cache_k: Tensor, cache_v: Tensor, indptr: Tensor, indices: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, list[int]]:
    """Gather keys, values and the length of each sequence from [pages, page_size, kv_heads, head_dim] and FlashInfer's page table.

    Args:
        cache_k: of all pages.
        cache_v: of all pages.
        indptr: int [sequences + 1], where the pages of each sequence begin in `indices`.
        indices: int [used], numbers of pages.
        last: int [sequences], tokens in the last page of each; None if all are full.
    """
    keys, values, lens = [], [], []
    for b, (start, stop) in enumerate(pairwise(indptr.tolist())):
        used = indices[start:stop].long()
        in_last = cache_k.shape[1] if last is None else int(last[b])
        lens.append(max(len(used) - 1, 0) * cache_k.shape[1] + (in_last if len(used) else 0))
        keys.append(cache_k[used].flatten(0, 1)[: lens[-1]])
        values.append(cache_v[used].flatten(0, 1)[: lens[-1]])
    return torch.cat(keys), torch.cat(values), lens


def packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lens_q: list[int],
    lens_k: list[int],
    layer: int = 0,
    scale: float | None = None,
    causal: bool = True,
) -> AttentionCall:
    decode = all(n == 1 for n in lens_q) and all(n > 1 for n in lens_k)
    return AttentionCall(
        q, k, v, cumulative(lens_q), cumulative(lens_k),
        CallSpec(q.shape[-1] ** -0.5 if scale is None else scale, Mask(causal), layer, "decode" if decode else "extend"),
    )  # fmt: skip
