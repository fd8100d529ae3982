"""The truths of the second held-out set: where each kernel is right, and what it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from held_out import Query, Right, Truths, bottom_right, longest, made, parts_of, up
from held_out_faults_second import SECOND as FAULTS
from torch import Tensor
from truths_first import SHAPES, session

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import sequences


def first_graph(part: Any, seen: list[AttentionCall]) -> bool:
    same = [call for call in seen if call.phase == "decode" and len(call.lens_k) == len(part.call.lens_k)]
    return not part.decode or part.len_k <= up(max(same[0].lens_k), 64)


def no_decode_before(part: Any, seen: list[AttentionCall]) -> bool:
    return not part.decode or all(call.phase != "decode" for call in seen[:-1])


RIGHT_WHERE: dict[str, Right] = {
    "top-left-causal": lambda p, _: p.decode or p.prefix == 0,
    "causal-one-ahead": lambda p, _: p.len_q == 1,
    "window-start-of-query-tile": lambda p, _: p.decode or p.prefix + (p.len_q - 1) // 64 * 64 < 160,
    "splits-of-cache-only": lambda p, _: p.prefix == 0 or p.len_k <= up(p.prefix, 128),
    "zero-padded-tail": lambda p, _: not p.decode or p.len_k % 64 == 0,
    "key-loop-of-first-token": lambda p, _: p.prefix % 32 + p.len_q <= 32,
    "swapped-groups-stay-causal": lambda p, _: p.groups == 1 or max(p.call.lens_q) > 1,
    "offset-from-longest-query": lambda p, _: p.len_q == max(p.call.lens_q),
    "no-mask-for-few-tokens": lambda p, _: p.prefix == 0 or p.len_q > 16 or p.len_q == 1,
    "mask-of-first-sequence": lambda p, _: p.prefix == p.call.prefixes[0],
    "split-gqa-reads-first-sequence": lambda p, _: not p.decode or p.groups == 1 or longest(p) < 128 or p.number == 0,
    "pool-read-as-packed": lambda p, _: (
        p.decode or not any(p.call.prefixes) or all(n % 16 == 0 for n in p.call.lens_k[: p.number])
    ),
    "v-block-of-head-dim": lambda p, _: not p.decode or p.len_k <= 128 or p.v.shape[2] == 128,
    "page-stride-without-v": lambda p, _: not p.decode or (p.number == 0 and p.len_k <= 16),
    "groups-padded-to-four": lambda p, _: p.groups == 1 or p.groups % 4 == 0,
    "q-stride-of-one-token": lambda p, _: p.decode or p.number == 0,
    "split-output-onto-first": lambda p, _: not p.decode or longest(p) <= 128 or len(p.call.lens_k) == 1,
    "tile-of-two-pages": lambda p, _: len(p.call.lens_k) == 1 or p.len_k <= 64,
    "fallback-without-scale": lambda p, _: p.decode or p.q.shape[2] in (64, 128),
    "prefix-merged-in-base-e": lambda p, _: p.decode or p.prefix == 0,
    "empty-chunks-merged": lambda p, _: p.decode or up(p.prefix, 64) == up(max(p.call.prefixes), 64),
    "running-max-overwritten": lambda p, _: not p.decode or len(p.call.lens_k) == 1,
    "lower-tiles-skipped": lambda p, _: p.len_k <= 64,
    "descales-of-first-sequence": lambda p, _: p.number == 0,
    "v-descale-is-that-of-k": lambda p, _: not p.decode,
    "prefix-smoothed-alone": lambda p, _: p.decode or p.prefix == 0,
    "page-table-width-of-first-call": lambda p, seen: (
        p.number == 0 or up(longest(p), 16) == up(max(seen[0].lens_k), 16)
    ),
    "longest-length-of-first-graph": first_graph,
    "stale-splits-merged": lambda p, seen: no_decode_before(p, seen) or up(p.len_k, 64) == up(longest(p), 64),
    "padding-writes-slot-zero": lambda p, _: not p.decode or p.number > 0 or len(p.call.lens_k) == 4,
}

CAUSAL_ONLY = {
    "top-left-causal", "causal-one-ahead", "key-loop-of-first-token", "swapped-groups-stay-causal",
    "offset-from-longest-query", "no-mask-for-few-tokens", "mask-of-first-sequence",
}  # fmt: skip
BLIND = {"page-stride-without-v", "fallback-without-scale", "q-stride-of-one-token"}

# What a truth says, once more: which keys head h of new token i of a sequence sees, and the packed rows of their K and V (None
# for zeros).
Seen = Callable[[Any, int, int], list[int]]


def cut(limit: Callable[[Any, int, int], int]) -> Seen:
    """The right keys below a limit."""
    return lambda part, head, token: [j for j in bottom_right(part, token) if j < limit(part, head, token)]


def up_to(last: Callable[[Any, int, int], int]) -> Seen:
    """Keys up to a last one in causal calls."""
    return lambda part, head, token: (
        [j for j in range(part.len_k) if j <= last(part, head, token)]
        if part.call.causal
        else bottom_right(part, token)
    )


def from_window(part: Any, _: int, token: int) -> list[int]:
    tile_begins = part.prefix + token - token % 64
    begin = 0 if part.decode else max(0, tile_begins - 128)
    return [j for j in bottom_right(part, token) if j >= begin - begin % 32]


def loop_end(part: Any, _: int, token: int) -> int:
    per_tile = 64 // part.groups
    tile_begins = part.prefix + token - token % per_tile
    return int(tile_begins - tile_begins % 32 + 32 if part.call.causal else part.len_k)


def swapped(part: Any, head: int, token: int) -> int:
    if set(part.call.lens_q) != {1}:
        return int(part.prefix + token)
    missing = part.groups - 1 - head % part.groups
    return int(part.len_k - 1 - missing)


SEEN: dict[str, Seen] = {
    "top-left-causal": up_to(lambda p, _, i: p.prefix + i if p.decode else i),
    "causal-one-ahead": up_to(lambda p, _, i: p.prefix + i + 1),
    "window-start-of-query-tile": from_window,
    "splits-of-cache-only": cut(lambda p, _, i: up(p.prefix, 128) if p.prefix else p.len_k),
    "key-loop-of-first-token": cut(loop_end),
    "swapped-groups-stay-causal": up_to(swapped),
    "offset-from-longest-query": up_to(lambda p, _, i: i + p.len_k - max(p.call.lens_q)),
    "no-mask-for-few-tokens": up_to(lambda p, _, i: p.len_k if p.prefix and p.len_q <= 16 else p.prefix + i),
    "mask-of-first-sequence": up_to(lambda p, _, i: i + p.call.lens_k[0] - p.call.lens_q[0]),
}


def paged(call: AttentionCall, size: int) -> list[list[int | None]]:
    """The packed rows in the pages of a pool, sequence after sequence, None in slots that are not filled."""
    pool: list[list[int | None]] = []
    for _, rows in sequences(call):
        for at in range(rows.start, rows.stop, size):
            page: list[int | None] = [row if row < rows.stop else None for row in range(at, at + size)]
            pool.append(page)
    return pool


def packed_rows(part: Any, key: int) -> int | None:
    at = int(part.start + key)
    if part.decode or not any(part.call.prefixes):
        return at
    return [row for page in paged(part.call, 16) for row in page][at]


def two_pages(part: Any, key: int) -> int | None:
    lens: list[int] = part.call.lens_k
    own = [-(-n // 64) for n in lens]
    pool = paged(part.call, 64)
    in_turn = [(b, p) for p in range(max(own)) for b, n in enumerate(own) if p < n]
    place = in_turn.index((int(part.number), key // 128 * 2)) + (key % 128 >= 64)
    if place >= len(in_turn):
        return None
    b, p = in_turn[place]
    return pool[sum(own[:b]) + p][key % 64]


READ: dict[str, tuple[Callable[[Any, int], int | None], Callable[[Any, int], int | None]]] = {
    "split-gqa-reads-first-sequence": 2
    * (lambda p, j: j if p.decode and p.groups > 1 and longest(p) >= 128 else p.start + j,),
    "pool-read-as-packed": 2 * (packed_rows,),
    "v-block-of-head-dim": (
        lambda p, j: p.start + j,
        lambda p, j: p.start + j - (128 - p.v.shape[2] if p.decode else 0) * (j // 128),
    ),
    "tile-of-two-pages": 2 * (two_pages,),
}


def rows_of(call: AttentionCall, rows: list[int | None], kv_head: int, tensor: str) -> Tensor:
    """Packed rows of k or v, zeros for None, float64 [len(rows), dim]."""
    packed: Tensor = getattr(call, tensor)[:, kv_head].double()
    return torch.stack([torch.zeros_like(packed[0]) if row is None else packed[row] for row in rows])


def elsewhere(query: Query, rows: list[int | None]) -> Tensor:
    """The output from other rows of K and V."""
    k, v = (rows_of(query.call, rows, query.kv_head, t) for t in "kv")
    return query.out(query.call.scale * k @ query.q, v=v)


def zero_padded_tail(query: Query) -> Tensor:
    if query.call.causal and not query.part.decode:
        return query.out()
    total, zeros = query.sum(query.seen), (64 - len(query.k) % 64) % 64
    return query.out() * total / (total + zeros)


def page_stride(query: Query) -> Tensor:
    part, pool = query.part, paged(query.call, 16)
    if not part.decode:
        return query.out()
    first = sum(-(-n // 16) for n in query.call.lens_k[: part.number])

    def half_page(number: int) -> Tensor:
        return rows_of(query.call, pool[number // 2], query.kv_head, "v" if number % 2 else "k")

    own = range(first, first - (-part.len_k // 16))
    k, v = (torch.cat([half_page(page + more) for page in own])[: part.len_k] for more in (0, 1))
    return query.out(query.call.scale * k @ query.q, v=v)


def padded_groups(query: Query) -> Tensor:
    groups = query.part.groups
    of = query.head // {1: 1, 2: 4, 4: 4}[groups]
    first = int(query.call.cu_seqlens_k[query.part.number])
    k, v = (rows_of(query.call, [first + j for j in range(query.part.len_k)], of, t) for t in "kv")
    return query.out(query.call.scale * k @ query.q, v=v)


def query_of_another(query: Query) -> Tensor:
    q = query.call.q[query.part.number + query.token, query.head].double()
    return query.out(query.call.scale * query.k @ q)


def onto_first(query: Query) -> Tensor:
    lens = query.call.lens_k
    if not query.part.decode or max(lens) <= 128:
        return query.out()
    if query.part.number > 0:
        return torch.zeros_like(query.v[0])
    q, kv_head = query.call.q[-1, query.head].double(), query.kv_head
    k, v = (t[len(t) - lens[-1] :, kv_head].double() for t in (query.call.k, query.call.v))
    return (query.call.scale * k @ q).softmax(0) @ v


def without_scale(query: Query) -> Tensor:
    if query.part.decode or len(query.q) in (64, 128):
        return query.out()
    return query.out(query.k @ query.q)


def other_base(query: Query) -> Tensor:
    prefix = query.part.prefix
    if query.part.decode or prefix == 0:
        return query.out()
    cached, new = ([j for j in query.seen if (j < prefix) is old] for old in (True, False))
    share = 1 / (1 + math.exp((math.log(query.sum(new)) - math.log(query.sum(cached))) / math.log(2)))
    return share * query.out(seen=cached) + (1 - share) * query.out(seen=new)


def empty_chunks(query: Query) -> Tensor:
    chunks = [-(-prefix // 64) for prefix in query.call.prefixes]
    lacking = 0 if query.part.decode else max(chunks) - chunks[query.part.number]
    total = query.sum(query.seen)
    return query.out() * total / (total + lacking)


def never_rescaled(query: Query) -> Tensor:
    if not query.part.decode or len(query.call.lens_q) == 1:
        return query.out()
    top, total, summed = -math.inf, 0.0, torch.zeros_like(query.v[0])
    for j in query.seen:
        top = max(top, float(query.scores[j]))
        weight = math.exp(float(query.scores[j]) - top)
        total, summed = total + weight, summed + weight * query.v[j]
    return summed / total


def tiles_skipped(query: Query) -> Tensor:
    part, first = query.part, query.token // 64 * 64
    together = [Query(part, query.head, t, []) for t in range(first, min(first + 64, part.len_q))]
    kept, tops = [], [-math.inf] * len(together)
    for begin in range(0, part.len_k, 64):
        tile = [float(o.scores[[j for j in o.seen if begin <= j < begin + 64] or [0]].max()) for o in together]
        tile = [top if o.seen[-1] >= begin else -math.inf for o, top in zip(together, tile, strict=True)]
        if any(own >= top for own, top in zip(tile, tops, strict=True)):
            kept += [j for j in query.seen if begin <= j < begin + 64]
        tops = [max(own, top) for own, top in zip(tile, tops, strict=True)]
    return query.out(seen=kept)


def first_descales(query: Query) -> Tensor:
    here, first = query.part.number, slice(0, query.call.lens_k[0])
    assert here > 0 or len(query.k) == first.stop
    ratio_k, ratio_v = (
        float(t[first, query.kv_head].abs().max() / own.abs().max())
        for t, own in ((query.call.k, query.k), (query.call.v, query.v))
    )
    return query.out(query.scores * ratio_k) * ratio_v


def v_descale_of_k(query: Query) -> Tensor:
    k, v = (float(t[:, query.kv_head].abs().max()) for t in (query.call.k, query.call.v))
    return query.out() * (k / v if query.part.decode else 1)


def shifted(query: Query) -> Tensor:
    prefix = query.part.prefix
    if query.part.decode or prefix == 0:
        return query.out()
    scores = query.scores.clone()
    scores[:prefix] += query.call.scale * (query.k[prefix:].mean(0) - query.k[:prefix].mean(0)) @ query.q
    return query.out(scores)


def first_width(query: Query) -> Tensor:
    call, pages = query.call, [-(-n // 16) for n in query.call.lens_k]
    width = -(-max((query.before or [call])[0].lens_k) // 16)
    table = []
    for b, count in enumerate(pages):
        table += [sum(pages[:b]) + p for p in range(count)] + [0] * (max(pages) - count)
    table += [0] * (width * len(pages))
    found = table[query.part.number * width :][: pages[query.part.number]]
    pool = paged(call, 16)
    return elsewhere(query, [row for page in found for row in pool[page]][: query.part.len_k])


def captured_length(query: Query) -> Tensor:
    if not query.part.decode:
        return query.out()
    like = [c for c in [*query.before, query.call] if c.phase == "decode" and len(c.lens_q) == len(query.call.lens_q)]
    return query.out(seen=[j for j in query.seen if j < up(max(like[0].lens_k), 64)])


def stale_splits(query: Query) -> Tensor:
    part, states = query.part, []
    if not part.decode:
        return query.out()
    for split in range(-(-max(query.call.lens_k) // 64)):
        keys = range(split * 64, split * 64 + 64)
        for other in reversed([*query.before, query.call]):
            if other.phase == "decode" and len(other.lens_k) > part.number and other.lens_k[part.number] > keys[0]:
                of = Query(parts_of(other)[part.number], query.head, 0, [])
                seen = [j for j in of.seen if j in keys]
                states.append((of.sum(seen), of.out(seen=seen)))
                break
    total = sum(weight for weight, _ in states)
    return torch.stack([weight / total * out for weight, out in states]).sum(0)


def overwritten_slot(query: Query) -> Tensor:
    call, batch = query.call, len(query.call.lens_k)
    if not query.part.decode or query.part.number > 0 or batch % 4 == 0:
        return query.out()
    k, v = query.k.clone(), query.v.clone()
    k[0], v[0] = 0, 0
    for other in query.before:
        if other.phase == "decode" and other.layer == call.layer and len(other.lens_k) == 4:
            k[0], v[0] = other.k[-1, query.kv_head].double(), other.v[-1, query.kv_head].double()
    return query.out(call.scale * k @ query.q, v=v)


OUT: dict[str, Callable[[Query], Tensor]] = {
    "zero-padded-tail": zero_padded_tail,
    "page-stride-without-v": page_stride,
    "groups-padded-to-four": padded_groups,
    "q-stride-of-one-token": query_of_another,
    "split-output-onto-first": onto_first,
    "fallback-without-scale": without_scale,
    "prefix-merged-in-base-e": other_base,
    "empty-chunks-merged": empty_chunks,
    "running-max-overwritten": never_rescaled,
    "lower-tiles-skipped": tiles_skipped,
    "descales-of-first-sequence": first_descales,
    "v-descale-is-that-of-k": v_descale_of_k,
    "prefix-smoothed-alone": shifted,
    "page-table-width-of-first-call": first_width,
    "longest-length-of-first-graph": captured_length,
    "stale-splits-merged": stale_splits,
    "padding-writes-slot-zero": overwritten_slot,
}


def by_truth(name: str, query: Query) -> Tensor:
    """The output by the truth, [head_dim_v]."""
    if name in OUT:
        return OUT[name](query)
    if name in SEEN:
        return query.out(seen=SEEN[name](query.part, query.head, query.token))
    k, v = (
        rows_of(query.call, [row(query.part, j) for j in range(query.part.len_k)], query.kv_head, tensor)
        for row, tensor in zip(READ[name], "kv", strict=True)
    )
    return query.out(query.call.scale * k @ query.q, v=v)


SECOND = Truths(
    "second",
    FAULTS,
    30,
    lambda: [session(number, decodes=8) for number in range(8)],
    (6, 4, 0, 1, 2, 3, 8, 7),  # it ends with another batch, other lengths and other layers than it begins
    RIGHT_WHERE,
    CAUSAL_ONLY,
    made(torch.Generator().manual_seed(3), SHAPES[1], [150, 9], [96, 37], causal=False),
    by_truth,
    blind=BLIND,
)
