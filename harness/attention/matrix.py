"""The op-level matrix: calls on synthetic data, under the conditions in which attention kernels fail.

The axes follow SGLang's dense attention kit (``sglang.test.kits.attention_unittest``) and vLLM's ``BatchSpec`` (queries shorter
than their sequence, shuffled block tables): cached prefix, new tokens, batch, heads, head_dim, dtype, data and page size. The
matrix is a covering design, not their product: every pair of values of two axes occurs in at least one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from allpairspy import AllPairs  # type: ignore[import-untyped]

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.paging import through_pages
from assay.harness.attention.sample_calls import call_of
from assay.harness.conditions import PHASES

Size = Literal["small", "full"]
Lens = list[tuple[int, int]]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)

PREFIXES: dict[Size, tuple[int, ...]] = {
    "small": (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200),
    "full": (0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000),
}
"""Cached prefixes, in tokens: none, one, values around every page and block size in use, and a long one."""
NEW: dict[Size, tuple[int, ...]] = {
    "small": (1, 7, 64, 65, 129),
    "full": (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 512),
}
"""New tokens of an extend call. A decode call has one per sequence."""
HEADS: dict[Size, tuple[tuple[int, int], ...]] = {
    "small": ((4, 4), (4, 2), (4, 1)),
    "full": ((8, 8), (8, 4), (8, 2), (8, 1)),
}
"""(q heads, kv heads): MHA, GQA, MQA, with equal numbers of q heads so that a finding can name the wrong ones."""
LONG: dict[Size, int] = {"small": 130, "full": 2000}
"""Cached prefix, in tokens, of a long sequence next to the one under test."""
_FAR: dict[str, tuple[tuple[int, int, str, str], ...]] = {
    "extend": (
        (40, 600, "one", "normal"),
        (600, 0, "one", "normal"),
        (40, 600, "one", "other numbers"),
        (128, 384, "nine at borders", "scale 1.5 times"),
        (34, 0, "one", "scores far above 0"),
        (34, 0, "one", "scores far below 0"),
    ),
    "decode": (
        (1, 700, "one", "normal"),
        (1, 2200, "one", "normal"),
        (1, 700, "one", "other numbers"),
        (1, 300, "seventeen at borders", "scale 1.5 times"),
        (1, 157, "one", "scores far above 0"),
        (1, 157, "one", "scores far below 0"),
    ),
}
"""(new tokens, cached prefix, batch, data) of calls beyond the design.

They show windows, blocks and limits of up to 2,048 tokens, a chunk behind a long prefix, results kept by shape, larger batches, new
tokens that just fill a block or nearly do, another scale than that of head_dim, and scores that overflow or underflow unless their
own maximum is subtracted.
"""
_MANY_KEYS: dict[str, tuple[int, int]] = {"extend": (2, 4000), "decode": (1, 4000)}
"""(new tokens, cached prefix) of a call in the first dtype, where the others beyond the design are in the last.

It shows sums that are kept in 16 bits. In float32 they hide on a GPU, where a correct kernel may compute in TF32.
"""
PAGES = (0, 1, 16, 64)
"""Page size, in tokens, of the KV pool from which K and V are gathered; 0 if they are packed from the start."""

_BATCHES: dict[str, dict[str, Callable[[int, int, int], Lens]]] = {
    "extend": {
        "one": lambda new, prefix, long: [(new, prefix)],
        "one token last": lambda new, prefix, long: [(new, prefix), (1, 33)],
        "after no prefix": lambda new, prefix, long: [(7, 0), (new, prefix)],
        "before a long prefix": lambda new, prefix, long: [(new, prefix), (3, long)],
        "between others": lambda new, prefix, long: [(2, 0), (new, prefix), (5, 16)],
    },
    "decode": {
        "one": lambda new, prefix, long: [(1, prefix)],
        "after a short one": lambda new, prefix, long: [(1, 1), (1, prefix)],
        "before a long one": lambda new, prefix, long: [(1, prefix), (1, long)],
        "between others": lambda new, prefix, long: [(1, 16), (1, prefix), (1, 77)],
    },
}
"""Sequences of a call as (new tokens, cached prefix): the one that the axes describe, and its neighbours."""


_BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
_WIDE: dict[str, Callable[[int, int, int], Lens]] = {
    "nine at borders": lambda new, prefix, long: [
        (new, prefix), (63, 0), (127, 16), (128, 0), (16, 48), (2, 200), (31, 33), (128, 128), (5, 59)
    ],
    "seventeen at borders": lambda new, prefix, long: [(1, prefix), *((1, border) for border in _BORDERS)],
}  # fmt: skip
"""Batches of calls beyond the design."""


def _offset(call: AttentionCall) -> AttentionCall:
    # Equal in every token, as in real K: what K smoothing removes (arXiv 2410.02367, section 4.2).
    common = torch.linspace(-6, 6, call.k.shape[2], device=call.k.device).to(call.k.dtype)
    return replace(call, k=call.k + common)


_DATA: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "normal": lambda call: call,
    "peaky": lambda call: replace(call, q=2 * call.q, k=2 * call.k),
    "K offset": _offset,
    "large values": lambda call: replace(call, v=300 * call.v),  # beyond fp8's 448, within fp16
}


def _far_from_zero(sign: int, call: AttentionCall) -> AttentionCall:
    # Each query sees the first new key alone: it scores 110 and the others 0, or it -110 and the others -220. exp overflows, or is
    # zero, in float32. Scores need not be precise for that, so no noise family is in the way.
    size = (110 / call.scale / call.q.shape[2]) ** 0.5
    steps = []
    for length, prefix in zip(call.lens_k, call.prefixes, strict=True):
        steps += [sign - 1.0 + (key == prefix) for key in range(length)]
    return replace(call, q=call.q + size, k=call.k + size * torch.tensor(steps).to(call.k)[:, None, None])


_RARE: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "other numbers": lambda call: call,  # drawn with another seed
    "scale 1.5 times": lambda call: replace(call, scale=1.5 * call.scale),
    "scores far above 0": partial(_far_from_zero, 1),
    "scores far below 0": partial(_far_from_zero, -1),
}
"""Data of calls beyond the design."""


@dataclass(frozen=True)
class Case:
    """One call of the matrix.

    Attributes:
        name: unique in its matrix, without spaces; used as a test id.
        condition: axis -> value, in words. In addition to the axes of the design, "cached prefix" says how many of the
            call's sequences have one ("none", "some", "all").
        make: makes the call, the same each time.
    """

    name: str
    condition: dict[str, str]
    make: Callable[[], AttentionCall]


@dataclass(frozen=True)
class _Values:
    """A value for each axis of the design."""

    phase: str
    prefix: int
    new: int
    batch: str
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    data: str
    page: int


def axes(
    phase: str, size: Size = "small", dtypes: Sequence[torch.dtype] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS
) -> dict[str, tuple[Any, ...]]:
    """The axes of the design for one phase, and their values.

    A decode call has one new token per sequence and always a cached prefix.
    """
    decode = phase == "decode"
    return {
        "prefix": tuple(p for p in PREFIXES[size] if p or not decode),
        "new": (1,) if decode else NEW[size],
        "batch": tuple(_BATCHES[phase]),
        "heads": HEADS[size],
        "head_dim": tuple(head_dims),
        "dtype": tuple(dtypes),
        "data": tuple(_DATA),
        "page": PAGES,
    }


def cases(
    phases: Sequence[str] = PHASES,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    seed: int = 0,
    size: Size = "small",
    head_dims: Sequence[int] = HEAD_DIMS,
) -> list[Case]:
    """The matrix: first the calls of the seed case, then a covering design for each phase, then a few long calls.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtypes: of q, k and v; None for float16, bfloat16 and float32.
        seed: seed of the data and of the design. The same seed gives the same cases with the same data.
        size: "small" for interpreted kernels; "full" for a GPU, with more and longer sequences and more heads.
        head_dims: head dims of q, k and v.

    Raises:
        ValueError: no phase, dtype or head dim, or an unknown phase or size.
    """
    kinds = DTYPES if dtypes is None else tuple(dtypes)
    if not phases or set(phases) - set(PHASES) or not kinds or not head_dims or size not in PREFIXES:
        raise ValueError(
            f"no matrix of phases {tuple(phases)}, dtypes {kinds}, head_dims {tuple(head_dims)}, size {size!r}; expected at least "
            f"one of each, phases from {PHASES} and a size from {tuple(PREFIXES)}"
        )
    drawn: list[_Values] = []
    if "extend" in phases:
        # The calls of the seed case: a cached prefix of one token, and one of the questions' shared header.
        drawn += [
            _Values("extend", prefix, new, "one", HEADS[size][1], head_dims[0], kinds[0], "normal", 16)
            for new, prefix in ((41, 1), (34, 157))
        ]
    for phase in phases:
        design = axes(phase, size, kinds, head_dims)
        order = random.Random(seed)
        shuffled = {axis: order.sample(values, len(values)) for axis, values in design.items()}
        # AllPairs needs at least two values per axis, so axes with one value are left out of the design.
        open_axes = [axis for axis, values in shuffled.items() if len(values) > 1]
        for row in AllPairs([shuffled[axis] for axis in open_axes]):
            chosen = {axis: values[0] for axis, values in shuffled.items()} | dict(zip(open_axes, row, strict=True))
            drawn.append(_Values(phase=phase, **chosen))
    drawn += [
        _Values(phase, prefix, new, batch, HEADS[size][1], head_dims[0], kinds[-1], data, 0)
        for phase in phases
        for new, prefix, batch, data in _FAR[phase]
    ]
    drawn += [
        _Values(phase, prefix, new, "one", HEADS[size][1], head_dims[0], kinds[0], "normal", 0)
        for phase in phases
        for new, prefix in [_MANY_KEYS[phase]]
    ]
    return [_case(values, seed * 10_000 + number, device, size) for number, values in enumerate(drawn)]


_MODEL_PREFIXES, _MODEL_NEW, _MODEL_PAGES = (0, 1, 16, 200), (1, 7, 64, 129), (0, 16, 64)


def model_cases(
    phases: Sequence[str],
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    tokens: int,
    seed: int = 0,
) -> list[Case]:
    """A matrix for one model, small enough to be part of a run: its dtype, head_dim and numbers of heads, and shorter calls.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtype: of q, k and v.
        heads: q heads and kv heads.
        head_dim: of q, k and v.
        tokens: length of the longest calls: as many new tokens, and as many cached ones.
        seed: seed of the data and of the design.
    """
    drawn: list[_Values] = []
    for phase in phases:
        decode = phase == "decode"
        open_axes: dict[str, tuple[Any, ...]] = {
            "prefix": tuple(p for p in _MODEL_PREFIXES if p or not decode),
            "batch": tuple(_BATCHES[phase]),
            "data": tuple(_DATA),
            "page": _MODEL_PAGES,
        } | ({} if decode else {"new": _MODEL_NEW})
        order = random.Random(seed)
        shuffled = {axis: order.sample(values, len(values)) for axis, values in open_axes.items()}
        fixed: dict[str, Any] = {"phase": phase, "heads": heads, "head_dim": head_dim, "dtype": dtype, "new": 1}
        drawn += [
            _Values(**(fixed | dict(zip(shuffled, row, strict=True)))) for row in AllPairs(list(shuffled.values()))
        ]
        long = fixed | {"batch": "one", "data": "normal", "page": _MODEL_PAGES[1]}
        drawn.append(_Values(**(long | {"prefix": tokens, "new": 1 if decode else _MODEL_NEW[1]})))
        if not decode:
            drawn.append(_Values(**(long | {"prefix": 0, "new": tokens})))
        drawn += [
            _Values(**(fixed | {"new": new, "prefix": prefix, "batch": batch, "data": data, "page": 0}))
            for new, prefix, batch, data in _FAR[phase]
            if data.startswith("scores far")  # the other conditions are met by the load of the run
        ]
    return [_case(values, seed * 10_000 + number, device, "small") for number, values in enumerate(drawn)]


def _case(values: _Values, seed: int, device: str, size: Size) -> Case:
    lens = (_BATCHES[values.phase] | _WIDE)[values.batch](values.new, values.prefix, LONG[size])
    cached = sum(prefix > 0 for _, prefix in lens)
    q_heads, kv_heads = values.heads
    kind = "MHA" if q_heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
    condition = {
        "phase": values.phase,
        "prefix": str(values.prefix),
        "new": str(values.new),
        "batch": values.batch,
        "cached prefix": "none" if not cached else "all" if cached == len(lens) else "some",
        "heads": f"{kind} {q_heads}/{kv_heads}",
        "head_dim": str(values.head_dim),
        "dtype": str(values.dtype).removeprefix("torch."),
        "data": values.data,
        "page": str(values.page) if values.page else "packed",
    }
    parts = (
        values.phase, f"{values.new}+{values.prefix}", values.batch, condition["heads"], f"d{values.head_dim}",
        condition["dtype"], values.data, f"page{values.page}" if values.page else "packed",
    )  # fmt: skip
    return Case("-".join(parts).replace(" ", "_"), condition, partial(_make, values, tuple(lens), seed, device))


def _make(values: _Values, lens: tuple[tuple[int, int], ...], seed: int, device: str) -> AttentionCall:
    # Drawn and changed in float32, then rounded once: a seed means the same numbers in every dtype.
    wide = call_of(list(lens), values.heads, values.head_dim, torch.float32, device, seed)
    call = (_DATA | _RARE)[values.data](replace(wide, phase=values.phase))
    call = replace(call, q=call.q.to(values.dtype), k=call.k.to(values.dtype), v=call.v.to(values.dtype))
    return through_pages(call, values.page, seed) if values.page else call
