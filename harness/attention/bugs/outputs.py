"""Faults of the output itself, and faults that change nothing that matters: to flag one of the latter is a false alarm."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs import masks
from assay.harness.attention.bugs.blocks import PAGE, first_pages_swapped
from assay.harness.attention.bugs.heads import heads_rolled
from assay.harness.attention.bugs.merges import merged, splits_of
from assay.harness.attention.bugs.seeded import Where, changes, constant, of_bug, own
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request


def _zero_beyond_128(call: AttentionCall, out: Tensor) -> Tensor | None:
    wrong, beyond = out.clone(), False
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        if stop - start > 128:
            wrong[start + 128 : stop], beyond = 0, True
    return wrong if beyond else None


FAULTS = (
    own("zero-beyond-128-new", "zero beyond 128 new tokens", "new tokens from the 129th on have no output", _zero_beyond_128,
        "Dao-AILab/flash-attention#2199"),
    own("zero-beyond-512", "zero beyond 512 tokens", "sequences of more than 512 tokens have no output", constant(0.0),
        "thu-ml/SageAttention#386", where=Where(length=(513, None))),
    own("layer-2-zero", "layer 2 zero", "layer 2 has no output", constant(0.0), where=Where(layers=(2,))),
    own("gain-0.1-percent", "gain of 0.1 %", "every output is 0.1 % too large", lambda call, out: out * 1.001),
    own("shrink-4.5-percent", "shrunk by 4.5 %", "every output is 4.5 % too small", lambda call, out: out * 0.955,
        where=Where(layers=(1,))),
    own("bias-1-percent", "bias of 1 %", "1 % of the mean size is added to every output",
        lambda call, out: out + 0.01 * out.abs().mean()),
    own("nan-one-call", "NaN in 1 % of the calls", "one call in a hundred has no finite output", constant(math.nan),
        "1bit-MONSTER/1bit-MONSTER#393", "ELS-RD/kernl#170", where=Where(share=0.01)),
    own("wrong-from-call-8", "wrong from the ninth call on", "each layer's outputs are shifted by a head from its ninth call on",
        heads_rolled, where=Where(from_call=8)),
)  # fmt: skip


def _pages_swapped(r: Request) -> Request | None:
    """Swap the first two pages of the cached prefix, keys and values alike: no query can tell."""
    return replace(r, k=first_pages_swapped(r.k), v=first_pages_swapped(r.v)) if r.prefix >= 2 * PAGE else None


_same = partial(own, equivalent=True)
EQUIVALENT = (
    _same("identity", "identity", "nothing is changed", lambda call, out: out),
    _same("rounded-again", "rounded again", "the output is converted to float64 and back", lambda call, out: out.double()),
    _same("negative-zeros", "negative zeros", "zeros are negative",
          lambda call, out: torch.where(out == 0, -torch.zeros_like(out), out)),
    _same("keys-reversed", "keys in reverse order", "the keys are summed in reverse order",
          changes(lambda r: replace(r, k=r.k.flip(1), v=r.v.flip(1), visible=r.visible.flip(1)))),
    _same("pages-swapped", "pages swapped", "two cached pages are swapped, keys and values alike", changes(_pages_swapped)),
    _same("splits-merged", "parts merged", "parts of 64 keys are merged by their log-sum-exp",
          changes(lambda r: merged(r, splits_of(r)))),
    _same("key-mean-subtracted", "mean of K subtracted", "the mean of K is subtracted, which no softmax sees",
          changes(lambda r: replace(r, k=r.k - r.k.mean(1, keepdim=True)))),
    _same("scale-in-queries", "scale in Q", "q is scaled instead of the scores",
          changes(lambda r: replace(r, q=r.q * r.scale, scale=1.0))),
    replace(of_bug(masks.BUGS, "mask-missing"), id="mask-missing-for-one-query", title="no mask for one query",
            about="the mask is missing where a sequence has one query", links=(), hypothesis="", equivalent=True,
            where=Where(phase="decode", new=(1, 1))),
    _same("zero-in-layer-1000", "zero in layer 1000", "a layer that no model has gives zero", lambda call, out: out * 0,
          where=Where(layers=(1000,))),
    _same("zero-in-batches-of-1000", "zero in batches of 1000", "batches that no run reaches give zero", lambda call, out: out * 0,
          where=Where(batch=(1000, None))),
)  # fmt: skip
