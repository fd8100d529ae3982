"""Dumped attention calls that hold all their keys and values: of hooks on a Hugging Face model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Mask, cumulative
from assay.harness.ingest.tensors.dump import Dump, StoredTensor

_Q, _K, _V, _OUT = ("q", "query"), ("k", "key"), ("v", "value"), ("out", "output", "attn_output", "reference")


@dataclass(frozen=True)
class WholeCall:
    """A call with its dumped output; None if there is none."""

    call: AttentionCall
    out: Tensor | None


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
        yield WholeCall(call, None if out is None else out[b].contiguous())


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
