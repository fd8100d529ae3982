"""Bugs of masks: misaligned, missing, narrowed to a window, or without the last partial block of keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, changing, code, keys_of, seeing
from assay.harness.attention.oracle import Request

MASKED = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool)@
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
RIGHT_MASK = ".tril(keys - new)"


def _distance(request: Request) -> Tensor:
    """Compute the distance from each key forward to each query, in tokens, [len_q, len_k]."""
    queries = torch.arange(request.len_q, device=request.q.device) + request.prefix
    return queries[:, None] - keys_of(request)[None, :]


def _diagonal(by: int, r: Request) -> Request | None:
    """Shift the causal mask `by` keys to the right."""
    if not r.mask.causal or (by > 0 and r.len_q == 1):
        return None
    return replace(r, visible=torch.ones_like(r.visible).tril(r.prefix + by))


def _window(size: int, r: Request) -> Request | None:
    """Let each query see its last `size` keys only."""
    return replace(r, visible=r.visible & (_distance(r) < size)) if r.len_k > size else None


_BLOCKS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    read = BLOCK * (@)  # keys that the loop over blocks reads
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[:, :read]
    scores = scale * q @@ k[:, :read].transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v[:, :read]
"""
BUGS = (
    Bug("mask-top-left", "causal mask top-left", "query i of the new tokens sees keys 0 to i of the whole sequence",
        "applies a top-left causal mask", "mask",
        changing(lambda r: replace(r, visible=torch.ones_like(r.visible).tril()) if r.mask.causal and r.prefix else None),
        code(MASKED, ".tril()", RIGHT_MASK),
        reports=("thu-ml/SageAttention#131", "thu-ml/SageAttention!372", "Dao-AILab/flash-attention!436",
        "ROCm/rocm-libraries#10999",
        "NVIDIA/TensorRT-LLM#18174", "pytorch/pytorch#108108", "jax-ml/jax#24491", "thu-ml/SageAttention#26"),
        measured="SageAttention 1.0.6 has it, as kernel sage_attn_as_shipped: accuracy 0.145 where the reference has 1.000, "
        "438 of 512 questions lost."),
    Bug("mask-one-key-too-many", "mask one key too many", "each query also sees the key after its own",
        "lets each query see the key after its own", "mask", changing(partial(_diagonal, 1)),
        code(MASKED, ".tril(keys - new + 1)", RIGHT_MASK)),
    Bug("mask-one-key-too-few", "mask one key too few", "no query sees its own key", "hides its own key from each query", "mask",
        changing(partial(_diagonal, -1)), code(MASKED, ".tril(keys - new - 1)", RIGHT_MASK)),
    Bug("mask-missing", "no mask", "each query sees every key, later ones too", "applies no causal mask", "mask",
        changing(lambda r: replace(r, visible=torch.ones_like(r.visible)) if r.mask.causal and r.len_q > 1 else None),
        code(MASKED, "", RIGHT_MASK)),
    *(Bug(f"sliding-window-{n}", f"sliding window of {n}", f"each query sees its last {n} keys only",
          f"sees only the last {n} keys", "sliding-window", changing(partial(_window, n)),
          code(MASKED, f"{RIGHT_MASK}.triu(keys - new - {n - 1})", RIGHT_MASK), reports=reports)
      for n, reports in (
          (16, ()), (32, ()), (64, ()), (128, ("Dao-AILab/flash-attention#1366",)), (256, ()),
          (512, ("sgl-project/sglang#31501",)), (1024, ()), (2048, ("huggingface/transformers#39408",)), (4096, ()))),
    *(Bug(f"last-block-lost-{n}", f"last partial block of {n} lost", f"keys beyond the last full block of {n} are not seen",
            f"loses the last partial block of {n} keys", "last-block-lost",
            changing(seeing(lambda r, keys, n=n: keys < r.len_k // n * n)),  # type: ignore[misc]
            code(_BLOCKS.replace("BLOCK", str(n)), f"keys // {n}", f"-(-keys // {n})"), reports=reports)
        for n, reports in ((16, ()), (32, ()), (64, ("jax-ml/jax#27224",)), (128, ("NVIDIA/TensorRT-LLM#17648",)))),
)  # fmt: skip
