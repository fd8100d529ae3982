"""Bugs of the map from q heads to kv heads; and the faults that are seeded of heads and dimensions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, changing, code
from assay.harness.attention.bugs.seeded import Where, constant, of_bug, own
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request

_HEADS = """\
def attend(q, k, v, scale):
    (heads, new, _), (kv_heads, keys, _) = q.shape, k.shape
    kv_head = @  # of each q head
    k, v = k[kv_head], v[kv_head]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_GROUP = "torch.arange(heads) // (heads // kv_heads)"


def _interleaved(r: Request) -> Request | None:
    heads, kv_heads = len(r.kv_head), r.k.shape[0]
    if kv_heads in (1, heads):
        return None
    return replace(r, kv_head=torch.arange(heads, device=r.q.device) % kv_heads)


def _kv_head(by: int, r: Request) -> Request | None:
    """Let q heads read the kv head `by` after theirs."""
    if r.k.shape[0] < 2 + (by < 0):  # of two heads the previous is the next
        return None
    return replace(r, kv_head=(r.kv_head + by) % r.k.shape[0])


BUGS = (
    Bug("kv-heads-interleaved", "GQA heads interleaved", "q head h reads kv head h mod num_kv_heads",
        "interleaves the kv heads of its q heads", "kv-heads", changing(_interleaved),
        code(_HEADS, "torch.arange(heads) % kv_heads", _GROUP, "heads"),
        reports=("onnx/onnx!7274", "ekzhang/jax-js!180", "apple/axlearn!842")),
    *(Bug(f"kv-head-{side}-group", f"kv head of the {side} group", f"q heads read the kv head {where} theirs",
          f"reads the kv head of the {side} group", "kv-heads", changing(partial(_kv_head, by)),
          code(_HEADS, f"({_GROUP} {by:+}) % kv_heads".replace("+1", "+ 1").replace("-1", "- 1"), _GROUP, "heads"))
      for side, where, by in (("next", "after", 1), ("previous", "before", -1))),
)  # fmt: skip


def heads_rolled(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give each q head the output of the next one."""
    return out.roll(-1, 1) if out.shape[1] > 1 else None


def _last_dims_zero(call: AttentionCall, out: Tensor) -> Tensor | None:
    if out.shape[2] <= _DIMS:
        return None
    wrong = out.clone()
    wrong[..., _DIMS:] = 0
    return wrong


_DIMS = 64
_of = partial(of_bug, BUGS)
FAULTS = (
    _of("kv-heads-interleaved"),
    _of("kv-head-next-group"),
    _of("kv-head-previous-group"),
    own("heads-rolled", "heads rolled", "each q head has the output of the next", heads_rolled),
    own("head-3-zero", "head 3 zero", "q head 3 has no output", constant(0.0), where=Where(heads=(3,))),
    own("dims-beyond-64-zero", "dimensions beyond 64 zero", "only 64 dimensions of the values are computed", _last_dims_zero),
)  # fmt: skip
