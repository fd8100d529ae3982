"""What the calls of the op-level matrix ask for beyond plain attention: the values of each feature of `FEATURES`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.noise import FORMATS

MLA = "MLA"
"""The value of the feature "mla", which all calls in 576 dims have."""
_STORED_AS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _asking_for(fields: Callable[[int], dict[str, Any]], call: AttentionCall) -> AttentionCall:
    """Ask for fields of the spec that are made for a number of q heads."""
    return call.with_spec(**fields(call.heads.q_heads))


def _slopes(steepness: int, heads: int) -> tuple[float, ...]:
    """List slopes of ALiBi from nearly 1 down to 2 ** -steepness, as float32 has them: kernels hold no others."""
    return tuple(torch.tensor([2 ** (-steepness * (h + 1) / heads) for h in range(heads)]).tolist())


def _parents(kind: str, queries: int) -> list[int]:
    """List the parent of each query of a draft tree, -1 for the cached prefix itself."""
    if kind == "chain":
        return list(range(-1, queries - 1))
    if kind == "binary tree":
        return [(query - 1) // 2 for query in range(queries)]
    drawn = random.Random(queries)
    return [drawn.randrange(-1, query) for query in range(queries)]


def as_tree(kind: str, call: AttentionCall) -> AttentionCall:
    """Mask the new tokens of each sequence as a draft tree that is verified: each sees itself and its ancestors.

    Args:
        kind: "chain", "binary tree" or "random tree".
        call: the call.
    """
    masks = []
    for queries in call.lens_q:
        seen = torch.eye(queries, dtype=torch.bool)
        for query, parent in enumerate(_parents(kind, queries)):
            if parent >= 0:
                seen[query] |= seen[parent]
        masks.append(seen.flatten())
    return replace(call, custom_mask=torch.cat(masks).to(call.q.device))


def _padded(rows: int, call: AttentionCall) -> AttentionCall:
    """Add rows to q that belong to no sequence, with the numbers of others."""
    more = call.q.repeat(-(-rows // call.q.shape[0]), 1, 1)[:rows]
    return replace(call.with_spec(padded_rows=rows), q=torch.cat([call.q, 2 * more]))


def _evicted(keys: int, call: AttentionCall) -> AttentionCall:
    """Let so many keys, and a few more of each later sequence, have been before those of the call."""
    before = torch.tensor([keys + 3 * b for b in range(len(call.lens_q))])
    at = torch.stack([torch.tensor(call.prefixes) + before, before], 1)
    return replace(call, positions=at.to(call.q.device))


def _apart(distance: int, call: AttentionCall) -> AttentionCall:
    """Let the keys of the call be a part of those before its queries, which so many keys lie behind."""
    keys = torch.tensor(call.lens_k)
    at = torch.stack([keys + distance + 5, torch.full_like(keys, 5)], 1)
    return replace(call, positions=at.to(call.q.device))


def _stored(name: str, per: str, call: AttentionCall) -> AttentionCall:
    """Store k and v in 8 bits, and make them what is stored: their scales are powers of two, so that no dtype rounds that."""
    format = FORMATS[name]
    tensors: dict[str, Any] = {}
    for what in ("k", "v"):
        x = getattr(call, what).float()
        axes = {"tensor": (0, 1, 2), "head": (0, 2), "token": (2,)}[per]
        top = x.abs().amax(axes, keepdim=True).clamp(min=2.0**-20)
        scale = (top / format.largest).log2().ceil().exp2()
        if per == "head" and what == "v":  # or one of K's that is taken for V's would not show
            scale = 2 * scale
        x = x / scale
        stored = x.round().to(torch.int8) if name == "int8" else x.to(_STORED_AS[name])
        tensors |= {f"stored_{what}": stored, f"{what}_scale": scale, what: (stored.float() * scale).to(call.q.dtype)}
    if call.spec.layout == "v in k":
        values = {name: tensors[name][..., : call.v.shape[2]] for name in ("stored_k", "k")}
        tensors |= {"stored_v": values["stored_k"], "v_scale": tensors["k_scale"], "v": values["k"]}
    return replace(call, **tensors)


ASKED: dict[str, dict[str, Callable[[AttentionCall], AttentionCall]]] = {
    "window": {
        f"window {n}": partial(_asking_for, partial(lambda n, heads: {"mask": Mask(window=n)}, n))
        for n in (64, 1, 16, 17, 65, 128, 129)
    },
    "softcap": {
        f"softcap {n:g}": partial(_asking_for, partial(lambda n, heads: {"softcap": n}, n)) for n in (30.0, 1.0, 50.0)
    },
    "temperature": {
        f"temperature {n}": partial(_asking_for, partial(lambda n, heads: {"temperature": n}, n)) for n in (64, 2)
    },
    "sinks": {
        f"sinks near {n:g}": partial(
            _asking_for, partial(lambda n, heads: {"sinks": tuple(n + 0.5 * (7 * h % 5) for h in range(heads))}, n)
        )
        for n in (0.0, 4.0, -4.0)
    },
    "alibi": {
        f"ALiBi to 2^-{n}": partial(
            _asking_for,
            partial(lambda n, heads: {"alibi": _slopes(n, heads)}, n),
        )
        for n in (8, 1)
    },
    "padding": {f"{n} padded rows": partial(_padded, n) for n in (7, 1, 64, 300)},
    "positions": {
        "1000 keys evicted": partial(_evicted, 1000),
        "keys 40 behind": partial(_apart, 40),
        "keys just behind": partial(_apart, 0),
    },
    "not_causal": {
        name: partial(_asking_for, lambda heads: {"mask": Mask(causal=False)})
        for name in ("not causal", "cross attention")
    },
    "mla": {MLA: lambda call: call.with_spec(scale=call.scale * 3**0.5)},  # of 192 dims, and not of 576
    "stored_kv": {
        f"K and V in {name} per {per}": partial(_stored, name, per)
        for name, per in (("e4m3", "tensor"), ("int8", "token"), ("e5m2", "head"), ("int8", "head"), ("e4m3", "token"))
    },
    "custom_mask": {kind: partial(as_tree, kind) for kind in ("random tree", "binary tree", "chain")},
}
"""Values of each feature that a call may ask for. The first one stands for it where several are asked for. Windows lie around
blocks; caps are those of Gemma 2 and Grok, and one that every score feels; slopes are those of the paper (arXiv 2108.12409), and
steep ones."""
