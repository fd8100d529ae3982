"""Bugs of the loop over blocks of keys and of pages."""

from __future__ import annotations

from assay.harness.attention.bugs.bug import Bug, changing, code, seeing

_BLOCKS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    read = BLOCK * (@)  # keys that the loop over blocks reads
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[:, :read]
    scores = scale * q @@ k[:, :read].transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v[:, :read]
"""
BUGS = tuple(
    Bug(f"last-block-lost-{n}", f"last partial block of {n} lost", f"keys beyond the last full block of {n} are not seen",
        f"loses the last partial block of {n} keys", "last-block-lost",
        changing(seeing(lambda r, keys, n=n: keys < r.len_k // n * n)),  # type: ignore[misc]
        code(_BLOCKS.replace("BLOCK", str(n)), f"keys // {n}", f"-(-keys // {n})"), reports=reports)
    for n, reports in ((16, ()), (32, ()), (64, ("jax-ml/jax#27224",)), (128, ("NVIDIA/TensorRT-LLM#17648",)))
)  # fmt: skip
