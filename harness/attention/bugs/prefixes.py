"""Bugs of the cached prefix, and of the newest token in the cache; and the faults that are seeded of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.blocks import PAGE
from assay.harness.attention.bugs.bug import Bug, Code, changing, code, keys_of, lines, seeing
from assay.harness.attention.bugs.masks import MASKED, RIGHT_MASK
from assay.harness.attention.bugs.merges import with_a_sink
from assay.harness.attention.bugs.seeded import Where, changes, of_bug, own
from assay.harness.attention.oracle import Request

_CACHE = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    slots = torch.arange(keys)  # of each token in the KV cache
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_NEWEST = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    k, v = (torch.cat([x[:, :-1], @], 1) for x in (k, v))  # what the cache holds
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_GATHER = "k, v = k[:, slots], v[:, slots]"


def _shifted(by: int, what: str, r: Request) -> Request | None:
    """Read the cached rows of K, V or both ("k", "v", "kv") `by` tokens off."""
    if not r.prefix:
        return None
    index = keys_of(r)
    index[: r.prefix] = (index[: r.prefix] + by).clamp(min=0)
    return replace(r, **{name: getattr(r, name)[:, index] for name in what})


def _newest(copied: bool, r: Request) -> Request | None:
    """Replace the newest key and value by those of the token before, or by zero."""
    if r.len_k < 2:
        return None
    k, v = (torch.cat([t[:, :-1], t[:, -2:-1] * float(copied)], dim=1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


def _cached(wrong: str, gather: str = _GATHER) -> Code:
    return code(_CACHE, lines(wrong, gather), lines(_GATHER))


BUGS = (
    Bug("prefix-dropped", "prefix dropped", "no query sees a cached key", "drops the cached prefix", "cached-prefix",
        changing(seeing(lambda r, keys: keys >= r.prefix)),
        code(MASKED, RIGHT_MASK + "\n    seen[:, : keys - new] = False", RIGHT_MASK)),
    Bug("prefix-one-token-late", "prefix shifted one token late", "cached keys and values are read one token too far",
        "reads the cached prefix one token late", "cached-prefix", changing(partial(_shifted, 1, "kv")),
        _cached("slots[: keys - new] += 1"), reports=("tanishqkumar/ssd#22",)),
    Bug("prefix-one-token-early", "prefix shifted one token early", "cached keys and values are read one token too soon",
        "reads the cached prefix one token early", "cached-prefix", changing(partial(_shifted, -1, "kv")),
        _cached("slots[1 : keys - new] -= 1")),
    Bug("prefix-values-shifted", "prefix values shifted against keys", "cached values are read one token too far, keys are not",
        "reads the cached values one token late", "cached-prefix", changing(partial(_shifted, 1, "v")),
        _cached("slots[: keys - new] += 1", "v = v[:, slots]")),
    Bug("newest-token-stale", "newest token stale", "the newest key and value are those of the token before",
        "reads the token before in place of the newest one", "newest-token", changing(partial(_newest, True)),
        code(_NEWEST, "x[:, -2:-1]", "x[:, -1:]")),
    Bug("newest-token-zero", "newest token zero", "the newest key and value are zero",
        "reads zeros in place of the newest token", "newest-token", changing(partial(_newest, False)),
        code(_NEWEST, "0 * x[:, -1:]", "x[:, -1:]")),
)  # fmt: skip


def _last_page_zero(r: Request) -> Request | None:
    if not r.prefix or r.prefix % PAGE:
        return None
    k, v = r.k.clone(), r.v.clone()
    for t in (k, v):
        t[:, r.prefix - PAGE : r.prefix] = 0
    return replace(r, k=k, v=v)


def _overwritten(r: Request) -> Request | None:
    """Put the newest tokens into the first page of the cached prefix: a stale writer came last."""
    if r.prefix < PAGE or r.len_k < 2 * PAGE:
        return None
    k, v = (torch.cat([t[:, -PAGE:], t[:, PAGE:]], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


def _twice(r: Request) -> Request | None:
    if not r.prefix:
        return None
    k, v = (torch.cat([t[:, : r.prefix], t], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.cat([r.visible[:, : r.prefix], r.visible], 1))


def _without_last(by: int, r: Request, keys: Tensor) -> Tensor:
    """Return the keys of a sequence that is taken to be `by` tokens shorter; all of one that has no more."""
    return keys < r.len_k - by * (r.len_k > by)


_of = partial(of_bug, BUGS)
FAULTS = (
    _of("prefix-dropped"),
    _of("prefix-dropped", suffix="-layer-0", where=Where(layers=(0,)), only="in layer 0"),
    _of("prefix-dropped", suffix="-few-new", where=Where(phase="extend", new=(2, 16)), only="for 2 to 16 new tokens"),
    _of("prefix-one-token-late"),
    _of("prefix-one-token-early"),
    _of("prefix-values-shifted"),
    own("prefix-last-page-zero", "last page of the prefix zero", "a prefix that ends with a page loses that page",
        changes(_last_page_zero), "sgl-project/sglang#22819"),
    own("prefix-overwritten", "prefix overwritten", "the first page of the prefix holds the newest tokens",
        changes(_overwritten), "sgl-project/sglang#24527", "vllm-project/vllm!37152"),
    own("prefix-cut", "prefix cut", "only the last 32 cached tokens are seen",
        changes(seeing(lambda r, keys: keys >= r.prefix - 32)), "vllm-project/vllm#26042", where=Where(phase="extend")),
    own("prefix-twice", "prefix seen twice", "every query sees the cached prefix twice", changes(_twice)),
)  # fmt: skip
NEWEST = (
    _of("newest-token-stale", suffix="-decode", where=Where(phase="decode"), only="in decode"),
    _of("newest-token-zero", suffix="-decode-layer-1", where=Where(phase="decode", layers=(1,)), only="in decode in layer 1"),
    own("plan-stale", "stale plan", "from its sixth call on, decode does not see the newest key",
        changes(seeing(partial(_without_last, 1))), "vllm-project/vllm#46329", where=Where(phase="decode", from_call=5)),
    own("metadata-stale", "stale metadata", "in batches, sequences are taken to be 8 tokens shorter",
        changes(seeing(partial(_without_last, 8))), "vllm-project/vllm#47042", "vllm-project/vllm#47567",
        "vllm-project/vllm#47766", where=Where(batch=(2, None))),
    own("first-key-lost", "first key lost", "no query sees the first key",
        changes(seeing(lambda r, keys: keys > 0 if r.len_k > 1 else keys >= 0))),
    own("sink-added", "sink added", "every query also attends to nothing", changes(with_a_sink), "sgl-project/sglang#11634"),
)  # fmt: skip
