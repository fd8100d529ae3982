"""What the truths of the held-out sets are written with: calls, and attention for one query and head."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from held_out_faults import HeldOut, parts
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, cumulative
from assay.harness.attention.oracle import oracle

# Where a truth says that a sequence is right: (sequence as a Part, calls of the session so far with this one last) -> bool.
Right = Callable[[Any, list[AttentionCall]], bool]


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def longest(part: Any) -> int:
    return max(map(int, part.call.lens_k))


def parts_of(call: AttentionCall) -> list[Any]:
    return list(parts(call))


def made(
    generator: torch.Generator, shape: tuple[int, int, int], new: list[int], cached: list[int], **more: Any
) -> AttentionCall:
    heads, kv_heads, dim = shape
    lens = [n + c for n, c in zip(new, cached, strict=True)]
    q = torch.randn(sum(new), heads, dim, generator=generator)
    k, v = (torch.randn(sum(lens), kv_heads, dim, generator=generator) for _ in range(2))
    return AttentionCall(q, k, v, cumulative(new), cumulative(lens), CallSpec(dim**-0.5, **more))


def bottom_right(part: Any, token: int) -> list[int]:
    return list(range(part.prefix + token + 1)) if part.call.causal else list(range(part.len_k))


class Query:
    """One query and head of a sequence, float64.

    Attributes:
        part: the sequence.
        head: the q head.
        token: number of the new token.
        before: the calls before, oldest first.
        call: the call.
        kv_head: the kv head that it ought to read.
        position: position in the sequence.
        q: [head_dim].
        k: [len_k, head_dim].
        v: [len_k, head_dim_v].
        scores: scale * q k^T, [len_k].
        seen: the keys that it ought to see.
    """

    def __init__(self, part: Any, head: int, token: int, before: list[AttentionCall]) -> None:
        self.part, self.head, self.token, self.before = part, head, token, before
        call: AttentionCall = part.call
        self.call, self.kv_head, self.position = call, head // part.groups, int(part.prefix) + token
        self.first_k = int(call.cu_seqlens_k[part.number])
        rows = slice(self.first_k, int(call.cu_seqlens_k[part.number + 1]))
        self.q = call.q[int(call.cu_seqlens_q[part.number]) + token, head].double()
        self.k, self.v = (t[rows, self.kv_head].double() for t in (call.k, call.v))
        self.scores = call.scale * self.k @ self.q
        self.seen = bottom_right(part, token)

    @property
    def extends_prefix(self) -> bool:
        return self.call.phase == "extend" and self.part.prefix > 0

    @property
    def causal_extend(self) -> bool:
        return self.call.phase == "extend" and self.call.causal

    def out(self, scores: Tensor | None = None, seen: list[int] | None = None, v: Tensor | None = None) -> Tensor:
        """softmax(scores) v over some keys, [head_dim_v]; what is left out is right. Zero without a key."""
        scores, seen = self.scores if scores is None else scores, self.seen if seen is None else seen
        v = self.v if v is None else v
        return scores[seen].softmax(0) @ v[seen] if seen else torch.zeros_like(v[0])

    def sum(self, seen: list[int]) -> float:
        """Sum of exp(score) over some keys."""
        return sum(math.exp(float(self.scores[j])) for j in seen)

    def elsewhere(self, places: list[tuple[int, int] | None]) -> Tensor:
        """The output from other packed rows and kv heads, one per key of the sequence; None and rows behind the pack are zero."""
        found = []
        for packed in (self.call.k, self.call.v):
            zeros = torch.zeros_like(packed[0, 0])
            rows = [zeros if p is None or p[0] >= len(packed) else packed[p] for p in places]
            found.append(torch.stack(rows).double())
        return self.out(self.call.scale * found[0] @ self.q, v=found[1])

    def parts(self) -> tuple[list[int], list[int]]:
        """The keys that it sees in the cached prefix and among the new tokens."""
        prefix = self.part.prefix
        return [j for j in self.seen if j < prefix], [j for j in self.seen if j >= prefix]

    def splits(self, size: int) -> list[list[int]]:
        """The keys that it sees in splits."""
        found = ([j for j in self.seen if j // size == split] for split in range(-(-len(self.k) // size)))
        return [split for split in found if split]


@dataclass(frozen=True)
class Truths:
    """A held-out set, and what is said of its kernels.

    Attributes:
        name: of the set.
        faults: the kernels.
        number: of them.
        sessions: makes the calls that an engine sends to one fresh kernel each.
        order: numbers of the calls of a session, such that memory kept from the end would show at the beginning.
        right_where: where a truth says that a sequence is right.
        causal_only: kernels whose bug is gone without a causal mask.
        whole: a call without a causal mask.
        by_truth: the output by the truth, [head_dim_v]; None if it is not written out again.
        follows: whether the truths that are written out again also hold without a causal mask.
        blind: kernels whose output has little to do with the right one, with or without a mask.
    """

    name: str
    faults: Collection[HeldOut]
    number: int
    sessions: Callable[[], list[list[AttentionCall]]]
    order: tuple[int, ...]
    right_where: Mapping[str, Right]
    causal_only: Collection[str]
    whole: AttentionCall
    by_truth: Callable[[str, Query], Tensor] | None = None
    follows: bool = False
    blind: Collection[str] = ()

    @cached_property
    def pool(self) -> list[tuple[list[AttentionCall], list[Tensor]]]:
        """The calls of each session, and their float64 outputs."""
        return [(calls, [oracle(call) for call in calls]) for calls in self.sessions()]

    def fault(self, id: str) -> HeldOut:
        return next(fault for fault in self.faults if fault.id == id)
