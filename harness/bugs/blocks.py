"""Bugs of the loop over blocks of keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from assay.harness.attention.oracle import Request
from assay.harness.bugs.bug import Batch, Bug, changing, code, keys_of

_BLOCKS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    read = BLOCK * (@)  # keys that the loop over blocks reads
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[:, :read]
    scores = scale * q @@ k[:, :read].transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v[:, :read]
"""


def last_block_lost(block: int, batch: Batch, b: int) -> Request | None:
    """Hide the keys after the last whole block."""
    r = batch[b]
    whole = r.len_k // block * block
    return replace(r, visible=r.visible & (keys_of(r) < whole)) if whole < r.len_k else None


BUGS = tuple(
    Bug(f"last-block-lost-{n}", f"last partial block of {n} lost", f"keys beyond the last full block of {n} are not seen",
        f"loses the last partial block of {n} keys", "last-block-lost", changing(partial(last_block_lost, n)),
        code(_BLOCKS.replace("BLOCK", str(n)), f"keys // {n}", f"-(-keys // {n})"), reports=reports)
    for n, reports in ((16, ()), (32, ()), (64, ("jax-ml/jax#27224",)), (128, ("NVIDIA/TensorRT-LLM#17648",)))
)  # fmt: skip
