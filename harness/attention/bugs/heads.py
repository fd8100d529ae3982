"""Bugs of the map from q heads to kv heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from assay.harness.attention.bugs.bug import Bug, changing, code
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
