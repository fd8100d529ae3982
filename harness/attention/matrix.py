"""The op-level matrix: calls on synthetic data, under the conditions in which attention kernels fail.

The axes follow SGLang's dense attention kit (``sglang.test.kits.attention_unittest``) and vLLM's ``BatchSpec`` (queries shorter
than their sequence, shuffled block tables): cached prefix, new tokens, batch, heads, head_dim, dtype, data and page size. The
matrix is a covering design, not their product. For each phase,

- dtype x head_dim x heads is covered fully: without a cached prefix, behind one with more than 128 new tokens, in a batch of
  nine sequences of which one is long, and in each call of `_EVERY`;
- so are all triples of these, batch and new tokens (but batch x heads x new), and of data, dtype, head_dim and cached prefix;
- every pair of values of two axes occurs.

Calls beyond the design follow: longer ones, batches of other sizes and of equal sequences, other numbers of heads, other head dims,
inputs that are parts of wider tensors, other data and other modes of autograd. What no kernel claims unless it declares it is
marked: see `Case.beyond`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, cycle, product
from typing import Any, Literal

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.covering import AxisPart, Row, covering
from assay.harness.attention.kernels import Declaration
from assay.harness.attention.matrix_data import BEYOND_FP16, DATA, ON_GRID, ONE_SIGN, RARE, WEIGHTS_ON_GRID
from assay.harness.attention.matrix_features import ASKED, MLA, STORED, values_of
from assay.harness.attention.model_shapes import COMMON, SHAPES
from assay.harness.attention.noise import NoiseFamily, family
from assay.harness.attention.paging import through_pages
from assay.harness.attention.sample_calls import call_of
from assay.harness.conditions import PHASES

Size = Literal["small", "full"]
Lens = list[tuple[int, int]]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)
"""Head dims of the design: those that a kernel claims unless it declares others."""
OTHER_HEAD_DIMS = (80, 96, 192, 256)
"""Head dims of Phi-2, Phi-3-mini, DeepSeek's prefill and Gemma."""

_PREFIXES: dict[Size, tuple[int, ...]] = {
    "small": (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200),
    "full": (0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000),
}
"""Cached prefixes, in tokens: none, one, values around every page and block size in use, and a long one."""
_NEW: dict[Size, tuple[int, ...]] = {
    "small": (1, 7, 64, 65, 129),
    "full": (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 512),
}
"""New tokens of an extend call. A decode call has one per sequence."""
_HEADS: dict[Size, tuple[tuple[int, int], ...]] = {
    "small": ((4, 4), (4, 2), (8, 2), (16, 2), (4, 1)),
    "full": ((8, 8), (8, 4), (8, 2), (16, 2), (8, 1)),
}
"""(q heads, kv heads): MHA, GQA with 2, 4 and 8 q heads on each kv head, MQA."""
_OTHER_HEADS = (
    (6, 2), (10, 2), (12, 2), (14, 2), (24, 2), (32, 2), (12, 3), (25, 5), (12, 6), (16, 4), (10, 10), (3, 3),
)  # fmt: skip
"""GQA with other numbers of q heads on each kv head: 3 (Llama-3.2-3B), 5 (Qwen2.5-32B), 6, 7 (Qwen2.5-7B), 12 and 16. Then other
numbers of kv heads, of which 3, 5 (SmolLM) and 6 are no powers of two, with 2, 4 and 5 q heads on each; and MHA with 10 and 3."""
LONG: dict[Size, int] = {"small": 530, "full": 2000}
"""Cached prefix, in tokens, of a long sequence next to the one under test."""
PAGES = (0, 1, 16, 64)
"""Page size, in tokens, of the KV pool from which K and V are gathered; 0 if they are packed from the start."""

_NEAR = 64
"""Most cached tokens behind which every dtype, head dim and number of heads has more new ones than a block."""
_BLOCK = 128
"""New tokens of the largest block of queries in use."""
_BATCHES: dict[str, dict[str, Callable[[int, int, int], Lens]]] = {
    "extend": {
        "one": lambda new, prefix, long: [(new, prefix)],
        "one token last": lambda new, prefix, long: [(new, prefix), (1, 33)],
        "after no prefix": lambda new, prefix, long: [(7, 0), (new, prefix)],
        "among nine with a long one": lambda new, prefix, long: [
            (2, 0), (new, prefix), (1, long), (66, 16), (8, 33), (16, 64), (70, 12), (3, 127), (2, 1)
        ],
        "between others": lambda new, prefix, long: [(2, 0), (new, prefix), (5, 16)],
    },
    "decode": {
        "one": lambda new, prefix, long: [(1, prefix)],
        "after a short one": lambda new, prefix, long: [(1, 1), (1, prefix)],
        "among nine with a long one": lambda new, prefix, long: [
            (1, 16), (1, prefix), (1, 77), (1, 1), (1, long), (1, 64), (1, 12), (1, 127), (1, long + 40)
        ],
        "between others": lambda new, prefix, long: [(1, 16), (1, prefix), (1, 77)],
    },
}  # fmt: skip
"""Sequences of a call as (new tokens, cached prefix): the one that the axes describe, and its neighbours."""


_NINE = "among nine with a long one"
_BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
_TILES = (112, 160, 176, 192, 224, 240, 336, 352, 384, 480, 528, 768)
"""Keys of sequences that just fill their last tile, where tiles have 80, 96, 112, 128, 160, 176, 192, 224, 240, 256 or 384 keys."""


def _short(number: int, new: int, prefix: int, long: int) -> Lens:
    """Make sequences of a few tokens, one of which has 128 more new ones, unless all have one."""
    return [(1 + (new - 1) * (n % 2 == 0) + 128 * (n == 5 and new > 1), prefix + n) for n in range(number)]


def _as_many_new(number: int, new: int, prefix: int, long: int) -> Lens:
    """Make sequences with as many new tokens each, behind different prefixes; the last two are long."""
    return [*((new, 9 * n) for n in range(number - 2)), (new, prefix), (new, prefix + 69)]


def _unlike(number: int, new: int, prefix: int, long: int) -> Lens:
    """Sequences of which a long one comes before a shorter one that is long too."""
    return [(new, prefix + more) for more in (0, -201, 301, -31, -190, 214, -286, 5, 230)[:number]]


def _prompts(number: int, new: int, prefix: int, long: int) -> Lens:
    """Sequences without a cached prefix, of different lengths."""
    return [(new - less, prefix) for less in (0, 61, 40, 57, 4, 29, 65, 68, 50)[:number]]


_WIDE: dict[str, Callable[[int, int, int], Lens]] = {
    "nine at borders": lambda new, prefix, long: [
        (new, prefix), (63, 0), (127, 16), (128, 0), (16, 48), (2, 200), (31, 33), (128, 128), (5, 59)
    ],
    "seventeen at borders": lambda new, prefix, long: [(1, prefix), *((1, border) for border in _BORDERS)],
    "three long ones": lambda new, prefix, long: [(new, prefix), (new, prefix + 191), (1, prefix + 264)],
    "four long ones": lambda new, prefix, long: [(new, prefix), (new, prefix + 64), (new, prefix - 100), (new, 20)],
    "among long ones": lambda new, prefix, long: [(min(new, 7), 16), (new, prefix), (min(new, 3), long)],
    "three chunks": lambda new, prefix, long: [(new, 0), (new, prefix), (192, 0)],
    "full tiles": lambda new, prefix, long: [(new, keys - new) for keys in (new + prefix, *_TILES)],
    # As many tokens as in "powers of two", so that one can be made in the other's buffers.
    "cached powers of two": lambda new, prefix, long: [(new, prefix), (new, 512), (new, 1024), (new, 128 - 4 * new)],
    "powers of two": lambda new, prefix, long: [(new, prefix), (new, 512 - new), (new, 1024 - new), (new, 128 - new)],
    **{f"{n} short ones": partial(_short, n) for n in (16, 24, 32, 40)},
    "a shorter one first": lambda new, prefix, long: [(new, prefix), (5 * new - 4, prefix + 50)],
    "a longer one first": lambda new, prefix, long: [(5 * new - 4, prefix + 50), (new, prefix)],
    "some without new tokens": lambda new, prefix, long: [(0, 20), (3, 5), (0, 90), (0, 7), (new, prefix), (0, 9)],
    "fewer keys than queries": lambda new, prefix, long: [(9, 55), (40, -39), (new, prefix), (70, -6)],
    "a single key first": lambda new, prefix, long: [(1, 0), (new, prefix)],
    "two long ones": lambda new, prefix, long: [(new, prefix), (new, prefix + 197)],
    **{f"{n} alike": partial(lambda n, new, prefix, long: [(new, prefix)] * n, n) for n in range(2, 10)},
    **{f"{n} unlike": partial(_unlike, n) for n in range(4, 10)},
    **{f"{n} prompts": partial(_prompts, n) for n in range(4, 10)},
    **{f"{n} with as many new tokens": partial(_as_many_new, n) for n in range(4, 10)},
}  # fmt: skip
"""Batches of calls beyond the design."""
_SIZES = range(4, 10)
"""Sizes of batches below and beside a vector of eight lengths. Five numbers of heads and six sizes meet once each."""
_EVERY: dict[str, tuple[tuple[int, int, str], ...]] = {
    "extend": ((66, 512, "one"), (70, 0, "{} prompts"), (32, 100, "{} alike"), (17, 331, "{} with as many new tokens")),
    "decode": ((1, 400, "one"), (1, 333, "two long ones"), (1, 300, "{} unlike")),
}
"""(new tokens, cached prefix, batch of a size of `_SIZES`) of calls that each dtype has with each head dim and number of heads.

Kernels have a path for each of them, and go wrong in one alone: at a later block of keys, in a second partition, in a second
sequence of several blocks, in a batch of prompts alone, or of sequences that are alike. The first gets a layer, one
of them another scale.
"""
_MANY = ("16 short ones", "24 short ones", "32 short ones", "40 short ones")
"""Batches of sizes for which engines capture graphs, and of more sequences than a warp has lanes."""
_FAR: dict[str, tuple[tuple[int, int, str, str], ...]] = {
    "extend": (
        (40, 600, "one", "normal"), (40, 600, "one", "other numbers"), (128, 384, "nine at borders", "scale 1.5 times"),
        (34, 0, "one", "scores far above 0"), (34, 0, "one", "scores far below 0"), (34, 90, "one", "K far from 0"),
        (9, 60, "three long ones", "equal first tokens"), (208, 60, "three chunks", "normal"),
        (16, 256, "cached powers of two", "normal"), (16, 240, "powers of two", "normal"),
        (2, 1500, "four long ones", "normal"),
    ),
    "decode": (
        (1, 700, "one", "normal"), (1, 2200, "one", "normal"), (1, 700, "one", "other numbers"),
        (1, 300, "seventeen at borders", "scale 1.5 times"), (1, 157, "one", "scores far above 0"),
        (1, 157, "one", "scores far below 0"), (1, 157, "one", "K far from 0"),
        (1, 60, "three long ones", "equal first tokens"), (1, 256, "cached powers of two", "normal"),
        (1, 255, "powers of two", "normal"), (1, 1200, "four long ones", "normal"),
    ),
}  # fmt: skip
"""(new tokens, cached prefix, batch, data) of calls beyond the design, in the last dtype and the first head dim.

They show windows, blocks and limits of up to 2,048 tokens, lengths that just fill a partition, a chunk behind a long prefix,
results and plans kept by shape, larger batches, new tokens that just fill a block or nearly do, scores that overflow or underflow
unless their own maximum is subtracted, and weights that a shortcut takes for zero.
"""
_MANY_KEYS: dict[str, tuple[int, int]] = {"extend": (2, 4000), "decode": (1, 4000)}
"""(new tokens, cached prefix) of a call in each dtype of 16 bits, where the others beyond the design are in the last dtype.

It shows sums that are kept in 16 bits. In float32 they hide on a GPU, where a correct kernel may compute in TF32.
"""
_LONG_CHUNKS = ((512, 8), (513, 0))
"""(new tokens, cached prefix) of single sequences: a full chunk, and one token more than that."""
_HALF: dict[str, tuple[tuple[int, int, str, str], ...]] = {
    "extend": (
        (96, 20, "one", "normal"), (256, 1, "one", BEYOND_FP16[2]), (34, 400, "one", ONE_SIGN),
        (34, 157, "one", BEYOND_FP16[0]), (34, 157, "one", BEYOND_FP16[1]),
    ),
    "decode": (
        (1, 600, "one", BEYOND_FP16[2]), (1, 600, "one", ONE_SIGN),
        (1, 157, "between others", BEYOND_FP16[0]), (1, 157, "between others", BEYOND_FP16[1]),
    ),
}  # fmt: skip
"""The same in each dtype of 16 bits with each head dim, and there each in another layer."""
_SCALES = ("scale 1.5 times", "scale 1", "scale 1/128")
"""Data of the calls with full tiles, of which each dtype has one with each head dim."""
_EACH: dict[str, tuple[tuple[int, int, str], ...]] = {
    "extend": ((34, 0, "one"), (17, 70, "among long ones")),
    "decode": ((1, 66, "among long ones"),),
}
"""(new tokens, cached prefix, batch) of the calls that one special value gets: other heads, sliced inputs, another rank, ... Some
get none without a prefix."""
_LAYERS = (0, 1, 2, 16, 31)
"""Layers: kernels treat the first two, every second one, those in the middle or the last one in a way of their own."""


def _as_mla(values: _Values) -> _Values:
    """Make a call one of absorbed latent attention: one kv head of 576 dims, the first 512 of which are v."""
    asked = tuple(dict.fromkeys((MLA, *(values.asked or ()))))
    return replace(
        values, heads=(values.heads[0], 1), head_dim=576, head_dim_v=512, layout="v in k", asked=asked, beyond=()
    )


_ASKING: dict[str, tuple[tuple[int, int, str], ...]] = {
    "extend": ((34, 157, "one"), (70, 0, "4 prompts"), (129, 64, "between others"), (7, 200, _NINE)),
    "decode": ((1, 200, "one"), (1, 129, _NINE), (1, 300, "4 unlike")),
}
"""(new tokens, cached prefix, batch) of the calls that each value of a feature gets."""
_ALONE = ("not_causal", "mla")
"""Features that are asked for by themselves: a window is causal, and of latent attention all shapes are its own."""
_CROSSING = (
    (34, 157, "fewer keys than queries"),
    (129, -100, "one"),
    (64, -63, "one"),
    (300, -7, "fewer keys than queries"),
)
"""(queries, keys more than that, batch) of cross attention."""
_CAPPED = ("scale 1", "normal", "peaky")
"""Data of the calls with a soft cap: in unscaled scores a cap of 50 shows."""


@dataclass(frozen=True)
class Case:
    """One call of the matrix.

    Attributes:
        name: unique in its matrix, without spaces; used as a test id.
        condition: axis -> value, in words. In addition to the axes of the design, "cached prefix" says how many of the
            call's sequences have one ("none", "some", "all").
        make: makes the call, the same each time.
        beyond: axes whose value here a kernel claims only if it declares it, such as a head dim of 80. A kernel that raises on
            every call with such a value does not cover it; that is no fault.
    """

    name: str
    condition: dict[str, str]
    make: Callable[[], AttentionCall]
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Values:
    """A value for each axis."""

    phase: str
    prefix: int
    new: int
    batch: str
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    data: str = "normal"
    page: int = 0
    head_dim_v: int = 0
    layer: int = 0
    first_head: int = 0
    layout: str = "packed"
    grad_mode: str = ""
    like: str = ""
    beyond: tuple[str, ...] = ()
    asked: tuple[str, ...] | None = None


def _axes(
    phase: str,
    size: Size = "small",
    dtypes: Sequence[torch.dtype] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    prefix: bool = True,
) -> dict[str, tuple[Any, ...]]:
    """Return the axes of the design for one phase, with their values; without `prefix`, those of calls that have none.

    A decode call has one new token per sequence and always a cached prefix.
    """
    decode = phase == "decode"
    return {
        "prefix": tuple(p for p in _PREFIXES[size] if p or not decode) if prefix else (0,),
        "new": (1,) if decode else _NEW[size],
        "batch": tuple(_BATCHES[phase]) if prefix else ("one", "after no prefix"),
        "heads": _HEADS[size],
        "head_dim": tuple(head_dims),
        "dtype": tuple(dtypes),
        "data": tuple(DATA),
        "page": PAGES,
    }


_ANYTHING = Declaration()
_CACHED = AxisPart("prefix", bool)
_CORE = (AxisPart("dtype"), AxisPart("head_dim"), AxisPart("heads"))
_FULL = ((*_CORE, _CACHED), (*_CORE, AxisPart("batch", lambda batch: batch == _NINE)))
_TRIPLES: tuple[tuple[AxisPart, ...], ...] = (
    (_CACHED, AxisPart("batch"), AxisPart("heads"), AxisPart("head_dim"), AxisPart("dtype")),
    (_CACHED, AxisPart("batch"), AxisPart("new"), AxisPart("head_dim"), AxisPart("dtype")),
    (_CACHED, AxisPart("heads"), AxisPart("new"), AxisPart("head_dim"), AxisPart("dtype")),
    (_CACHED, AxisPart("data"), AxisPart("head_dim"), AxisPart("dtype")),
)


@cache
def _design(
    phase: str, size: Size, dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...], prefix: bool, seed: int
) -> tuple[Row, ...]:
    """Return the rows of the design of one phase, axis -> value."""
    drawn = _axes(phase, size, dtypes, head_dims, prefix)
    triples = (three for some in _TRIPLES for three in combinations(some, 3))
    pairs = combinations([AxisPart(axis) for axis in drawn], 2)
    groups = (*_FULL, *dict.fromkeys(triples), *pairs)
    # More new tokens than a block behind a cached prefix, where the seed case's mask is wrong; nothing without such lengths.
    behind = {
        "prefix": tuple(cached for cached in drawn["prefix"] if 0 < cached <= _NEAR),
        "new": tuple(new for new in drawn["new"] if new > _BLOCK),
    }
    first = covering(drawn | behind, (_CORE,), seed) if all(behind.values()) else []
    return (*first, *covering(drawn, groups, seed, first))


def cases(
    phases: Sequence[str] = PHASES,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    seed: int = 0,
    size: Size = "small",
    head_dims: Sequence[int] | None = None,
    like: Sequence[str] | None = None,
    declared: Declaration = _ANYTHING,
) -> list[Case]:
    """Make the matrix: first the calls of the seed case, then a covering design for each phase, then calls beyond it.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtypes: of q, k and v; None for float16, bfloat16 and float32.
        seed: seed of the data and of the design. The same seed gives the same cases with the same data.
        size: "small" for interpreted kernels; "full" for a GPU, with more and longer sequences and more heads.
        head_dims: head dims of q and k; None for 64 and 128, and beyond the design for `OTHER_HEAD_DIMS`.
        like: models of `assay.harness.attention.model_shapes.SHAPES` whose shapes are added; None for none in the small matrix, and
            for `COMMON` in the full one.
        declared: whether calls may have a cached prefix, head dims of v, which come in turn with that of q and k, and the features
            that calls ask for, and a quantisation. Each value of these gets calls beyond the design, so do all features together,
            and for a quantisation there are calls on which it costs nothing. All calls of a
            kernel that declares "mla" and the head dim 576 alone are of absorbed latent attention.

    Raises:
        ValueError: no phase, dtype or head dim, or an unknown phase, size or model.
    """
    kinds = DTYPES if dtypes is None else tuple(dtypes)
    dims = HEAD_DIMS if head_dims is None else tuple(head_dims)
    if not phases or set(phases) - set(PHASES) or not kinds or not dims or size not in _PREFIXES:
        raise ValueError(
            f"no matrix of phases {tuple(phases)}, dtypes {kinds}, head_dims {dims}, size {size!r}; expected at least "
            f"one of each, phases from {PHASES} and a size from {tuple(_PREFIXES)}"
        )
    models = (COMMON if size == "full" and head_dims is None else ()) if like is None else tuple(like)
    if unknown := set(models) - set(SHAPES):
        raise ValueError(f"no shape of {', '.join(sorted(unknown))}; expected one of {', '.join(SHAPES)}")
    other_dims = OTHER_HEAD_DIMS if head_dims is None else ()
    drawn: list[_Values] = []
    if "extend" in phases:
        # The calls of the seed case: a cached prefix of one token, and one of the questions' shared header.
        drawn += [
            _Values("extend", prefix, new, "one", _HEADS[size][1], dims[0], kinds[0], "normal", 16)
            for new, prefix in ((41, 1), (34, 157))
        ]
    for phase in phases:
        of_v = cycle((0, *declared.head_dims_v))
        for row, dim_v in zip(_design(phase, size, kinds, dims, declared.prefix, seed), of_v, strict=False):
            drawn.append(_Values(phase=phase, **row, head_dim_v=dim_v if dim_v != row["head_dim"] else 0))
    for phase in phases:
        drawn += [
            *_every(phase, size, kinds, dims, declared.head_dims_v),
            *_long(phase, size, kinds, dims),
            *_special(phase, size, kinds, dims, other_dims, declared.head_dims_v, models),
        ]
        drawn += _asking(phase, size, kinds, dims, declared.features)
        drawn += _on_grid(phase, size, kinds, dims, family(declared.noise))
    if "mla" in declared.features and dims == (576,):  # such a kernel computes nothing else
        drawn = list(dict.fromkeys(_as_mla(values) for values in drawn if values.layout in ("packed", "v in k")))
    if declared.features:
        drawn = [values if values.asked else replace(values, asked=()) for values in drawn]
    made = [_case(values, seed * 10_000 + number, device, size) for number, values in enumerate(drawn)]
    return [case for case in made if declared.prefix or case.condition["cached prefix"] == "none"]


def _every(
    phase: str, size: Size, kinds: Sequence[torch.dtype], dims: Sequence[int], dims_v: Sequence[int]
) -> Iterator[_Values]:
    """Yield the calls that each dtype has with each head dim and number of heads."""
    of_v = cycle((0, *dims_v))
    for number, (kind, dim, heads) in enumerate(product(kinds, dims, _HEADS[size])):
        dim_v = next(of_v)
        for place, (new, prefix, batch) in enumerate(_EVERY[phase]):
            data = _SCALES[number % len(_SCALES)] if place == number % len(_EVERY[phase]) else "normal"
            layer = _LAYERS[(number + number // len(_LAYERS)) % len(_LAYERS)] if place == 0 else 0
            named = batch.format(_SIZES[number % len(_SIZES)])
            yield _Values(
                phase, prefix, new, named, heads, dim, kind, data, layer=layer, head_dim_v=dim_v if dim_v != dim else 0
            )


def _long(phase: str, size: Size, kinds: Sequence[torch.dtype], dims: Sequence[int]) -> Iterator[_Values]:
    """Yield long calls, larger batches, and data that are not part of the design."""
    heads = _HEADS[size][1]
    for new, prefix, batch, data in _FAR[phase]:
        yield _Values(phase, prefix, new, batch, heads, dims[0], kinds[-1], data)
    every = list(product(kinds, dims))
    halves = [(kind, dim) for kind, dim in every if kind.itemsize == 2] or [(kinds[0], dim) for dim in dims]
    for entry, (new, prefix, batch, data) in enumerate(_HALF[phase]):
        for number, (kind, dim) in enumerate(halves):
            if data in BEYOND_FP16[:2] and (number in (1, 2)) != (data == BEYOND_FP16[1]):
                continue  # each dtype and each head dim has both
            layer = _LAYERS[(entry + number) % len(_LAYERS)]
            yield _Values(phase, prefix, new, batch, heads, dim, kind, data, layer=layer)
    for (kind, dim), data in zip(every, cycle(_SCALES), strict=False):
        new = 1 if phase == "decode" else 4
        yield _Values(phase, 96 - new, new, "full tiles", heads, dim, kind, data)
    swapped = (1, 40) if phase == "decode" else (5, 10)
    for kind, dim in zip(kinds, cycle(dims), strict=False):
        for batch in ("a shorter one first", "a longer one first"):  # one is made in the other's buffers
            yield _Values(phase, swapped[1], swapped[0], batch, heads, dim, kind)
        yield _Values(phase, 300, 34 if phase == "extend" else 1, "one", heads, dim, kind, "attention sink")
    for number, others in enumerate(_HEADS[size]):
        if others != heads:
            kind, dim = halves[number % len(halves)]
            new = 34 if phase == "extend" else 1
            yield _Values(phase, 300, new, "one", others, dim, kind, BEYOND_FP16[2])
    yield from _far_by_phase(phase, size, kinds, dims, halves)


def _far_by_phase(
    phase: str, size: Size, kinds: Sequence[torch.dtype], dims: Sequence[int], halves: Sequence[tuple[torch.dtype, int]]
) -> Iterator[_Values]:
    """Yield large batches, what only one phase has, and the longest calls."""
    heads = _HEADS[size][1]
    for batch, (kind, dim) in zip(_MANY, cycle(halves), strict=False):
        yield _Values(phase, 1, 1 if phase == "decode" else 4, batch, heads, dim, kind)
    if phase == "extend":
        for others, kind in zip(_HEADS[size], cycle(kinds), strict=False):
            yield _Values(phase, 30, 9, "some without new tokens", others, dims[-1], kind, beyond=("batch",))
        for (new, prefix), (kind, dim) in zip(_LONG_CHUNKS, cycle(reversed(halves)), strict=False):
            yield _Values(phase, prefix, new, "one", heads, dim, kind)
    else:
        for others, kind in zip(_HEADS[size], cycle(kinds), strict=False):  # as a padded row of a captured graph
            yield _Values(phase, 40, 1, "a single key first", others, dims[-1], kind)
    new, prefix = _MANY_KEYS[phase]
    for kind, alike in zip(dict.fromkeys(kind for kind, _ in halves), cycle(("4 alike", "6 alike")), strict=False):
        yield _Values(phase, prefix, new, "one", heads, dims[0], kind)
        yield _Values(phase, 300, 1 if phase == "decode" else 9, alike, heads, dims[-1], kind)


def _special(
    phase: str,
    size: Size,
    kinds: Sequence[torch.dtype],
    dims: Sequence[int],
    other_dims: Sequence[int],
    dims_v: Sequence[int],
    models: Sequence[str],
) -> Iterator[_Values]:
    """Yield the calls with one value outside of the design: of heads, layer, mode of autograd, layout or head dim."""
    usual, dtype, dim, core = _HEADS[size][1], cycle(kinds), cycle(dims), cycle(_HEADS[size])
    halves = [kind for kind in kinds if kind.itemsize == 2] or kinds
    for new, prefix, batch in _EACH[phase]:
        at = partial(_Values, phase, prefix, new, batch)
        for mode in ("inference_mode", "no_grad") if prefix else ("inference_mode",):
            yield at(usual, next(dim), next(dtype), grad_mode=mode)
        for kind in kinds if prefix else kinds[:1]:
            yield at(next(core), next(dim), kind, layout="sliced", beyond=("inputs",))
        for layout in ("heads first", "each its own") if prefix else ("each its own",):
            yield at(next(core), next(dim), next(dtype), layout=layout, beyond=("inputs",))
        for kind in kinds if prefix else kinds[:1]:
            yield at(usual, next(dim), kind, first_head=usual[0])
        for heads in _OTHER_HEADS if prefix else _OTHER_HEADS[::4]:
            yield at(heads, next(dim), next(dtype), beyond=("heads",))
        for name in models:
            q_heads, kv_heads, head_dim = SHAPES[name]
            yield at((q_heads, kv_heads), head_dim, next(dtype), like=name)
        for head_dim in other_dims:
            for kind in kinds if size == "full" else halves if prefix else [next(dtype)]:
                yield at(usual, head_dim, kind, beyond=("head_dim",))
        for head_dim in dims:
            for value_dim in dims_v:
                if value_dim != head_dim:
                    yield at(usual, head_dim, next(dtype), head_dim_v=value_dim)


def _asking(
    phase: str, size: Size, kinds: Sequence[torch.dtype], dims: Sequence[int], features: Sequence[str]
) -> Iterator[_Values]:
    """Yield the calls that ask for a feature, and for all of them."""
    asked = {name: of for name, of in values_of(features).items() if phase == "extend" or name != "not_causal"}
    values: list[tuple[str, ...]] = [(value,) for of in asked.values() for value in of]
    together = tuple(of[0] for name, of in asked.items() if name not in _ALONE)
    values += [together] * (len(together) > 1)
    kind, dim, heads, data = cycle(kinds), cycle(dims), cycle(_HEADS[size]), cycle(_CAPPED)
    for value in values:
        for new, prefix, batch in _CROSSING if "cross attention" in value else _ASKING[phase]:
            of_data = next(data) if any(name.startswith("softcap") for name in value) else "normal"
            made = _Values(phase, prefix, new, batch, next(heads), next(dim), next(kind), of_data, asked=value)
            if made.heads[1] == 1 and any(name.endswith("per head") for name in value):
                made = replace(made, heads=_HEADS[size][1])  # one of a single head is one of the tensor
            yield _as_mla(made) if MLA in value else made
        next(dim)  # else a number of calls that is even would give each length one head dim


def _on_grid(
    phase: str, size: Size, kinds: Sequence[torch.dtype], dims: Sequence[int], noise: NoiseFamily
) -> Iterator[_Values]:
    """Yield the calls on which a quantisation costs nothing, for a kernel that declares one."""
    if not noise.quantises:
        return
    kind, dim, heads = cycle(kinds), cycle(dims), cycle(_HEADS[size])
    for data in (ON_GRID, WEIGHTS_ON_GRID) if noise.p is None else (WEIGHTS_ON_GRID,):
        for new, prefix, batch in _ASKING[phase] * 2:
            yield _Values(phase, prefix, new, batch, next(heads), next(dim), next(kind), data)
        next(dim)


_MODEL_PREFIXES, _MODEL_NEW, _MODEL_PAGES = (0, 1, 16, 200), (1, 7, 64, 129), (0, 16, 64)


def model_cases(
    phases: Sequence[str], device: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, tokens: int
) -> list[Case]:
    """Make a matrix for one model, small enough to be part of a run: its dtype, head_dim and numbers of heads, and shorter calls.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtype: of q, k and v.
        heads: q heads and kv heads.
        head_dim: of q, k and v.
        tokens: length of the longest calls: as many new tokens, and as many cached ones.
    """
    drawn: list[_Values] = []
    for phase in phases:
        decode = phase == "decode"
        open_axes: dict[str, tuple[Any, ...]] = {
            "prefix": tuple(p for p in _MODEL_PREFIXES if p or not decode),
            "batch": tuple(_BATCHES[phase]),
            "data": tuple(DATA),
            "page": _MODEL_PAGES,
        } | ({} if decode else {"new": _MODEL_NEW})
        pairs = list(combinations([AxisPart(axis) for axis in open_axes], 2))
        fixed: dict[str, Any] = {"phase": phase, "heads": heads, "head_dim": head_dim, "dtype": dtype, "new": 1}
        drawn += [_Values(**(fixed | row)) for row in covering(open_axes, pairs)]
        long = fixed | {"batch": "one", "data": "normal", "page": _MODEL_PAGES[1]}
        drawn.append(_Values(**(long | {"prefix": tokens, "new": 1 if decode else _MODEL_NEW[1]})))
        if not decode:
            drawn.append(_Values(**(long | {"prefix": 0, "new": tokens})))
        drawn += [
            _Values(**(fixed | {"new": new, "prefix": prefix, "batch": batch, "data": data, "page": 0}))
            for new, prefix, batch, data in _FAR[phase]
            if data.startswith("scores far")  # the other conditions are met by the load of the run
        ]
    if (heads[1], head_dim) == (1, 576):  # of a model with latent attention
        drawn = [_as_mla(values) for values in drawn]
    return [_case(values, number, device, "small") for number, values in enumerate(drawn)]


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
        "inputs": values.layout,
        "head_dim_v": str(values.head_dim_v) if values.head_dim_v else "that of q",
        "layer": str(values.layer),
        "first head": str(values.first_head),
        "autograd": values.grad_mode or "as called",
    }
    if values.asked is not None:  # of a kernel that declares features
        condition["asked for"] = " and ".join(values.asked) or "nothing"
    dims = f"d{values.head_dim}" + (f"v{values.head_dim_v}" if values.head_dim_v else "")
    parts = [
        values.phase, f"{values.new}+{values.prefix}", values.batch, condition["heads"], dims,
        condition["dtype"], values.data, f"page{values.page}" if values.page else "packed",
    ]  # fmt: skip
    parts += [f"layer{values.layer}"] * (values.layer > 0) + [values.layout] * (values.layout != "packed")
    parts += [f"from_head{values.first_head}"] * (values.first_head > 0)
    parts += [special for special in (values.grad_mode, values.like, *(values.asked or ())) if special]
    make = partial(_make, values, tuple(lens), seed, device)
    return Case("-".join(parts).replace(" ", "_"), condition, make, values.beyond)


def _make(values: _Values, lens: tuple[tuple[int, int], ...], seed: int, device: str) -> AttentionCall:
    # Drawn and changed in float32, then rounded once: a seed means the same numbers in every dtype.
    wide = call_of(list(lens), values.heads, values.head_dim, torch.float32, device, seed)
    if values.head_dim_v:
        wider = call_of(list(lens), values.heads, values.head_dim_v, torch.float32, device, seed)
        wide = replace(wide, v=wider.v)
    call = (DATA | RARE)[values.data](wide.with_spec(phase=values.phase))
    call = replace(call, q=call.q.to(values.dtype), k=call.k.to(values.dtype), v=call.v.to(values.dtype)).with_spec(
        layer=values.layer, first_head=values.first_head, layout=values.layout, grad_mode=values.grad_mode
    )
    if values.layout == "v in k":
        call = replace(call, v=call.k[..., : values.head_dim_v])
    known = STORED | {name: make for asking in ASKED.values() for name, make in asking.items()}
    for name in values.asked or ():
        call = known[name](call)
    call = through_pages(call, values.page, seed) if values.page else call
    if values.layout == "v in k":
        call = replace(call, v=call.k[..., : values.head_dim_v])
    return call if call.spec.layout == "packed" else call.clone()
