"""Effects on scores and outputs: factors, constants, wrong merges, wrong rescaling and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from assay.harness.attention.bugs.bug import Bug, Change, Compute, changing
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.bugs.precision import denominator_rounded, inputs_rounded, scores_rounded, weights_rounded
from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Flags, Numbers, scores_of, softmax
from assay.harness.readout.features import Ints
from assay.harness.readout.formulas import DESCALES, TIMES, Formula, constant_formula
from assay.harness.readout.operators import Effect, Told
from assay.harness.readout.queries import Queries, einsum
from assay.harness.readout.samples import common


def multiplied(scores: Formula | None = None, output: Formula | None = None, cost: float = 1.0) -> Told:
    """Return the effect of multiplying scores by a formula, or the output, or both."""
    words = f"scores are multiplied by {_formula(scores)}" if scores else ""
    if output is not None and words:
        words = f"{words}; the output by {_formula(output)}"
    elif output is not None:
        words = f"the output is multiplied by {_formula(output)}"
    return Told(words, _multiplied, (scores, output), cost)


def _formula(formula: Formula) -> str:
    return f"{formula.words}: {formula.bug}" if formula.bug else formula.words


def _multiplied(queries: Queries, scores: Formula | None, output: Formula | None) -> Numbers:
    out = queries.right
    if scores is not None:
        out = queries.attended(queries.own_scores * scores.of(queries).reshape(*queries.shape, 1))
    return out if output is None else out * output.of(queries).reshape(*queries.shape, 1)


def constant(value: float) -> Told:
    """Return the effect of an output that is zero, NaN or infinite."""
    # A zero output was most likely never stored, since nothing is scaled by zero.
    words = (
        "the output is not written: it is zero"
        if value == 0
        else f"the output is {'NaN' if math.isnan(value) else 'infinite'}"
    )
    return Told(words, _filled, (value,), 0.5)


def _filled(queries: Queries, value: float) -> Numbers:
    return np.full_like(queries.right, value)


MERGES = ("equal", "base2", "base-e", "mean")
"""See `merged`: log-sum-exps are lost, or read in the wrong base (kernels that use exp2 store them in base 2); or K is smoothed
by parts, which shifts the scores of each part."""
PARTS = (0, 8, 16, 32, 64, 128, 256)
"""Keys of a part, see `merged`: tiles and splits of common kernels."""


def merged(block: int, law: str) -> Told:
    """Return the effect of merging parts of the keys (blocks, or for 0 the cached and the new ones) with wrong weights.

    The laws are "equal": all parts count alike; "base2" or "base-e": their log-sum-exps are read in the other base; and "mean":
    each part's scores are shifted by the mean of its K.
    """
    parts = f"splits of {block} keys" if block else "cached and new keys"
    each = f"each {block} keys" if block else "the cached or the new keys"
    words = {
        "equal": f"{parts} are merged with equal weights instead of by their log-sum-exps",
        "base2": f"{parts} are merged in base e, but their log-sum-exps are in base 2",
        "base-e": f"{parts} are merged in base 2, but their log-sum-exps are in base e",
        "mean": f"K is smoothed by the mean of {each}, not of the sequence",
    }[law]
    return Told(words, _merged, (block, law), 1.5)


def _merged(queries: Queries, block: int, law: str) -> Numbers:
    label = _parts(queries, block)
    offsets = np.zeros_like(queries.own_scores)
    logits = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
    for part in np.unique(label):
        here = label == part
        if law == "mean":
            k = queries.k[here].mean(0)[queries.own]  # [heads, dim]
            offsets[:, :, here] = -queries.call.scale * einsum("thd,hd->th", queries.q, k)[..., None]
        else:
            offsets[:, :, here] = _offset(logits[:, :, here], law)[..., None]
    return queries.attended(queries.own_scores + offsets)


def _parts(queries: Queries, block: int) -> Ints:
    """Return the index of each packed key's part, int64 [total_k]."""
    starts = np.array(queries.call.cu_seqlens_k.tolist())
    of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    j = np.arange(len(of)) - starts[of]
    cached = (j < np.array(queries.call.prefixes)[of]).astype(np.int64)
    part = j // block if block else 1 - cached
    return np.asarray(of * (part.max() + 1) + part)


def _offset(logits: Numbers, law: str) -> Numbers:
    """Return the term added to the scores of a part, [rows, heads, keys] -> [rows, heads]; 0 for parts that are not seen."""
    top = logits.max(-1)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(logits - safe[..., None]).sum(-1)) + safe
        off = lse * {"equal": -1, "base2": 1 / math.log(2) - 1, "base-e": math.log(2) - 1}[law]
    return np.where(np.isfinite(off), off, 0.0)


# The block whose scale is used by mistake: the previous one, or one from a wrong index into the scales of the batch.
_WHOSE = {
    "previous": "the previous block of {size} keys",
    "packed": "block cu_seqlens_k[b] // {size} + j // {size} of all blocks of {size} keys of the batch",
}
# Usual block sizes of quantisations and pages, in keys.
_BLOCK_SIZES = (4, 8, 16, 32, 64, 128)


def _block_scales() -> Iterator[Told]:
    """Yield the effects of dequantising K or V of a block of keys with the scale of another block, if there is one.

    A scale is the largest absolute value in a block of one kv head, as in symmetric quantisation. The effect depends on the data,
    so it can be computed but not read from weights: one-hot values change the scale.
    """
    for what, size, whose in product("kv", _BLOCK_SIZES, _WHOSE):
        words = f"{what.upper()} of key j is dequantised with the scale of {_WHOSE[whose].format(size=size)}"
        yield Told(words, _other_scales, (what, size, whose), 2.0)


def _other_scales(queries: Queries, what: str, size: int, whose: str) -> Numbers:
    factors = _scale_factors(queries, what, size, whose)[:, queries.own].T[None]
    if what == "k":
        return queries.attended(queries.own_scores * factors)
    weights: Numbers = softmax(queries.own_scores, queries.visible[:, None], queries.sinks) * factors
    return queries.of_own(weights)


def _scale_factors(queries: Queries, what: str, size: int, whose: str) -> Numbers:
    """Return the wrong scale divided by the correct one for each key, [total_k, kv heads]."""
    x = np.abs(queries.k if what == "k" else queries.values).max(-1)
    factors: Numbers = np.ones_like(x)
    keys = [k for _, k in sequences(queries.call)]
    scales = [np.maximum.reduceat(x[k], np.arange(0, k.stop - k.start, size), axis=0) for k in keys]
    for k, own in zip(keys, scales, strict=True):
        block = np.arange(k.stop - k.start) // size
        every, at = (own, block - 1) if whose == "previous" else (np.concatenate(scales), k.start // size + block)
        factors[k] = every[np.clip(at, 0, len(every) - 1)] / np.maximum(own[block], 1e-30)
    return factors


# Wrong online softmax

# Keys of a tile; 1 for kernels that process one key at a time.
_TILES = (1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256)
# Powers of the correct factor, exp(old maximum - new maximum), in the numerator and the denominator, and a description.
_RESCALED = {
    "neither": ((0, 0), "the sums over earlier tiles are not rescaled when the maximum rises"),
    "numerator": ((1, 0), "the denominator is not rescaled when the maximum rises"),
    "denominator": ((0, 1), "the numerator is not rescaled when the maximum rises"),
    "late": ((1, 1), "the denominator is rescaled after the new tile was added to it"),
    "rarely": ((1, 1), "the sums over earlier tiles are not rescaled when the maximum rises by less than {least:g}"),
    "base2": ((1 / math.log(2),) * 2, "earlier tiles are rescaled by exp of a difference that is in base 2"),
    "base-e": ((math.log(2),) * 2, "earlier tiles are rescaled by exp2 of a difference that is in base e"),
}


def _online_softmax(tile: int, law: str, least: float = 0.0) -> Told:
    """Return the effect of an online softmax that rescales earlier tiles wrongly when a later tile raises the running maximum.

    The laws are "neither" sum is rescaled; only the "numerator" is, or only the "denominator"; "late": the denominator is, but
    after the tile was added; "rarely": both are, but only if the maximum rises by `least` or more; and "base2" and "base-e": the
    exponential has the other base.
    """
    tiles = f"online softmax over {f'tiles of {tile} keys' if tile > 1 else 'one key at a time'}"
    words = f"{tiles}: {_RESCALED[law][1].format(least=least)}"
    return Told(words, _online, (tile, law, least), 2.5 if law == "rarely" else 2.2)


def _online(queries: Queries, tile: int, law: str, least: float) -> Numbers:
    scores = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
    weights = np.zeros_like(scores)
    total = np.ones((*queries.shape, 1))
    for _, keys in sequences(queries.call):
        here = queries.visible[:, keys].any(1)
        if here.any():
            weights[here, :, keys], total[here] = _sums(scores[here, :, keys], tile, law, least, queries.sinks)
    with np.errstate(divide="ignore", invalid="ignore"):
        normalised = np.where(total > 0, weights / total, 0.0)
    return queries.of_own(np.nan_to_num(normalised))


def _sums(scores: Numbers, tile: int, law: str, least: float, sinks: Numbers | None) -> tuple[Numbers, Numbers]:
    """Return the numerators of a sequence's weights, [rows, heads, keys], and the denominators, [rows, heads, 1]."""
    keys = scores.shape[-1]
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -keys % tile)), constant_values=-np.inf)
    tiles = padded.reshape(*scores.shape[:2], padded.shape[-1] // tile, tile)
    top = np.maximum.accumulate(tiles.max(-1), -1)
    safe = np.where(np.isfinite(top), top, 0.0)
    above, below = _rescaled(top[..., :-1], safe[..., 1:], law, least)
    added = np.exp(tiles - safe[..., None])
    gained = added.sum(-1)
    if law == "late":  # the first tile's factor is 1: there are no earlier sums
        gained[..., 1:] *= below
    total = (gained * _later(below)).sum(-1, keepdims=True)
    if sinks is not None:  # added after all tiles
        total = total + np.exp(sinks - safe[..., -1:])
    weights = added * _later(above)[..., None]
    return weights.reshape(*scores.shape[:2], padded.shape[-1])[..., :keys], total


def _rescaled(top: Numbers, new: Numbers, law: str, least: float) -> tuple[Numbers, Numbers]:
    """Return the factors of the numerator and the denominator at each tile but the first; 1 where nothing was summed yet."""
    seen = np.isfinite(top)
    rise = np.where(seen, new - np.where(seen, top, 0.0), 0.0)
    if law == "rarely":
        rise = np.where(rise < least, 0.0, rise)
    with np.errstate(over="ignore"):
        above, below = (np.exp(-power * rise) for power in _RESCALED[law][0])
    return above, below


def _later(factors: Numbers) -> Numbers:
    """Return, for each tile, the product of all later tiles' factors; there is one more tile than factors."""
    products = np.cumprod(factors[..., ::-1], -1)[..., ::-1]
    return np.concatenate([products, np.ones((*factors.shape[:-1], 1))], -1)


# A kernel may skip rescaling if the maximum rises by less than this.
_LEAST_RISES = (0.5, 1.0, 2.0, 4.0, 8.0)


def _online_softmaxes() -> Iterator[Told]:
    """Yield every law with tiles of usual sizes."""
    for tile, law in product(_TILES, _RESCALED):
        for least in _LEAST_RISES if law == "rarely" else (0.0,):
            yield _online_softmax(tile, law, least)


# Effects that are tried for any reading

# Rows of a call for fitting a factor.
_ROWS = 6
# Relative error up to which an output counts as a multiple of the correct one.
_FLAT = 1e-3
Answer = tuple[Queries, Numbers, Flags]
"""Queries, the kernel's outputs, [rows, heads, head_dim_v], and flags of the wrong ones, bool [rows * heads]."""


def _of_tile(size: int, h: Ints, group: int, _: int) -> Ints:
    return h // size * size // group


# Description of a wrong kv head -> a function of (q head h, q heads per kv head G, kv heads) that returns it.
_KV_HEADS: dict[str, Callable[[Ints, int, int], Ints]] = {
    "the first kv head": lambda h, _, kv_heads: 0 * h,
    "the last kv head": lambda h, _, kv_heads: 0 * h + kv_heads - 1,
    "kv head h mod num_kv_heads": lambda h, _, kv_heads: h % kv_heads,
    "kv head h // num_kv_heads": lambda h, _, kv_heads: h // kv_heads,
    "kv head h mod G": lambda h, group, _: h % group,
    **{f"the kv head of q head (h rounded down to {n})": partial(_of_tile, n) for n in (2, 4, 8, 16, 32)},
}


def _of_kv_head(queries: Queries, what: str, words: str, beyond: str) -> Numbers:
    wanted = _KV_HEADS[words](np.arange(queries.heads), queries.call.heads.group, queries.kv_heads)
    there = wanted < queries.kv_heads
    other = np.minimum(wanted, queries.kv_heads - 1)
    scores = queries.scores[:, np.arange(queries.heads), other if "K" in what else queries.own]
    weights: Numbers = softmax(scores, queries.visible[:, None], queries.sinks)
    out = einsum("thk,khd->thd", weights, np.ascontiguousarray(queries.values[:, other]))
    return out if beyond == "the last" else out * there[None, :, None]


def _kv_heads() -> Iterator[Told]:
    """Yield effects that read K and V, or V alone, of another kv head."""
    for words, (what, beyond) in product(_KV_HEADS, product(("K and V", "V"), ("the last", "zeros"))):
        past = f", and past the last one {beyond}" if "//" in words or "mod G" in words else ""
        if past or beyond == "the last":
            text = f"q head h reads {what} of {words}{past}"
            yield Told(text, _of_kv_head, (what, words, beyond), 1.2 + 0.2 * (what == "V") + 0.2 * bool(past))


def _of_row_tile(size: int, row: Ints, starts: Ints) -> Ints:
    return np.searchsorted(starts, row // size * size, "right") - 1


# Whose keys a query may see as if it were a query of theirs -> a function of (its packed row, cu_seqlens_q) that returns the index
# of that sequence.
_ROWS_OF: dict[str, Callable[[Ints, Ints], Ints]] = {
    "the previous sequence": lambda row, starts: np.searchsorted(starts, row, "right") - 2,
    "the next sequence": lambda row, starts: np.searchsorted(starts, row, "right"),
    "the first sequence": lambda row, starts: 0 * row,
    "the last sequence with cu_seqlens_q[b] < r": lambda row, starts: np.searchsorted(starts, row) - 1,
    **{
        f"the sequence of packed row (r rounded down to {n})": partial(_of_row_tile, n) for n in (4, 8, 16, 32, 64, 128)
    },
}


def _as_row_of(queries: Queries, whose: str) -> Numbers:
    row, (q, k) = queries.rows, zip(*sequences(queries.call), strict=True)
    of = _ROWS_OF[whose](row, np.array([rows.start for rows in q])).clip(0, len(q) - 1)
    begin, end, behind = np.array([(keys.start, keys.stop, rows.stop) for rows, keys in zip(q, k, strict=True)])[of].T[
        ..., None
    ]
    key = np.arange(queries.call.k.shape[0])
    seen = (key >= begin) & (key < end) & ((key <= row[:, None] - behind + end) | (not queries.call.causal))
    return queries.of_own(softmax(queries.own_scores, seen[:, None], queries.sinks))


def _scored(queries: Queries, change: Callable[[Queries], Numbers]) -> Numbers:
    return queries.attended(change(queries))


def _of_some_dims(size: int, queries: Queries) -> Numbers:
    """Return scores over head dims up to the last multiple of a size."""
    dims = queries.call.q.shape[2] // size * size
    call = queries.call.with_tensors(
        {**queries.call.tensors, "q": queries.call.q[..., :dims], "k": queries.call.k[..., :dims]}
    )
    return np.asarray(scores_of(call, queries.rows)[:, np.arange(queries.heads), queries.own])


def _clamped(low: float, high: float, queries: Queries) -> Numbers:
    return np.clip(queries.own_scores, low, high)


def _uncapped(share: float, queries: Queries) -> Numbers:
    """Return scores without the soft cap where they are below this share of it."""
    scores, cap = queries.own_scores, queries.call.spec.softcap
    if not cap:
        return scores
    plain = cap * np.arctanh(np.clip(scores / cap, -1 + 1e-12, 1 - 1e-12))
    return np.where(np.abs(plain) < share * cap, plain, scores)


# Absolute values at which kernels clamp scores: exp overflows float16 at 11 and float32 at 88.
_CLAMPS = (8, 10, 11, 15, 16, 20, 25, 30, 32, 40, 50, 60, 64, 80, 88, 100)


def _of_scores() -> Iterator[Told]:
    """Yield effects that change scores one by one: some head dims are left out, or they are clamped."""
    for size in (16, 32, 64, 128):
        words = f"Q K^T leaves out the head dims from (head_dim rounded down to {size}) on"
        yield Told(words, _scored, (partial(_of_some_dims, size),), 1.5)
    for share, words in ((0.25, "a quarter of"), (0.5, "half"), (1.0, "")):
        text = f"scores are not capped below {words} the soft cap".replace("  ", " ")
        yield Told(text, _scored, (partial(_uncapped, share),), 1.7)
    for value in _CLAMPS:
        yield Told(f"scores are clamped to {-value} to {value}", _scored, (partial(_clamped, -value, value),), 1.8)
        yield Told(f"scores above {value} count as {value}", _scored, (partial(_clamped, -math.inf, value),), 1.7)


def general_effects(answers: Sequence[Answer]) -> Iterable[Effect]:
    """Yield effects that are tried for any reading."""
    yield from _kv_heads()
    yield from (multiplied(output=formula, cost=1.5) for formula in TIMES)
    yield from (multiplied(*both, cost=2.0) for both in DESCALES)
    yield from _block_scales()
    yield from _of_scores()
    for whose in _ROWS_OF:
        words = f"query i sees the keys of {whose} instead of its own, as if it were one of its queries"
        yield Told(words, _as_row_of, (whose,), 1.5)
    yield from _online_softmaxes()
    factors: list[float] = []
    for queries, actual, bad in answers:
        given, right = (x.reshape(len(bad), x.shape[-1])[bad] for x in (actual, queries.right))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            factor: Numbers = (given * right).sum(-1) / (right * right).sum(-1)
            gaps = np.abs(given - factor[:, None] * right).sum(-1) / np.abs(given).sum(-1)
        factors += factor[np.nan_to_num(gaps, nan=np.inf) < _FLAT][:_ROWS].tolist()
    yield from (
        multiplied(output=constant_formula(factor), cost=1.4) for factor in (common(factors, 2) if factors else ())
    )


def known_bug(bug: Bug) -> Told:
    """Return the effect of a hypothesis."""
    return Told(bug.about, _of_bug, (bug.id,), 3.0, bug.id)


def _of_bug(queries: Queries, id: str) -> Numbers:
    return _computed(queries, BY_ID[id].compute)  # by its id, since formulas of hypotheses cannot be pickled


def _changed(queries: Queries, change: Change) -> Numbers:
    return _computed(queries, changing(change))


def _computed(queries: Queries, compute: Compute) -> Numbers:
    out = compute(queries.call, torch.from_numpy(queries.rows).to(queries.call.q.device))
    return queries.right if out is None else out.double().cpu().numpy()


# The formats in which kernels keep Q, K, V, scores and weights.
_FORMATS = (
    (torch.float8_e4m3fn, "FP8 E4M3"),
    (torch.float8_e5m2, "FP8 E5M2"),
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
)
# Inputs that are rounded together: one, the KV cache, the operands of the first product, or all.
_INPUTS = (
    ("q", "Q is"), ("k", "K is"), ("v", "V is"), ("kv", "K and V are"), ("qk", "Q and K are"), ("qkv", "Q, K and V are")
)  # fmt: skip
# More than a hypothesis costs: on calls without much cancellation, all roundings look alike.
_ROUNDING_COST = 3.5


def known_effects() -> list[Told]:
    """Return the effects of all hypotheses, and of undeclared roundings."""
    effects = [known_bug(bug) for bug in FAMILY]
    for dtype, name in _FORMATS:
        for what, words in _INPUTS:
            rounded = f"{words} rounded to {name}"
            effects.append(_rounding(f"rounded-{what}-{name}", rounded, partial(inputs_rounded, dtype, what)))
        weights, scores = f"softmax weights are rounded to {name}", f"scores are rounded to {name} before the softmax"
        effects.append(_rounding(f"rounded-p-{name}", weights, partial(weights_rounded, dtype)))
        effects.append(_rounding(f"rounded-s-{name}", scores, partial(scores_rounded, dtype)))
    summed = "the softmax denominator is accumulated in bfloat16"
    return [*effects, _rounding("rounded-sum-bfloat16", summed, denominator_rounded)]


def _rounding(id: str, words: str, change: Change) -> Told:
    return Told(words, _changed, (change,), _ROUNDING_COST, id)
