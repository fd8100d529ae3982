"""The truths of the third held-out set: where each kernel is right."""

from __future__ import annotations

from typing import Any

import torch
from held_out import Right, Truths, longest, made
from held_out_faults_third import THIRD as FAULTS

from assay.harness.attention.call import AttentionCall, Mask

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

CAUSAL_ONLY = {
    "batch-not-causal", "offset-rounded-down", "pack-as-one-sequence", "boolean-mask-added", "blocks-of-packed-tile",
    "mask-of-first-plan",
}  # fmt: skip

BLIND = {"chunks-on-three-layers-of-four", "scale-grows-per-tile"}

THIRD = Truths(
    "third",
    FAULTS,
    30,
    lambda: [session(number) for number in range(len(SHAPES))],
    (1, *range(10)),
    RIGHT_WHERE,
    CAUSAL_ONLY,
    made(torch.Generator().manual_seed(3), (4, 2, 80), [150, 9], [96, 37], mask=Mask(causal=False)),
    BLIND,
)
