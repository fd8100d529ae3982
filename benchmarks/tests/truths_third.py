"""The truths of the third held-out set: where each kernel is right, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from held_out import Query, Right, Truths, longest, made, parts_of, up
from held_out_faults_third import THIRD as FAULTS
from torch import Tensor

from assay.harness.attention.call import AttentionCall

SHAPES = ((4, 1, 64), (4, 2, 96), (4, 4, 16), (4, 2, 80), (4, 2, 32))
"""Q heads, kv heads and head dim of each session."""


def session(number: int) -> list[AttentionCall]:
    """Extend calls and decode calls in turn, of 1 to 4 sequences, in layers 0 to 4; every third extend call has no prefix."""
    generator = torch.Generator().manual_seed(100 + number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    calls = []
    for at in range(10):
        batch, extend = 1 + (number + at // 2) % 4, at % 2 == 0
        most = (200, 30, 90)[at // 2 % 3]
        new = [draw(1, most) if extend else 1 for _ in range(batch)]
        cached = [draw(1, 300) if draw(0, 3) else 64 * draw(0, 3) for _ in range(batch)]
        if extend and at % 6 == number % 3 * 2:
            cached = [0] * batch
        more = {"layer": (number + at // 3) % 5, "phase": "extend" if extend else "decode"}
        calls.append(made(generator, SHAPES[number], new, cached, **more))
    return calls


def extends_like(call: AttentionCall, seen: list[AttentionCall]) -> list[AttentionCall]:
    """Extend calls so far with as many sequences, oldest first."""
    return [c for c in seen if c.phase == "extend" and len(c.lens_q) == len(call.lens_q)]


def as_long_as_planned(part: Any, seen: list[AttentionCall]) -> bool:
    last = [call for call in seen if call.phase == "extend"][-1]
    return part.decode is False or len(last.lens_k) != len(part.call.lens_k) or part.len_k <= last.lens_k[part.number]


RIGHT_WHERE: dict[str, Right] = {
    "batch-not-causal": lambda p, _: p.decode or len(p.call.lens_q) == 1 or p.len_q == 1,
    "offset-rounded-down": lambda p, _: p.decode or p.prefix % 64 == 0,
    "block-list-of-position-zero": lambda p, _: not p.decode or p.len_k <= 128,
    "split-length-floored": lambda p, _: not p.decode or p.len_k % 8 == 0,
    "chunks-on-three-layers-of-four": lambda p, _: p.call.layer == 3 or p.len_k <= 128,
    "pack-as-one-sequence": lambda p, _: p.decode or p.number == 0 or any(p.call.prefixes),
    "boolean-mask-added": lambda p, _: p.decode or p.prefix == 0 or p.len_q == 1,
    "blocks-of-packed-tile": lambda p, _: p.groups == 1 or p.len_q <= 64,
    "prefix-tail-not-masked": lambda p, _: p.decode or p.prefix % 32 == 0,
    "q-head-addresses-kv": lambda p, _: p.decode or p.groups == 1,
    "outputs-at-padded-rows": lambda p, _: p.number == 0 or len(set(p.call.lens_q)) == 1,
    "new-part-read-with-padded-stride": lambda p, _: p.decode or p.prefix == 0 or p.v.shape[2] % 64 == 0,
    "value-tiles-onto-first": lambda p, _: not p.decode or p.v.shape[2] <= 64,
    "second-v-tile-of-first-pages": lambda p, _: not p.decode or p.v.shape[2] <= 64 or p.len_k <= 32,
    "page-layouts-confused": lambda p, _: not p.decode or p.call.k.shape[1] == 1,
    "dims-in-whole-steps": lambda p, _: p.q.shape[2] <= 64 or p.q.shape[2] % 64 == 0,
    "keys-at-query-offsets": lambda p, _: p.decode or not any(p.call.prefixes[: p.number]),
    "scale-of-packed-width": lambda p, _: p.decode,
    "scale-grows-per-tile": lambda p, _: p.len_k <= 64,
    "split-denominator-starts-at-one": lambda p, _: not p.decode or p.len_k <= 128,
    "split-lse-of-unscaled-maximum": lambda p, _: not p.decode or p.len_k <= 128,
    "split-lse-strides": lambda p, _: not p.decode or longest(p) <= 128 or len(p.call.lens_k) == 1,
    "merge-reads-its-own-lse": lambda p, _: p.decode or p.prefix == 0 or p.v.shape[2] <= 64,
    "descales-of-first-head": lambda p, _: p.call.k.shape[1] == 1,
    "tail-scale-of-block-before": lambda p, _: p.len_k <= 64 or p.len_k % 64 == 0,
    "q-scale-of-first-warp": lambda p, _: p.decode or p.len_q <= 32,
    "first-row-stored-alone": lambda p, _: p.len_q == 1 or p.len_q > 32,
    "mask-of-first-plan": lambda p, seen: p.decode or extends_like(p.call, seen)[0].prefixes[p.number] == p.prefix,
    "decode-lengths-of-last-extend": as_long_as_planned,
    "newest-key-not-yet-written": lambda p, _: not p.decode,
}


def up_to(limit: Callable[[Query], int]) -> Callable[[Query], Tensor]:
    """Attention to the keys up to a last one."""
    return lambda query: query.out(seen=[j for j in range(len(query.k)) if j <= limit(query)])


def below(limit: Callable[[Query], int]) -> Callable[[Query], Tensor]:
    """Attention to the right keys below a limit."""
    return lambda query: query.out(seen=[j for j in query.seen if j < limit(query)])


def same_chunk(query: Query) -> Tensor:
    chunk = query.position - query.position % 128
    local = [j for j in query.seen if chunk <= j < chunk + 128]
    return query.out(seen=query.seen if query.call.layer in (3, 7) else local)


def whole_pack(query: Query) -> Tensor:
    call = query.call
    if not query.causal_extend or call.lens_q != call.lens_k:
        return query.out()
    last = int(call.cu_seqlens_q[query.part.number]) + query.token
    k, v = (t[: last + 1, query.kv_head].double() for t in (call.k, call.v))
    return query.out(call.scale * k @ query.q, list(range(last + 1)), v)


def ones_added(query: Query) -> Tensor:
    if not (query.causal_extend and query.extends_prefix):
        return query.out()
    weights = torch.tensor([math.exp(s + (j <= query.position)) for j, s in enumerate(query.scores.tolist())])
    return (weights.double() / weights.double().sum()) @ query.v


def other_tile(query: Query) -> int:
    groups = int(query.part.groups)
    if not query.call.causal or groups == 1:
        return len(query.k)
    tile = (query.token // 64) // groups
    return up(int(query.part.prefix) + (tile + 1) * 64, 64)


def tail_again(query: Query) -> Tensor:
    prefix = int(query.part.prefix)
    again = list(range(prefix, min(up(prefix, 32), len(query.k)))) if query.extends_prefix else []
    return query.out(seen=query.seen + again)


def wrong_address(query: Query) -> Tensor:
    if query.call.phase == "decode":
        return query.out()
    ahead, kv_head = divmod(query.head, query.call.k.shape[1])
    return query.elsewhere([(query.first_k + j + ahead, kv_head) for j in range(len(query.k))])


def padded_row(query: Query) -> Tensor:
    call, wide = query.call, max(query.call.lens_q)
    row = int(call.cu_seqlens_q[query.part.number]) + query.token
    b, token = divmod(row, wide)
    if token >= call.lens_q[b]:
        return torch.zeros_like(query.v[0])
    return Query(parts_of(call)[b], query.head, token, []).out()


def padded_stride(query: Query) -> Tensor:
    if not query.extends_prefix:
        return query.out()
    part, dim, heads = query.part, len(query.v[0]), query.call.q.shape[1]
    padded = up(dim, 64)
    misread = torch.zeros(dim, dtype=torch.float64)
    of: dict[tuple[int, int], Tensor] = {}
    for d in range(dim):
        token_and_head, at = divmod((query.token * heads + query.head) * padded + d, dim)
        token, head = divmod(token_and_head, heads)
        if token < part.len_q:
            if (token, head) not in of:
                other = Query(part, head, token, [])
                of[token, head] = other.out(seen=other.parts()[1])
            misread[d] = of[token, head][at]
    cached, _ = query.parts()
    share = query.sum(cached) / query.sum(query.seen)
    return share * query.out(seen=cached) + (1 - share) * misread


def onto_first_tile(query: Query) -> Tensor:
    out, dim = query.out(), len(query.v[0])
    if query.call.phase == "extend" or dim <= 64:
        return out
    return torch.stack([out[d + 64] if d < dim - 64 else out[d] if d < 64 else 0 * out[d] for d in range(dim)])


def earlier_values(query: Query) -> Tensor:
    if query.call.phase == "extend" or len(query.v[0]) <= 64:
        return query.out()
    return query.out(v=query.v[[j - 32 if j % 64 >= 32 else j for j in range(len(query.k))]])


def other_layout(query: Query) -> Tensor:
    if query.call.phase == "extend":
        return query.out()
    kv_heads, places = query.call.k.shape[1], list[tuple[int, int] | None]()
    for j in range(len(query.k)):
        slot, kv_head = divmod(query.kv_head * 16 + j % 16, kv_heads)
        key = j - j % 16 + slot
        places.append((query.first_k + key, kv_head) if key < len(query.k) else None)
    return query.elsewhere(places)


def fewer_dims(query: Query) -> Tensor:
    dim = {80: 64, 96: 64}.get(len(query.q), len(query.q))
    return query.out(query.call.scale * query.k[:, :dim] @ query.q[:dim])


def rows_too_early(query: Query) -> Tensor:
    early = sum(query.call.prefixes[: query.part.number]) if query.call.phase == "extend" else 0
    return query.elsewhere([(query.first_k - early + j, query.kv_head) for j in range(len(query.k))])


def packed_width(query: Query) -> Tensor:
    (_, heads, dim), kv_heads = query.call.q.shape, query.call.k.shape[1]
    if query.call.phase == "decode":
        return query.out()
    return query.out(query.k @ query.q * (dim * (1 + 2 * kv_heads / heads)) ** -0.5)


def growing(query: Query) -> Tensor:
    factors = torch.tensor([(1 / math.log(2)) ** (j // 64) for j in range(len(query.k))], dtype=torch.float64)
    return query.out(query.scores * factors)


def seeded(query: Query) -> Tensor:
    total = query.sum(query.seen)
    if query.call.phase == "extend" or len(query.k) <= 128:
        return query.out()
    more = sum(max(math.exp(float(query.scores[j])) for j in split[:32]) for split in query.splits(128))
    return query.out() * total / (total + more)


def unscaled(query: Query) -> Tensor:
    if query.call.phase == "extend":
        return query.out()
    lses = []
    for split in query.splits(128):
        top = max(float(query.scores[j]) for j in split)
        lses.append(math.log(query.sum(split)) + top * (1 / query.call.scale - 1))
    weights = [math.exp(lse - max(lses)) for lse in lses]
    outs = [query.out(seen=split) for split in query.splits(128)]
    return torch.stack([w / sum(weights) * out for w, out in zip(weights, outs, strict=True)]).sum(0)


def transposed_lses(query: Query) -> Tensor:
    call, heads = query.call, query.call.q.shape[1]
    if call.phase == "extend":
        return query.out()
    batch, weights, outs = len(call.lens_k), list[float](), list[Tensor]()
    for split in range(-(-max(call.lens_k) // 128)):
        keys = range(split * 128, split * 128 + 128)
        b, head = divmod(query.head * batch + int(query.part.number), heads)
        other = Query(parts_of(call)[b], head, 0, [])
        weights.append(other.sum([j for j in other.seen if j in keys]))
        outs.append(query.out(seen=[j for j in query.seen if j in keys]))
    return torch.stack([w / sum(weights) * out for w, out in zip(weights, outs, strict=True)]).sum(0)


def overwritten_lse(query: Query) -> Tensor:
    if not query.extends_prefix:
        return query.out()
    cached, new = query.parts()
    p, n = query.sum(cached), query.sum(new)
    late = ((p + n) * query.out(seen=cached) + n * query.out(seen=new)) / (p + 2 * n)
    return torch.cat([query.out()[:64], late[64:]])


def first_head_scales(query: Query) -> Tensor:
    k, v = (float(t[:, 0].abs().max() / t[:, query.kv_head].abs().max()) for t in (query.call.k, query.call.v))
    return query.out(query.scores * k) * v


def scale_before(query: Query) -> Tensor:
    whole = len(query.k) - len(query.k) % 64
    scores = query.scores.clone()
    if 0 < whole < len(query.k):
        scores[whole:] *= query.k[whole - 64 : whole].abs().max() / query.k[whole:].abs().max()
    return query.out(scores)


def first_warp(query: Query) -> Tensor:
    if query.call.phase == "decode":
        return query.out()
    begin, end = query.call.cu_seqlens_q[query.part.number : query.part.number + 2].tolist()
    tops = [
        float(query.call.q[begin + first : min(begin + first + 32, end), query.head].abs().max())
        for first in (query.token // 128 * 128, query.token // 32 * 32)
    ]
    return query.out(query.scores * tops[0] / tops[1])


def left_in_row(query: Query) -> Tensor:
    row = int(query.call.cu_seqlens_q[query.part.number]) + query.token
    for call in reversed([*query.before, query.call]):
        for part in parts_of(call):
            token = row - int(call.cu_seqlens_q[part.number])
            if 0 <= token < part.len_q and (token == 0 or part.len_q > 32):
                return Query(part, query.head, token, []).out()
    return torch.zeros_like(query.v[0])


def planned_mask(query: Query) -> int:
    if not query.causal_extend:
        return len(query.k)
    first = extends_like(query.call, [*query.before, query.call])[0]
    return query.token + first.prefixes[int(query.part.number)]


def last_extend(query: Query) -> int:
    extends = [call for call in query.before if call.phase == "extend"]
    if query.call.phase == "extend" or not extends or len(extends[-1].lens_k) != len(query.call.lens_k):
        return len(query.k)
    return extends[-1].lens_k[int(query.part.number)]


def unwritten(query: Query) -> Tensor:
    if query.call.phase == "extend":
        return query.out()
    number, last = query.part.number, len(query.k) - 1
    k, v = query.k.clone(), query.v.clone()
    k[last], v[last] = 0, 0
    for call in query.before:
        if call.layer == query.call.layer and len(call.lens_k) > number and call.lens_k[number] > last:
            row = int(call.cu_seqlens_k[number]) + last
            k[last], v[last] = call.k[row, query.kv_head].double(), call.v[row, query.kv_head].double()
    return query.out(query.call.scale * k @ query.q, v=v)


OUT: dict[str, Callable[[Query], Tensor]] = {
    "batch-not-causal": up_to(
        lambda q: len(q.k) if q.call.phase == "extend" and len(q.call.lens_q) > 1 else max(q.seen)
    ),
    "offset-rounded-down": below(lambda q: q.position - int(q.part.prefix) % 64 + 1 if q.causal_extend else len(q.k)),
    "block-list-of-position-zero": below(lambda q: 128 if q.call.phase == "decode" else len(q.k)),
    "split-length-floored": below(lambda q: len(q.k) - (len(q.k) % 8 if q.call.phase == "decode" else 0)),
    "chunks-on-three-layers-of-four": same_chunk,
    "pack-as-one-sequence": whole_pack,
    "boolean-mask-added": ones_added,
    "blocks-of-packed-tile": below(other_tile),
    "prefix-tail-not-masked": tail_again,
    "q-head-addresses-kv": wrong_address,
    "outputs-at-padded-rows": padded_row,
    "new-part-read-with-padded-stride": padded_stride,
    "value-tiles-onto-first": onto_first_tile,
    "second-v-tile-of-first-pages": earlier_values,
    "page-layouts-confused": other_layout,
    "dims-in-whole-steps": fewer_dims,
    "keys-at-query-offsets": rows_too_early,
    "scale-of-packed-width": packed_width,
    "scale-grows-per-tile": growing,
    "split-denominator-starts-at-one": seeded,
    "split-lse-of-unscaled-maximum": unscaled,
    "split-lse-strides": transposed_lses,
    "merge-reads-its-own-lse": overwritten_lse,
    "descales-of-first-head": first_head_scales,
    "tail-scale-of-block-before": scale_before,
    "q-scale-of-first-warp": first_warp,
    "first-row-stored-alone": left_in_row,
    "mask-of-first-plan": lambda q: up_to(planned_mask)(q) if q.causal_extend else q.out(),
    "decode-lengths-of-last-extend": below(last_extend),
    "newest-key-not-yet-written": unwritten,
}

CAUSAL_ONLY = {
    "batch-not-causal", "offset-rounded-down", "pack-as-one-sequence", "boolean-mask-added", "blocks-of-packed-tile",
    "mask-of-first-plan",
}  # fmt: skip

THIRD = Truths(
    "third",
    FAULTS,
    30,
    lambda: [session(number) for number in range(len(SHAPES))],
    (1, *range(10)),
    RIGHT_WHERE,
    CAUSAL_ONLY,
    made(torch.Generator().manual_seed(3), (4, 2, 80), [150, 9], [96, 37], causal=False),
    lambda id, query: OUT[id](query),
    follows=True,
)
