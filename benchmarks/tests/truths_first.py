"""The truths of the first held-out set: where each kernel is right."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
from held_out import Right, Truths, made
from held_out_faults import HELD_OUT

from assay.harness.attention.call import AttentionCall

SHAPES = ((4, 2, 32), (8, 2, 128), (4, 4, 16), (8, 2, 96))
"""Heads, kv heads and head dim of a session: what an engine sends to one fresh kernel."""


def session(number: int, extends: int = 5, decodes: int = 4) -> list[AttentionCall]:
    """Calls of one shape: prompts without and with cached prefixes, then decode steps of several batches."""
    drawn, generator, calls = random.Random(number), torch.Generator().manual_seed(number), []
    for step in range(extends):
        batch = drawn.choice((1, 2, 3))
        new = [drawn.choice((drawn.randint(1, 40), drawn.randint(41, 200))) for _ in range(batch)]
        cached = [drawn.choice((0, 64, drawn.randint(1, 220))) if step else 0 for _ in range(batch)]
        calls.append(made(generator, SHAPES[number % 4], new, cached, layer=step % 3, phase="extend"))
    for step in range(decodes):
        batch = (1, 3, 3, 4)[step % 4]
        cached = [drawn.choice((drawn.randint(1, 60), 127, drawn.randint(61, 300))) for _ in range(batch)]
        calls.append(
            made(generator, SHAPES[number % 4], [1] * batch, cached, layer=(1, 2, 3, 2)[step % 4], phase="decode")
        )
    return calls


def extends(part: Any, _: list[AttentionCall]) -> bool:
    return not part.decode


def first_of_its_layer(part: Any, seen: list[AttentionCall]) -> bool:
    return all(call.layer != part.call.layer for call in seen[:-1])


def own_rank(part: Any) -> bool:
    lens = part.call.lens_k
    return not part.decode or all(a >= b for a, b in pairwise(lens))


def one_block(part: Any) -> bool:
    return part.number == 0 or all(n % 64 == 0 for n in part.call.lens_k[: part.number])


RIGHT_WHERE: dict[str, Right] = {
    "one-masked-tile": lambda p, _: p.prefix % 64 == 0 or p.decode,
    "packed-gqa-position": lambda p, _: p.groups == 1 or p.len_q <= 64 // p.groups,
    "offset-rounded-to-page": lambda p, _: p.prefix % 16 == 0 or p.decode,
    "chunk-restarts-offset": lambda p, _: p.len_q <= 128,
    "bfloat16-positions": lambda p, _: p.len_k <= 257,
    "overlapping-tail-tile": lambda p, _: p.len_q <= 16 or p.len_q % 16 == 0,
    "last-page-length-zero": lambda p, _: p.prefix == 0 or p.prefix % 16 != 0,
    "window-on-even-layers": lambda p, _: not p.decode or p.call.layer % 2 == 1 or p.len_k <= 128,
    "lengths-in-sorted-order": lambda p, _: own_rank(p),
    "decode-tail-reads-on": lambda p, _: not p.decode or p.len_k % 32 == 0,
    "page-table-stride": lambda p, _: p.number == 0 or -(-p.len_k // 64) == -(-max(p.call.lens_k) // 64),
    "half-page-offset": lambda p, _: p.len_k <= 32,
    "uniform-prefix-assumed": lambda p, _: len(set(p.call.prefixes[: p.number] + p.call.prefixes[:1])) == 1,
    "ring-of-256": lambda p, _: p.len_k <= 256,
    "shared-prefix-assumed": lambda p, _: p.number == 0 or min(p.call.prefixes) < 16,
    "decode-v-two-back": lambda p, _: not p.decode or p.number < 2,
    "tail-values-are-keys": lambda p, _: not p.decode or p.len_k % 16 == 0,
    "key-vector-width": extends,
    "modulo-heads-when-split": lambda p, _: not p.decode or p.len_k <= 128 or p.groups == 1,
    "v-head-by-kv-heads": lambda p, _: p.call.q.shape[1] == p.call.k.shape[1] ** 2,
    "decode-output-transposed": lambda p, _: not p.decode or len(p.call.lens_q) == 1,
    "tail-tile-half-dims": lambda p, _: p.call.q.shape[2] <= 64 or p.len_k % 64 == 0,
    "decode-scale-of-padded-dim": lambda p, _: not p.decode or p.call.q.shape[2] % 64 == 0,
    "k-scale-of-packed-block": lambda p, _: one_block(p),
    "q-scale-of-first-head": lambda p, _: p.groups == 1,
    "v-range-of-new-tokens": lambda p, _: p.decode or p.prefix == 0,
    "k-scale-one-call-late": first_of_its_layer,
    "rescale-skipped": lambda p, _: p.len_k <= 64,
    "denominator-rescaled-late": lambda p, _: p.len_k <= 32,
    "log2e-missing-on-diagonal": lambda p, _: p.decode,
    "denominator-before-mask": lambda p, _: p.decode,
    "state-of-earlier-tile": lambda p, _: p.len_q <= 64,
    "sinks-twice": lambda p, _: p.len_k <= 64,
    "merge-in-base-two": lambda p, _: not p.decode or p.len_k <= 128,
    "prefix-lse-layout": lambda p, _: p.prefix == 0 or p.len_q == 1,
    "stale-page-tail": lambda p, _: not p.decode or p.len_k % 16 == 0,
    "decode-plan-kept": lambda p, seen: not p.decode or len(seen) < 2 or len(seen[-2].lens_k) != len(p.call.lens_k),
    "tail-rows-not-stored": lambda p, _: p.len_q <= 16 or p.len_q % 16 not in (1, 2, 3),
    "every-fourth-call": lambda p, seen: len(seen) % 4 != 0 or p.prefix < 64,
    "prefix-values-of-layer-before": lambda p, _: p.call.layer % 2 == 0 or p.prefix == 0,
}

CAUSAL_ONLY = {
    "one-masked-tile", "packed-gqa-position", "offset-rounded-to-page", "chunk-restarts-offset", "bfloat16-positions",
    "overlapping-tail-tile", "log2e-missing-on-diagonal", "denominator-before-mask",
}  # fmt: skip

FIRST = Truths(
    "first",
    HELD_OUT,
    40,
    lambda: [session(number) for number in range(8)],
    (6, 4, 0, 1, 2, 3, 7),  # both ends decode three sequences, and an odd layer comes before the even one
    RIGHT_WHERE,
    CAUSAL_ONLY,
    made(torch.Generator().manual_seed(3), SHAPES[1], [150, 21], [96, 37], causal=False),
)
