"""What the truths of the held-out sets are written with, and the calls that they hold on."""

from __future__ import annotations

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
    blind: Collection[str] = ()

    @cached_property
    def pool(self) -> list[tuple[list[AttentionCall], list[Tensor]]]:
        """The calls of each session, and their float64 outputs."""
        return [(calls, [oracle(call) for call in calls]) for calls in self.sessions()]

    def fault(self, id: str) -> HeldOut:
        return next(fault for fault in self.faults if fault.id == id)
