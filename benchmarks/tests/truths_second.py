"""The truths of the second held-out set: where each kernel is right."""

from __future__ import annotations

from typing import Any

import torch
from held_out import Right, Truths, longest, made, up
from held_out_faults_second import SECOND as FAULTS
from truths_first import SHAPES, session

from assay.harness.attention.call import AttentionCall, Mask


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

SECOND = Truths(
    "second",
    FAULTS,
    30,
    lambda: [session(number, decodes=8) for number in range(8)],
    (6, 4, 0, 1, 2, 3, 8, 7),  # it ends with another batch, other lengths and other layers than it begins
    RIGHT_WHERE,
    CAUSAL_ONLY,
    made(torch.Generator().manual_seed(3), SHAPES[1], [150, 9], [96, 37], mask=Mask(causal=False)),
    BLIND,
)
