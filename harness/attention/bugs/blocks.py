"""Bugs of the loop over blocks of keys and of pages; and the faults that are seeded of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, changing, code, keys_of, seeing
from assay.harness.attention.bugs.seeded import Where, changes, constant, of_bug, own
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request

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
PAGE = 16
"""Tokens of a page of the KV cache in the faults of pages."""
# Keys of a block in the faults of blocks.
_BLOCK = 64


def _first_block_again(r: Request) -> Request | None:
    index = keys_of(r) % _BLOCK
    return replace(r, k=r.k[:, index], v=r.v[:, index]) if r.len_k > _BLOCK else None


def _values_of_another_page(r: Request) -> Request | None:
    return replace(r, v=first_pages_swapped(r.v)) if r.len_k >= 2 * PAGE else None


def first_pages_swapped(x: Tensor) -> Tensor:
    """Swap the first two pages of K or V, [heads, tokens, dim]."""
    return torch.cat([x[:, PAGE : 2 * PAGE], x[:, :PAGE], x[:, 2 * PAGE :]], 1)


def _zero_page_past_the_end(r: Request) -> Request | None:
    if r.len_k % PAGE:
        return None
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, PAGE)) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.nn.functional.pad(r.visible, (0, PAGE), value=True))


def _zero_at_page_borders(call: AttentionCall, out: Tensor) -> Tensor | None:
    wrong, crosses_one = out.clone(), False
    for (start, stop), prefix in zip(pairwise(call.cu_seqlens_q.tolist()), call.prefixes, strict=True):
        first = start + -prefix % PAGE
        if first < stop:
            wrong[first:stop:PAGE], crosses_one = 0, True
    return wrong if crosses_one else None


_of = partial(of_bug, BUGS)
FAULTS = (
    _of("last-block-lost-16"),
    _of("last-block-lost-64"),
    _of("last-block-lost-128"),
    own("block-skipped", "block skipped", "the second block of 64 keys is not seen",
        changes(seeing(lambda r, keys: keys // _BLOCK != 1))),
    own("first-block-again", "first block read again", "every block of 64 keys is read from the first",
        changes(_first_block_again), "sgl-project/sglang#25556"),
    own("values-of-another-page", "values of another page", "the values of the first two pages are swapped",
        changes(_values_of_another_page)),
    own("zero-page-past-the-end", "page read past the end", "a sequence that fills its last page sees a page of zeros",
        changes(_zero_page_past_the_end), "pegainfer-project/pegainfer#291"),
    own("page-borders-zero", "page borders zero", "the first query of a page has no output", _zero_at_page_borders),
    own("nan-off-block", "NaN off a block", "sequences whose length is no multiple of 64 have no finite output",
        constant(math.nan), "thu-ml/SageAttention!377", where=Where(phase="extend", unaligned=64)),
    own("nan-below-64", "NaN below 64 tokens", "sequences of less than 64 tokens have no finite output",
        constant(math.nan), "woct0rdho/SageAttention!98", where=Where(length=(0, 63))),
)  # fmt: skip
