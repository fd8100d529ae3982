"""What the calls of the op-level matrix ask for beyond plain attention: the values of each feature of `FEATURES`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from assay.harness.attention.call import BY_QUERY, AttentionCall, Mask
from assay.harness.attention.forms import BLOCK, FORMS, feature_of, forms_of
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
    of_rows: dict[str, Any] = {
        name: tensor for name, tensor in call.tensors.items() if name in BY_QUERY and (len(tensor) > 1 or name == "q")
    }
    more = {name: tensor[torch.arange(rows) % len(tensor)] for name, tensor in of_rows.items()}
    more["q"] = 2 * more["q"]
    of_rows = {name: torch.cat([tensor, more[name]]) for name, tensor in of_rows.items()}
    return replace(call.with_spec(padded_rows=rows), **of_rows)


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


def _largest(x: torch.Tensor, per: str) -> torch.Tensor:
    """Compute the largest magnitude of what shares a scale in x [tokens, heads, dim], broadcasting to it."""
    if per == "block of 16 tokens":
        blocks = torch.arange(len(x), device=x.device) // BLOCK
        tops = [x[blocks == block].abs().amax((0, 2)) for block in range(-(-len(x) // BLOCK))]
        return torch.stack(tops)[blocks][..., None]
    if per == "block of 16 dims":
        return x.abs().view(*x.shape[:2], -1, BLOCK).amax(3).repeat_interleave(BLOCK, 2)
    return x.abs().amax({"tensor": (0, 1, 2), "head": (0, 2), "token": (2,)}[per], keepdim=True)


def _stored(of: str, name: str, per: str, call: AttentionCall) -> AttentionCall:
    """Store q, or k and v, in 8 bits, and make it what is stored: scales are powers of two, so that no dtype rounds that."""
    format = FORMATS[name]
    tensors: dict[str, Any] = {}
    for what in of:
        x = getattr(call, what).float()
        top = _largest(x, per).clamp(min=2.0**-20)
        scale = (top / format.largest).log2().ceil().exp2()
        if per == "head" and what == "v":  # or one of K's that is taken for V's would not show
            scale = 2 * scale
        x = x / scale
        stored = x.round().to(torch.int8) if name == "int8" else x.to(_STORED_AS[name])
        tensors |= {f"stored_{what}": stored, f"{what}_scale": scale, what: (stored.float() * scale).to(call.q.dtype)}
    if call.spec.layout == "v in k" and of == "kv":
        values = {name: tensors[name][..., : call.v.shape[2]] for name in ("stored_k", "k")}
        tensors |= {"stored_v": values["stored_k"], "v_scale": tensors["k_scale"], "v": values["k"]}
    return replace(call, **tensors)


def _factors(by_query: bool, call: AttentionCall) -> AttentionCall:
    """Multiply scores by numbers of each head, and of the logarithm of the query's position, as scalable softmax does."""
    of_heads = 0.75 + 0.5 * (torch.arange(call.heads.q_heads, device=call.q.device) % 3)
    positions = places_of(call)[0] if by_query else torch.tensor([62], device=call.q.device)
    return replace(call, score_factor=(positions[:, None] + 2.0).log() / math.log(64) * of_heads)


def _biases(distances: int, by_query: bool, call: AttentionCall) -> AttentionCall:
    """Add a table by distance to the scores, of numbers that bfloat16 holds: steps that grow with distance, or each query's own."""
    heads = torch.arange(call.heads.q_heads)[:, None]
    draw = torch.Generator().manual_seed(distances)
    if by_query:
        table = torch.randn(len(call.q), len(heads), distances, generator=draw)
    else:
        steps = (torch.arange(distances) + 1.0).log2().floor()
        table = (torch.randn(len(heads), 16, generator=draw)[heads, steps.long()[None]])[None]
    return replace(call, score_bias=(2 * table).bfloat16().float().to(call.q.device))


_ROPE_DIMS, _LATENT_DIMS = 64, 512
"""Dims of q and k that carry the position, and of a latent vector without them, in DeepSeek's latent attention."""


def _rope_apart(call: AttentionCall) -> AttentionCall:
    """Give all heads of k the same last dims, which carry the position."""
    k = call.k.clone()
    k[..., -_ROPE_DIMS:] = k[:, :1, -_ROPE_DIMS:]
    return replace(call, k=k).with_spec(rope_dims=_ROPE_DIMS)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, how: str) -> torch.Tensor:
    """Apply RoPE to x [rows, heads, dim], in "halves" or "pairs"; `cos_sin` [rows, dim] has the cosines and then the sines."""
    cos, sin = (half[:, None].to(x.dtype) for half in cos_sin.chunk(2, -1))
    if how == "halves":
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def places_of(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of all rows of q, those of padding being 0, and of all keys."""
    queries = [first + row for (first, _), new in zip(call.places, call.lens_q, strict=True) for row in range(new)]
    keys = [first + row for (_, first), length in zip(call.places, call.lens_k, strict=True) for row in range(length)]
    padding = [0] * call.spec.padded_rows
    return torch.tensor(queries + padding, device=call.q.device), torch.tensor(keys, device=call.q.device)


def _unrotated(how: str, call: AttentionCall) -> AttentionCall:
    """Let the kernel apply RoPE. Angles are quarter turns, which round nothing: any difference is one of structure."""
    call = _rope_apart(call)
    queries, keys = places_of(call)
    table = torch.arange(int(max(queries.max(), keys.max())) + 1)[:, None] * (torch.arange(_ROPE_DIMS // 2) + 1) % 4
    quarters = torch.tensor([1.0, 0.0, -1.0, 0.0])
    cos_sin = torch.cat([quarters[table], quarters[(table + 3) % 4]], 1).to(call.q.device)
    given: dict[str, Any] = {
        "unrotated_q": call.q[..., -_ROPE_DIMS:].clone(),
        "unrotated_k": call.k[:, :1, -_ROPE_DIMS:].clone(),
    }
    q, k = call.q.clone(), call.k.clone()
    q[..., -_ROPE_DIMS:] = rotated(given["unrotated_q"], cos_sin[queries], how)
    k[..., -_ROPE_DIMS:] = rotated(given["unrotated_k"], cos_sin[keys], how)
    spec: dict[str, Any] = {"rope": how}
    return replace(call, q=q, k=k, cos_sin=cos_sin, **given).with_spec(**spec)


def _unprojected(call: AttentionCall) -> AttentionCall:
    """Let the kernel multiply by the projections. Each picks latent dims and turns signs, which rounds nothing."""
    call = _rope_apart(call)
    heads, nope, dim_v = call.heads.q_heads, call.q.shape[2] - _ROPE_DIMS, call.v.shape[2]
    draw = torch.Generator().manual_seed(heads)
    latent = torch.randn(len(call.k), 1, _LATENT_DIMS, generator=draw).to(call.q)
    signs = torch.randint(2, (2, heads, max(nope, dim_v)), generator=draw).to(call.q) * 2 - 1
    dims = torch.stack([torch.randperm(_LATENT_DIMS, generator=draw) for _ in range(2 * heads)]).to(call.q.device)
    to_k, to_v = latent.new_zeros(heads, nope, _LATENT_DIMS), latent.new_zeros(heads, dim_v, _LATENT_DIMS)
    to_k.scatter_(2, dims[:heads, :nope, None], signs[0, :, :nope, None])
    to_v.scatter_(2, dims[heads:, :dim_v, None], signs[1, :, :dim_v, None])
    k, v = (torch.einsum("tl,hdl->thd", latent[:, 0].double(), by_head.double()).to(call.q) for by_head in (to_k, to_v))
    rope = call.k[:, :1, -_ROPE_DIMS:]
    return replace(
        call,
        k=torch.cat([k, rope.expand(-1, heads, -1)], -1),
        v=v,
        latent=torch.cat([latent, rope], -1),
        latent_to_k=to_k,
        latent_to_v=to_v.transpose(1, 2).contiguous(),
    )


STORED: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    f"{what} in {form}": partial(_stored, of, name, per)
    for what, of in (("K and V", "kv"), ("Q", "q"))
    for form in FORMS
    for name, _, per in (form.partition(" per "),)
}
"""Values of "stored_kv" and "stored_q": every form that a kernel can declare."""
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
    "split_rope": {"RoPE dims apart": _rope_apart},
    "rope": {f"RoPE in {how}": partial(_unrotated, how) for how in ("halves", "pairs")},
    "latent": {"projections apart": _unprojected},
    "stored_kv": {
        f"K and V in {form}": STORED[f"K and V in {form}"]
        for form in (
            "e4m3 per tensor",
            "int8 per token",
            "e5m2 per head",
            "int8 per head",
            "e4m3 per token",
            "e4m3 per block of 16 tokens",
            "int8 per block of 16 dims",
        )
    },
    "stored_q": {
        f"Q in {form}": STORED[f"Q in {form}"] for form in ("e4m3 per tensor", "int8 per token", "e4m3 per head")
    },
    "score_factor": {"factors by position": partial(_factors, True), "factors by head": partial(_factors, False)},
    "score_bias": {
        "a bias of each query to 40 tokens": partial(_biases, 40, True),
        "a bias to 300 tokens": partial(_biases, 300, False),
        "a bias to 1 token": partial(_biases, 1, False),
    },
    "custom_mask": {kind: partial(as_tree, kind) for kind in ("random tree", "binary tree", "chain")},
}
"""Values of each feature that a call may ask for. The first one stands for it where several are asked for. Windows lie around
blocks; caps are those of Gemma 2 and Grok, and one that every score feels; slopes are those of the paper (arXiv 2108.12409), and
steep ones. Factors are those of scalable softmax (arXiv 2501.19399); biases end within a block, beyond a window, or at once."""


def values_of(features: Sequence[str]) -> dict[str, list[str]]:
    """List the values of each declared feature that calls ask for; if it is declared by its forms, these and then the others.

    A declaration excludes the others, so that they are listed as not covered.
    """
    values = {}
    for name in dict.fromkeys(map(feature_of, features)):
        if name in ASKED:
            forms = [f"{'Q' if name == 'stored_q' else 'K and V'} in {form}" for form in forms_of(features, name)]
            values[name] = list(dict.fromkeys([*forms, *ASKED[name]]))
    return values
