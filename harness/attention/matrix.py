"""The op-level matrix: calls on synthetic data, under the conditions in which attention kernels fail.

`_TABLE` lists the parts of the matrix. Each names axes with their values and the groups of axes whose combinations all occur;
`covering` draws the calls. The axes follow SGLang's dense attention kit (``sglang.test.kits.attention_unittest``) and vLLM's
``BatchSpec`` (queries shorter than their sequence, shuffled block tables). Every value that a bug needed is a value of an axis.

The core covers, for each phase,

- dtype x head_dim x heads fully: without a cached prefix, behind one with more than 128 new tokens, and in a crowd: a batch
  of many sequences, one of them long;
- all triples of these, batch and new tokens (but batch x heads x new), and of data, dtype, head_dim and cached prefix;
- all pairs of values of two axes.

The other parts add longer calls, batches of other sizes, rare data, and one value at a time that no kernel claims unless it
declares it (see `Case.beyond`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Literal

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.covering import AxisPart, covering
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.forms import feature_in, longest_window
from assay.harness.attention.matrix_batches import BATCHES, CORE, CROWD, GRAPHS, MORE, SIZES, WITHOUT_PREFIX
from assay.harness.attention.matrix_data import (
    BEYOND_FLOAT16,
    BEYOND_FP16,
    DATA,
    ON_GRID,
    ONE_SIGN,
    WEIGHTS_ON_GRID,
)
from assay.harness.attention.matrix_features import (
    LONG_WINDOWS,
    MLA,
    strongest_of,
    values_of,
)
from assay.harness.attention.model_shapes import ASKED_BY, COMMON, SHAPES
from assay.harness.attention.noise import family
from assay.harness.attention.shapes import Shape
from assay.harness.conditions import PHASES

Size = Literal["small", "full"]
Length = int | range
"""A number of tokens, or several to draw from by a call's seed: a kernel may be wrong between the ends of blocks."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Other words for a dtype, as engines and PyTorch have them.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
HEAD_DIMS = (64, 128)
"""Head dims of the core: those that a kernel claims unless it declares others."""
OTHER_HEAD_DIMS = (80, 96, 192, 256)
"""Head dims of Phi-2, Phi-3-mini, DeepSeek's prefill and Gemma."""
_LONG: dict[Size, int] = {"small": 530, "full": 2000}
"""Cached prefix, in tokens, of a long sequence next to the one under test."""

# Cached prefixes. 0: a top-left mask is right. 1: it is wrong by one key. 15 to 17, 63 to 65, 127 to 129: a last page or block of
# 16, 64 or 128 keys that is partial is lost, one that is full is read past its end, or a prefix is taken a token early or late.
# Those between 129 and 255, 1000: windows that nobody asked for, and prefixes that are cut.
_PREFIXES: dict[Size, tuple[Length, ...]] = {
    "small": (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, range(130, 255)),
    "full": (0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, range(130, 255), 255, 256, 257, 1000),
}
# New tokens of an extend call; a decode call has one per sequence. 1: a path for decode is taken. Few: a tile of queries is mostly
# padding. 64, 65, 128, 129: a full block of queries, and a second one, whose mask begins elsewhere. 512: limits on new tokens.
_NEW: dict[Size, tuple[Length, ...]] = {
    "small": (1, range(7, 63), 64, 65, range(129, 255)),
    "full": (1, 2, range(7, 63), 63, 64, 65, 127, 128, range(129, 255), 512),
}
# (q heads, kv heads): MHA, in which heads that are mapped wrongly in groups are right; GQA with 2, 4 and 8 q heads on each kv
# head, which interleaved heads or the next group's get wrong; MQA, in which they are right again. The second is the usual one.
_HEADS: dict[Size, tuple[tuple[int, int], ...]] = {
    "small": ((4, 4), (4, 2), (8, 2), (16, 2), (4, 1)),
    "full": ((8, 8), (8, 4), (8, 2), (16, 2), (8, 1)),
}
# GQA with 3 (Llama-3.2-3B), 5 (Qwen2.5-32B), 6, 7 (Qwen2.5-7B), 12 and 16 q heads on each kv head; with 3, 5 (SmolLM), 6 and 4 kv
# heads, most of them no powers of two; and MHA with 10 and 3.
_OTHER_HEADS = (
    (6, 2), (10, 2), (12, 2), (14, 2), (24, 2), (32, 2), (12, 3), (25, 5), (12, 6), (16, 4), (10, 10), (3, 3),
)  # fmt: skip
# With head dims of few models: 6 q heads on each kv head, and MHA of more kv heads.
_HEADS_OF_OTHER_DIMS = ((12, 2), (5, 5))
# Heads of Llama 3 8B and 70B and of Llama 2 7B, all of head_dim 128: tables of heads that end at 16 or at 32 are too short.
_MODEL_HEADS, _MODEL_DIM = ((32, 8), (64, 8), (32, 32)), 128
# Kernels may treat the first two layers, every second one, those in the middle or the last one specially.
_LAYERS = (0, 1, 2, 16, 31)
_SCALED = "another scale"
# A kernel that computes head_dim ** -0.5 itself is right on every other call.
_SCALES = ("scale 1.5 times", "scale 1", "scale 1/128", "unscaled scores")
# Data that `DATA` lacks, where it is not too coarse for a dtype of 16 bits, and where it is.
_RARE_HALVES = (BEYOND_FP16[2], ONE_SIGN, "attention sink")
_RARE_EXACT = (
    "scores far above 0", "scores far below 0", "K far from 0", "equal first tokens", "equal keys and zeros", "other numbers",
)  # fmt: skip
_CAPPED = ("scale 1", "normal", "peaky")  # in unscaled scores a cap of 50 shows

_Scene = tuple[Length, Length, str, str]
"""New tokens, cached prefix, batch and data. A batch "{} alike" takes its size from the axis "size", and `_SCALED` data theirs
from the axis "scale"."""
_LAYOUTS = ("packed", "sliced", "heads first", "each its own")
# Longest window in the calls of a model: longer ones take gigabytes.
_LONGEST_WINDOW = 8192
# Those of DeepSeek's latent attention on one GPU: a kernel lays its q heads out in tiles of 16 or 64.
_MLA_HEADS = (128, 1)
# Not combined with all others: a window is causal, and latent attention has other shapes.
_NOT_WITH_ALL = ("not_causal", "mla")
# The calls of a matrix have consecutive seeds, fewer than this.
_OF_A_MATRIX = 10_000
# Groups of axes: of paths; and of scenes that go wrong in a dtype, or in a head dim.
_BY_PATH = "scene dtype head_dim heads, scene heads layer, scene dtype size, heads scale"
_BY_SCENE = "scene dtype, scene head_dim"
_GRAPH = f"{GRAPHS[1]} short ones"
# Of calls with scores far from 0.
_FAR_PREFIX = {"extend": 0, "decode": 157}


@dataclass(frozen=True)
class Case:
    """One call of the matrix.

    Attributes:
        name: unique in its matrix, without spaces; used as a test id.
        condition: axis -> value, as text. In addition to the axes of the core, "cached prefix" says how many of the
            call's sequences have one ("none", "some", "all").
        draw: returns the call, the same each time. Its numbers may be shared with other calls: a kernel gets the call of `make`.
        beyond: axes whose value a kernel supports only if it declares it, such as a head dim of 80. If a kernel raises on every
            call with such a value, it does not cover it; that is not a fault.
        shape: the shape for which `draw` draws numbers, or None for a recorded call.
    """

    name: str
    condition: dict[str, str]
    draw: Callable[[], AttentionCall]
    beyond: tuple[str, ...] = ()
    shape: Shape | None = None

    def make(self) -> AttentionCall:
        """Make the call in newly allocated memory."""
        return self.draw().clone()


@dataclass(frozen=True)
class _Drawn:
    """A drawn call: its shape without sequences, and the words and ranges from which these are made."""

    shape: Shape
    new: Length
    prefix: Length
    batch: str
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A part of the matrix. It has no calls if one of its axes has no values.

    Attributes:
        groups: axes, separated by spaces, whose combinations all occur, or coarser words of `_COARSER` for them. Groups are
            separated by commas.
        scenes: values of the axis "scene", or () if the part has axes "new", "prefix" and "batch". In decode, all have one new
            token.
        axes: values of the axes that differ from a usual call, or their names in `_named`.
        beyond: see `Case.beyond`.
        first: values of axes with which the first calls cover the first group.
        phase: the only phase with these calls, or an empty string for both.
    """

    groups: str
    scenes: tuple[_Scene, ...] = ()
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    beyond: tuple[str, ...] = ()
    first: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    phase: str = ""


def _row(phase: str, groups: str, scenes: Sequence[tuple[Any, ...]], *beyond: str, **axes: Sequence[Any]) -> _Part:
    """Make a part of scenes; scenes without data get normal data."""
    every = tuple(scene if len(scene) == 4 else (*scene, "normal") for scene in scenes)
    return _Part(groups, every, axes, beyond, phase=phase)


_extend, _decode, _both = (partial(_row, phase) for phase in ("extend", "decode", ""))
# Scenes for values of one feature, or of a quantisation.
_ASKING = {
    "extend": [(34, 157, "one"), (70, 0, "4 prompts"), (129, 64, "between others"), (7, 200, CROWD)],
    "decode": [(1, 200, "one"), (1, 129, CROWD), (1, 300, "4 unlike")],
}
_FAR = {
    "extend": [(17, range(1110, 1290), "after no prefix")],
    "decode": [(1, range(1110, 1290), "after a short one")],
}
"""Calls with more than 1,024 keys, whose mask, cap or partitions a kernel may treat specially."""
# (queries, keys more than that) of cross attention.
_CROSSING = [
    (34, 157, "fewer keys than queries"), (129, -100, "one"), (64, -63, "one"), (300, -7, "fewer keys than queries"),
    (34, range(1110, 1290), "one"),
]  # fmt: skip
# With more than 512 keys in one sequence, or many sequences, or alone.
_EACH = [(17, range(2, 127), "among long ones")]
_IN_A_CROWD = (17, range(66, 127), CROWD)
_ALONE = [(34, 0, "one")]
# Sequences without new tokens or without keys, where others have many or one: a batch is counted by its queries, or by its ends.
_EMPTY = [f"{what} {at}" for what in ("an empty one", "no keys") for at in ("first", "last")]
_OF_ANOTHER_LENGTH = "each of another length"


# Behind one cached token, and behind the questions' shared header.
_SEED_CASE = _extend("scene", [(41, 1, "one"), (34, 157, "one")], head_dim="first", dtype="first")
_TABLE = (
    # More than a block of 256 both cached and new.
    _extend("scene", [(300, range(258, 383), "one")], head_dim="first", dtype="first"),
    # Kernels have a path for each of these, and two looks for wrong kernels found 34 that go wrong in one path, dtype, head dim and
    # number of heads alone: at a later block of keys, in a second partition, in a second sequence of several blocks, in a batch of
    # prompts alone, or of sequences that are alike.
    _extend(
        _BY_PATH,
        [
            (66, 512, "one"), (70, 0, "{} prompts"), (32, range(66, 127), "{} alike"),
            (17, range(258, 383), "{} with as many new tokens", _SCALED),
        ],
        heads="all", layer=_LAYERS, size=(*SIZES, MORE), scale=_SCALES,
    ),
    _decode(
        _BY_PATH,
        [(1, range(386, 447), "one"), (1, range(258, 383), "two long ones", _SCALED), (1, 300, "{} unlike")],
        heads="all", layer=_LAYERS, size=(*SIZES, MORE), scale=_SCALES,
    ),
    # In float32 errors are smallest.
    _extend(
        "scene",
        [
            (40, 600, "one"),  # windows and blocks of up to 512 tokens
            (40, 600, "one", "other numbers"),  # results that are kept by shape
            (128, 384, "nine at borders", "scale 1.5 times"),  # new tokens that just fill a block or nearly do; another scale
            (34, 0, "one", "scores far above 0"), (34, 0, "one", "scores far below 0"),  # exponents of no, or of a wrong, maximum
            (34, 90, "one", "K far from 0"),  # sums of scores in 16 bits
            (34, 90, "one", "equal keys and zeros"),
            (9, 60, "three long ones", "equal first tokens"),  # a prefix that is taken for a shared one
            (7, 0, "after no prefix"),  # two that are alike
            (208, 60, "three chunks"),  # a second sequence of several blocks of queries
            (16, 256, "cached powers of two"), (16, 240, "powers of two"),  # plans that are kept by totals; full partitions
        ],
        head_dim="first", dtype="last",
    ),
    _decode(
        "scene",
        [
            (1, 700, "one"),  # windows of up to 512 tokens
            (1, 700, "one", "other numbers"),
            (1, 300, "seventeen at borders", "scale 1.5 times"),
            (1, 157, "one", "scores far above 0"), (1, 157, "one", "scores far below 0"),
            (1, 157, "one", "K far from 0"),
            (1, 157, "between others", "equal keys and zeros"),
            (1, 60, "three long ones", "equal first tokens"),
            (1, 256, "cached powers of two"), (1, 255, "powers of two"),
        ],
        head_dim="first", dtype="last",
    ),
    # What goes wrong in one dtype of 16 bits and one head dim.
    _extend("scene dtype head_dim", [(96, 20, "one"), (256, 1, "one", BEYOND_FP16[2])], dtype="halves", layer=_LAYERS),
    _decode("scene dtype head_dim", [(1, 600, "one", BEYOND_FP16[2])], dtype="halves", layer=_LAYERS),
    _extend(_BY_SCENE, [(34, 157, "one", data) for data in BEYOND_FP16[:2]], dtype="halves", layer=_LAYERS),
    _decode(_BY_SCENE, [(1, 157, "between others", data) for data in BEYOND_FP16[:2]], dtype="halves", layer=_LAYERS),
    _both("heads", [(34, 300, "one", BEYOND_FP16[2])], dtype="halves", heads="unusual"),
    _extend("dtype head_dim, scale", [(4, 92, "full tiles", _SCALED)], dtype="halves", scale=_SCALES),
    _extend("scene", [(4, 92, "full tiles", _SCALED)], dtype="last", scale=_SCALES),
    _decode("dtype head_dim, scale", [(1, 95, "full tiles", _SCALED)], dtype="halves", scale=_SCALES),
    _decode("scene", [(1, 95, "full tiles", _SCALED)], dtype="last", scale=_SCALES),
    # The same batch in another order, in the buffers of the first, or with its prefixes in another order; a sink behind which small
    # weights decide.
    _extend(
        "scene dtype",
        [
            (5, 10, "a shorter one first"), (5, 10, "a longer one first"), (34, 300, "one", "attention sink"),
            (6, 10, "a short prefix first"), (6, 10, "a long prefix first"),
        ],
        head_dim="first",
    ),
    _decode(
        "scene dtype",
        [(1, 40, "a shorter one first"), (1, 40, "a longer one first"), (1, 300, "one", "attention sink")],
        head_dim="first",
    ),
    _both("scene, dtype head_dim", [(4, 1, f"{n} short ones") for n in GRAPHS], dtype="halves"),
    # The longest calls, of a usual number of heads, which cost least. Sums that are kept in 16 bits: in float32 they hide on a GPU,
    # where a right kernel may compute in TF32.
    _extend("dtype", [(2, 4095, "one")], dtype="halves", head_dim="first"),
    _decode("dtype", [(1, 4096, "one")], dtype="halves", head_dim="first"),
    # A chunk of prefill together with decode; a batch beyond a vector of eight lengths.
    _extend(_BY_SCENE, [(range(129, 191), range(1030, 1160), "a chunk among long ones")]),
    _decode(_BY_SCENE, [(1, range(1030, 1160), "nine long ones")]),
    # More packed keys than an index of 16 bits holds, in lengths that leave every remainder.
    _both("scene", [(range(2, 9), range(1230, 1246), "33 long ones")], dtype="halves", head_dim="first", heads="last"),
    _decode("head_dim", [(1, 2200, "one")], dtype="last"),  # limits of up to 2,048 tokens
    # Three, five, six and seven partitions of 512 keys, after calls of more: what those left must not be merged.
    _decode(
        "scene", [(1, range(512 * n + 2, 512 * n + 511), "one") for n in (2, 4, 5, 6)], head_dim="first", dtype="last half"
    ),
    _both("dtype, head_dim", [(34, 400, "one", ONE_SIGN)], dtype="halves"),
    _both("head_dim", [(34, 300, "one", BEYOND_FLOAT16)], dtype="bfloat16"),
    _extend("heads, dtype", [(9, 30, "some without new tokens")], "batch", heads="all", head_dim="last"),
    # A full chunk, and one token more than that; and prompts of more than two blocks that are shorter than a chunk.
    _extend(
        "scene, dtype, head_dim",
        [(512, 8, "one"), (513, 0, "one"), (range(258, 383), 0, "one"), (range(386, 500), 0, "after no prefix")],
        dtype="halves",
    ),
    _decode("dtype, size", [(1, 300, "{} alike")], dtype="halves", head_dim="last", size=(4, 6, MORE)),
    _decode("heads, dtype", [(1, 40, "a single key first")], heads="all", head_dim="last"),
    _extend(
        "scene, dtype, head_dim", [*((new, 40, batch) for new in (9, 1) for batch in _EMPTY), (9, 40, _OF_ANOTHER_LENGTH)], "batch",
    ),
    _decode("scene, dtype, head_dim", [(1, 40, batch) for batch in (*_EMPTY, _OF_ANOTHER_LENGTH)], "batch"),
    # Parts of a context in which some queries see no key. Their log-sum-exps say that they count for nothing in a merge.
    _extend("asked dtype, heads head_dim", [(64, -20, "parts without keys")], "batch", heads="all", asked="of parts"),
    _decode("asked dtype, heads head_dim", [(1, 300, "parts without keys")], "batch", heads="all", asked="of parts"),
    # One value at a time, with more than 512 keys in one call.
    _extend("grad_mode", _ASKING["extend"][:1], grad_mode=("inference_mode", "no_grad")),
    _decode("grad_mode", _ASKING["decode"][:1], grad_mode=("inference_mode", "no_grad")),
    _both("dtype", _EACH, "inputs", heads="all", layout=("sliced",)),
    _both("layout", _EACH, "inputs", heads="all", layout=("heads first", "each its own")),
    _both("dtype", _EACH, first_head="another rank's"),
    _both("heads dtype", _EACH, "heads", dtype="halves", heads=_MODEL_HEADS[1:], head_dim="of models"),
    *(
        part(group, scenes, **{group.split()[-1]: "asked for"})
        for part, every in ((_extend, (_EACH, _FAR["extend"], _ALONE)), (_decode, (_EACH, _FAR["decode"])))
        for scenes in every
        for group in ("model", "head_dim head_dim_v")
    ),
    _extend("head_dim", _ALONE, "head_dim", dtype="halves", head_dim="others"),
    # Crowds with each value that the core lacks: with long keys, many new tokens and many sequences.
    _both(
        "heads, layout head_dim, layout dtype, layer", [_IN_A_CROWD], "heads", heads=_OTHER_HEADS, layout=_LAYOUTS, layer=_LAYERS,
    ),
    _both(
        "head_dim dtype, head_dim heads, layout", [_IN_A_CROWD], "head_dim", "heads", heads=_HEADS_OF_OTHER_DIMS,
        head_dim="others", layout=_LAYOUTS, layer=_LAYERS,
    ),
    _both("scene", [(*_IN_A_CROWD, data) for data in _RARE_HALVES], dtype="halves"),
    _both("scene", [(*_IN_A_CROWD, data) for data in _RARE_EXACT], dtype="last"),
    # Of models, those with many kv heads cost most.
    _both("heads dtype", [_IN_A_CROWD], "heads", dtype="halves", heads=_MODEL_HEADS[:1], head_dim="of models"),
    _decode("heads", [_IN_A_CROWD], "heads", dtype="halves", heads=_MODEL_HEADS[1:2], head_dim="of models"),
    _extend("heads", [(4, 1, _GRAPH)], "heads", dtype="halves", heads=_MODEL_HEADS[1:], head_dim="of models"),
    _decode("heads", [(1, 1, _GRAPH)], "heads", dtype="halves", heads=_MODEL_HEADS[2:], head_dim="of models"),
    _extend("grad_mode, first_head", _ALONE, grad_mode=("inference_mode",), first_head="another rank's"),
    _extend("layout", _ALONE, "inputs", heads="all", layout=("sliced", "each its own")),
    _extend("heads", _ALONE, "heads", heads=_OTHER_HEADS[::4]),
    _extend("heads", _ALONE, "heads", dtype="halves", heads=_MODEL_HEADS, head_dim="of models"),
)  # fmt: skip
_COARSER = {
    "cached": AxisPart("prefix", bool),
    "crowd": AxisPart("batch", lambda batch: batch == CROWD),
}


def _drawn(
    part: _Part,
    phase: str,
    usual: Mapping[str, Sequence[Any]],
    seed: int,
    named: Mapping[str, Mapping[str, Sequence[Any]]],
) -> Iterator[_Drawn]:
    """Yield the calls of a part: the only place where calls are drawn."""
    own = {axis: named[axis][some] if isinstance(some, str) else some for axis, some in part.axes.items()}
    axes: dict[str, Sequence[Any]] = {**usual, **({"scene": part.scenes} if part.scenes else {}), **own}
    if not all(map(len, axes.values())):
        return
    groups = [tuple(_COARSER.get(name, AxisPart(name)) for name in group.split()) for group in part.groups.split(",")]
    first = covering({**axes, **part.first}, groups[:1], seed) if part.first and all(part.first.values()) else []
    rows = [*first, *covering(axes, dict.fromkeys(groups), seed, first)]
    if part.scenes:  # calls of one shape follow one another, so that one can be made in the other's buffers
        shape = ("dtype", "head_dim", "heads", "scene")
        rows.sort(key=lambda row: [axes[axis].index(row[axis]) for axis in shape])
    for row in rows:
        size, scale, model = row.pop("size"), row.pop("scale"), row.pop("model", None)
        if part.scenes:
            row["new"], row["prefix"], batch, data = row.pop("scene")
            row["batch"] = batch.format(_said(size))
            row["data"] = scale if data == _SCALED else row["data"] if data == "normal" else data
        if model:
            row["heads"], row["head_dim"] = SHAPES[model][:2], SHAPES[model][2]
        if row["head_dim_v"] == row["head_dim"]:
            row["head_dim_v"] = 0
        if phase == "decode":
            row["new"] = 1
        beyond = dict.fromkeys((*part.beyond, *("inputs",) * (row["layout"] != "packed")))
        lengths = {name: row.pop(name) for name in ("new", "prefix", "batch")}
        yield _Drawn(Shape(phase, (), **row), **lengths, beyond=tuple(beyond))


def _core_axes(phase: str, size: Size = "small", prefix: bool = True) -> dict[str, Sequence[Any]]:
    """Return the axes of the core but heads, dtype and head_dim. A decode call has one new token and always a cached prefix."""
    decode = phase == "decode"
    return {
        "prefix": [cached for cached in _PREFIXES[size] if cached or not decode] if prefix else (0,),
        "new": (1,) if decode else _NEW[size],
        "batch": tuple(CORE[phase]) if prefix else WITHOUT_PREFIX,
        "data": tuple(DATA),
    }


_CORE_GROUPS = ", ".join((
    "dtype head_dim heads cached",
    "dtype head_dim heads crowd",
    *(" ".join(three) for some in (
        ("cached", "batch", "heads", "head_dim", "dtype"), ("cached", "batch", "new", "head_dim", "dtype"),
        ("cached", "heads", "new", "head_dim", "dtype"), ("cached", "data", "head_dim", "dtype"),
    ) for three in combinations(some, 3)),
    *map(" ".join, combinations(("prefix", "new", "batch", "heads", "head_dim", "dtype", "data"), 2)),
))  # fmt: skip


def _parts(phase: str, size: Size, models: Sequence[str], declared: Declaration) -> Iterator[_Part]:
    """Yield the parts of the matrix of one phase."""
    if phase == "extend":
        yield _SEED_CASE
    core = _core_axes(phase, size, declared.prefix)
    # The mask of the seed case is wrong where a chunk of more new tokens than a block of queries follows a short prefix.
    behind = {
        "prefix": [n for n in core["prefix"] if isinstance(n, int) and 0 < n <= 64],
        "new": [n for n in core["new"] if _first(n) > 128],
    }
    yield _Part(_CORE_GROUPS, axes=core | {"heads": "all"}, first=behind)
    yield from (part for part in _TABLE if part.phase in ("", phase))
    yield from _asking(phase, declared.features)
    for model in models:
        yield from _as_layers(asked_by(model, declared.features), model=(model,))
    noise = family(declared.noise)
    if noise.quantises:  # calls on which a quantisation costs nothing
        grid = (ON_GRID, WEIGHTS_ON_GRID) if noise.p is None else (WEIGHTS_ON_GRID,)
        yield _both("scene data head_dim, data dtype, data heads", _ASKING[phase], heads="all", data=grid)


def asked_by(model: str, features: Sequence[str]) -> tuple[str, ...]:
    """List the requests of a known model's layers, of these features."""
    return tuple(value for value in ASKED_BY.get(model, ()) if feature_in(value) in features)


def _as_layers(asked: Sequence[str], **axes: Sequence[Any]) -> Iterator[_Part]:
    """Yield a call with all requests of a model's layers, and more keys than its window, so that it hides some."""
    if asked and (window := longest_window(asked)) <= _LONGEST_WINDOW:
        # A cap as large as models have it changes nothing where scores are of normal size.
        data = "unscaled scores" if any(feature_in(value) == "softcap" for value in asked) else "normal"
        scene = (7, max(window + window // 8, 300), "one", data)
        yield _both("scene", (scene,), "heads", "head_dim", asked=(tuple(asked),), **axes)


def _asking(phase: str, features: Sequence[str]) -> Iterator[_Part]:
    """Yield the calls that ask for a declared feature, for two of them and for all.

    Each value of a feature meets each dtype, head dim, number of heads and layout, and each feature all combinations of the first
    three.
    """
    asked = {name: of for name, of in values_of(features).items() if phase == "extend" or name != "not_causal"}
    for name, of in asked.items():
        data = _CAPPED if name == "softcap" else ("normal",)
        # A scale of each head is that of the tensor in MQA.
        heads = "of several kv heads" if name == "stored_kv" else "all"
        groups, layout = "scene asked, asked dtype", _LAYOUTS[: 1 if name == "mla" else None]
        if name != "mla":
            pairs = "asked heads, asked head_dim, asked layout, layout heads, layout head_dim, layout dtype"
            groups = f"{groups}, {pairs}, heads head_dim dtype"
        usual = [(value,) for value in of if value != "cross attention"]
        crossing = [(value,) for value in of if value == "cross attention"]
        yield _both(groups, _ASKING[phase], heads=heads, data=data, layout=layout, asked=usual)
        yield _both(groups, _CROSSING, heads=heads, data=data, layout=layout, asked=crossing)
        yield _both("asked", _FAR[phase], heads=heads, data=data, layout=layout, asked=usual)
        if name == "mla":
            yield _both("asked", [(7, 200, "one")], heads=(_MLA_HEADS,), asked=[(MLA,)])
            continue
        first = _ASKING[phase][:1]
        yield _both("heads", first, "heads", heads=_MODEL_HEADS, head_dim="of models", data=data, asked=usual)
        yield _both("head_dim", first, "head_dim", head_dim="others", data=data, asked=usual)
    for window in LONG_WINDOWS if "window" in asked else ():  # of two heads, as they have many keys
        scene = (range(66, 140), 2 * window - 100, "one")
        yield _both("dtype", [scene], heads="last", asked=((f"window {window}",),))
    strongest = {name: value for name, value in strongest_of(features).items() if name in asked}
    pairs_of = [pair for pair in combinations(strongest, 2) if set(pair) != {"window", "not_causal"}]
    for scenes, causal in ((_ASKING[phase], True), (_CROSSING, False)):
        together = [tuple(map(strongest.__getitem__, two)) for two in pairs_of if ("not_causal" in two) != causal]
        yield _both("asked dtype, asked scene, heads head_dim", scenes, heads="all", asked=together)
    every = tuple(value for name, value in strongest.items() if name not in _NOT_WITH_ALL)
    if len(every) > 2:
        yield _both("scene, dtype, heads head_dim", _ASKING[phase], heads="all", asked=[every])


def _named(
    size: Size,
    heads: Sequence[tuple[int, int]],
    kinds: Sequence[torch.dtype],
    dims: Sequence[int],
    other_dims: Sequence[int],
    models: Sequence[str],
    declared: Declaration,
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the values that parts name: axis -> name -> values, which may be empty."""
    usual, halves = _HEADS[size][1], [kind for kind in kinds if kind.itemsize == 2] or kinds[:1]
    windows = [(some[0],) for name, some in values_of(declared.features).items() if name == "window"]
    return {
        "heads": {
            "all": heads, "last": heads[-1:], "unusual": [some for some in heads if some != usual],
            "of several kv heads": [some for some in heads if some[1] > 1],
        },
        "head_dim": {
            "first": dims[:1], "last": dims[-1:], "others": other_dims, "of models": [dim for dim in dims if dim == _MODEL_DIM],
        },
        "dtype": {
            "first": kinds[:1], "last": kinds[-1:], "halves": halves, "last half": halves[-1:],
            "bfloat16": [kind for kind in kinds if kind == torch.bfloat16],
        },
        "first_head": {"another rank's": usual[:1]},
        "head_dim_v": {"asked for": (0, *declared.head_dims_v) if declared.head_dims_v else ()},
        "model": {"asked for": models},
        "asked": {"of parts": ((), *windows) if "lse" in declared.features else ()},
    }  # fmt: skip


def _as_mla(drawn: _Drawn) -> _Drawn:
    """Turn a call into absorbed latent attention: one kv head of 576 dims, whose first 512 are v."""
    shape = drawn.shape
    asked = tuple(dict.fromkeys((MLA, *shape.asked)))
    shape = replace(shape, heads=(shape.heads[0], 1), head_dim=576, head_dim_v=512, layout="v in k", asked=asked)
    return replace(drawn, shape=shape, beyond=())


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the canonical name of a dtype: "bfloat16" for ``torch.bfloat16`` and "bf16"."""
    word = str(dtype).removeprefix("torch.")
    return _SHORT.get(word, word)


def cases(
    phases: Sequence[str] = PHASES,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype | str] | None = None,
    seed: int = 0,
    size: Size = "small",
    head_dims: Sequence[int] | None = None,
    like: Sequence[str] | None = None,
    declared: Declaration | None = None,
) -> list[Case]:
    """Make the matrix: first the calls of the seed case, then for each phase the core and the calls beyond it.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtypes: of q, k and v, such as "float32"; by default float16, bfloat16 and float32.
        seed: seed of the data and of the rows. The same seed gives the same cases with the same data.
        size: "small" for interpreted kernels; "full" for a GPU, with more and longer sequences and more heads.
        head_dims: head dims of q and k, by default 64 and 128, and beyond the core for `OTHER_HEAD_DIMS`.
        like: models of `assay.harness.attention.model_shapes.SHAPES` whose shapes to add; by default none in the small matrix,
            and `COMMON` in the full one.
        declared: the kernel's declaration: whether it computes with a cached prefix, its head dims of v, its features and its
            noise. Each value of these gets calls. If a kernel declares "mla" and only the head dim 576, all calls are absorbed
            latent attention.

    Raises:
        ValueError: no phase, dtype or head dim, or an unknown phase, size or model.
    """
    declared = declared or Declaration()
    names = [dtype_name(dtype) for dtype in (DTYPES if dtypes is None else dtypes)]
    dims = HEAD_DIMS if head_dims is None else tuple(head_dims)
    known = set(phases) <= set(PHASES) and set(names) <= set(DTYPES) and size in _PREFIXES
    if not (phases and names and dims and known):
        raise ValueError(
            f"no matrix of phases {tuple(phases)}, dtypes {tuple(names)}, head_dims {dims}, size {size!r}; expected at least "
            f"one of each, phases from {PHASES}, dtypes from {tuple(DTYPES)} and a size from {tuple(_PREFIXES)}"
        )
    kinds = tuple(DTYPES[name] for name in names)
    models = (COMMON if size == "full" and head_dims is None else ()) if like is None else tuple(like)
    if unknown := set(models) - set(SHAPES):
        raise ValueError(f"no shape of {', '.join(sorted(unknown))}; expected one of {', '.join(SHAPES)}")
    other_dims = OTHER_HEAD_DIMS if head_dims is None else ()
    only_mla = "mla" in declared.features and dims == (576,)  # such a kernel computes nothing else
    heads_of = list({q: (q, kv) for q, kv in _HEADS[size]}.values()) if only_mla else _HEADS[size]
    usual = _usual(_HEADS[size][1], kinds, dims) | {"head_dim_v": (0, *declared.head_dims_v)}
    named = _named(size, heads_of, kinds, dims, other_dims, models, declared)
    drawn = [
        each
        for phase in phases
        for part in _parts(phase, size, models, declared)
        for each in _drawn(part, phase, usual, seed, named)
    ]
    if only_mla:
        drawn = [each for each in drawn if each.shape.layout == "packed"]
    drawn = [_as_mla(each) if only_mla or MLA in each.shape.asked else each for each in drawn]
    made = [
        _case(each, seed * _OF_A_MATRIX + number, device, size, declared.ways, bool(declared.features))
        for number, each in enumerate(dict.fromkeys(drawn))
    ]
    return [case for case in made if declared.prefix or case.condition["cached prefix"] == "none"]


def _usual(heads: tuple[int, int], kinds: Sequence[torch.dtype], dims: Sequence[int]) -> dict[str, Sequence[Any]]:
    """Return the axes of a usual call; axes with several values cycle through them."""
    return {
        "heads": (heads,), "head_dim": dims, "dtype": kinds, "data": ("normal",), "head_dim_v": (0,), "layer": (0,),
        "first_head": (0,), "layout": ("packed",), "grad_mode": ("",), "asked": ((),), "size": (0,), "scale": ("",),
    }  # fmt: skip


def model_cases(
    phases: Sequence[str],
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    tokens: int,
    ways: Sequence[str] = (),
    asked: Sequence[str] = (),
) -> list[Case]:
    """Make a matrix for one model, small enough to be part of a run: its dtype, head_dim and numbers of heads, and shorter calls.

    Args:
        phases: one or both of "extend" and "decode".
        device: device of the calls' tensors.
        dtype: of q, k and v.
        heads: q heads and kv heads.
        head_dim: of q, k and v.
        tokens: length of the longest calls: as many new tokens, and as many cached ones.
        ways: the `Declaration.ways` of an adapted kernel.
        asked: features that its layers ask for, such as "window 4096"; calls get enough keys for them to matter.
    """
    drawn: list[_Drawn] = []
    usual = _usual(heads, (dtype,), (head_dim,))
    for phase in phases:
        decode = phase == "decode"
        axes = _core_axes(phase) | {"heads": (heads,), "new": (1,) if decode else (1, 7, 64, 129)}
        axes["prefix"] = (0, 1, 16, 200)[decode:]
        pairs = ", ".join(map(" ".join, combinations([axis for axis, values in axes.items() if len(values) > 1], 2)))
        long = [(7, tokens, "one"), *([] if decode else [(tokens, 0, "one")])]
        far = [(34, _FAR_PREFIX[phase], "one", f"scores far {side} 0") for side in ("above", "below")]
        for part in (_Part(pairs, axes=axes), _both("scene", long), _both("scene", far), *_as_layers(asked)):
            drawn += _drawn(part, phase, usual, 0, {})
    if (heads[1], head_dim) == (1, 576):  # of a model with latent attention
        drawn = list(map(_as_mla, drawn))
    return [_case(each, number, device, "small", ways, bool(asked)) for number, each in enumerate(drawn)]


def _first(length: Length) -> int:
    return length if isinstance(length, int) else length[0]


def _any(length: Length, drawn: random.Random) -> int:
    return length if isinstance(length, int) else drawn.choice(length)


def _said(length: Length) -> str:
    """Format a length; a range to draw from is a single value of its axis for any seed."""
    return str(length) if isinstance(length, int) else f"{length[0]} to {length[-1]}"


def _case(call: _Drawn, seed: int, device: str, size: Size, ways: Sequence[str], featured: bool) -> Case:
    drawn, shape = random.Random(seed), call.shape
    alternatives: dict[str, list[str]] = {}
    for way in ways:
        alternatives.setdefault(way.partition(": ")[0], []).append(way)
    taken = {name: drawn.choice(some) for name, some in alternatives.items() if drawn.random() < 0.5}
    # Calls with as few new tokens as possible are cheaper: every second one.
    new = drawn.choice((_first(call.new), _any(call.new, drawn)))
    prefix = _any(call.prefix, drawn)
    batch = call.batch.replace(_said(MORE), str(drawn.choice(MORE)))
    lens = (CORE[shape.phase] | BATCHES)[batch](new, prefix, _LONG[size])
    cached = sum(prefix > 0 for _, prefix in lens)
    q_heads, kv_heads = shape.heads
    kind = "MHA" if q_heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
    condition = {
        "phase": shape.phase,
        "prefix": _said(call.prefix),
        "new": _said(call.new),
        "batch": call.batch,
        "cached prefix": "none" if not cached else "all" if cached == len(lens) else "some",
        "heads": f"{kind} {q_heads}/{kv_heads}",
        "head_dim": str(shape.head_dim),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "data": shape.data,
        "inputs": shape.layout,
        "head_dim_v": str(shape.head_dim_v) if shape.head_dim_v else "that of q",
        "layer": str(shape.layer),
        "first head": str(shape.first_head),
        "autograd": shape.grad_mode or "as called",
    }
    if featured or shape.asked:
        condition["asked for"] = " and ".join(shape.asked) or "nothing"
    condition |= {name: taken[name].partition(": ")[2] or "yes" if name in taken else "no" for name in alternatives}
    dims = f"d{shape.head_dim}" + (f"v{shape.head_dim_v}" if shape.head_dim_v else "")
    parts = [shape.phase, f"{new}+{prefix}", batch, condition["heads"], dims, condition["dtype"], shape.data]
    parts += [f"layer{shape.layer}"] * (shape.layer > 0) + [shape.layout] * (shape.layout != "packed")
    parts += [f"from_head{shape.first_head}"] * (shape.first_head > 0)
    parts += [special for special in (shape.grad_mode, *shape.asked) if special]
    shape = replace(shape, lens=tuple(lens), ways=tuple(taken.values()))
    draw = partial(shape.draw, seed, device, seed // _OF_A_MATRIX)
    return Case("-".join(parts).replace(" ", "_"), condition, draw, call.beyond, shape)
