"""Bugs of the cached prefix, and of the newest token in the cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from assay.harness.attention.bugs.bug import Bug, Code, changing, code, keys_of, lines, seeing
from assay.harness.attention.bugs.masks import MASKED, RIGHT_MASK
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
