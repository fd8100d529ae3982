"""Numbers that follow from the constants of a call, by which bugs multiply scores or outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Numbers
from assay.harness.readout.queries import Queries


@dataclass(frozen=True)
class Formula:
    """A number that follows from the constants of a call.

    Attributes:
        words: the number in words.
        of: (queries) -> the number for each query and head, float64 [rows * heads].
        bug: the bug that this number gives away, in words; empty if there is none in particular.
    """

    words: str
    of: Callable[[Queries], Numbers] = field(compare=False)
    bug: str = ""


def constant_formula(value: float) -> Formula:
    """A plain number."""
    return Formula(f"{value:.5g}", partial(_same, value))


def _same(value: float, queries: Queries) -> Numbers:
    return np.full(len(queries.table["row"]), value)


def _power_of_scale(power: float, queries: Queries) -> Numbers:
    return _same(queries.call.scale**power, queries)


def _power_of_feature(name: str, power: float, queries: Queries) -> Numbers:
    return queries.table[name].astype(float) ** power


def _inverse(of: Callable[[Queries], Numbers], queries: Queries) -> Numbers:
    return 1 / of(queries)


def _padded_dim_scale(multiple: int, queries: Queries) -> Numbers:
    dim = queries.call.q.shape[2]
    padded = -(-dim // multiple) * multiple if multiple else 1 << (dim - 1).bit_length()
    return _same((dim / padded) ** 0.5, queries)


def _value_dim_scale(queries: Queries) -> Numbers:
    return _same((queries.call.q.shape[2] / queries.call.v.shape[2]) ** 0.5, queries)


def _tile_sizes(x: Numbers, starts: Sequence[int], tile: int) -> Numbers:
    """The largest size of a number in each row's tile of its sequence, [rows, heads], of x [rows, heads, dims]; 0: all of it."""
    size: Numbers = np.abs(x).max(-1)
    sizes: Numbers = np.empty_like(size)
    for start, stop in pairwise(starts):
        tiles = np.arange(0, stop - start, tile or stop - start)
        if len(tiles):
            largest = np.maximum.reduceat(size[start:stop], tiles, axis=0)
            sizes[start:stop] = largest[np.arange(stop - start) // (tile or stop - start)]
    return sizes


def _largest_q(tile: int, other: str, queries: Queries) -> Numbers:
    """The scale of Q of another q head over that of the own one, by tile of queries."""
    call = queries.call
    q = call.q.double().cpu().numpy()
    sizes = np.maximum(_tile_sizes(q, call.cu_seqlens_q.tolist(), tile), 1e-30)[queries.rows]
    heads, group = np.arange(queries.heads), call.heads.group
    if other == "group":
        used = np.repeat(sizes.reshape(len(sizes), -1, group).max(-1), group, 1)
    else:
        to = {
            "first": heads // group * group,
            "next": (heads + 1) % queries.heads,
            "previous": heads - 1,
            "zero": 0 * heads,
        }
        used = sizes[:, to[other]]
    return np.asarray(used / sizes).ravel()


def _largest(of: str, other: str, queries: Queries) -> Numbers:
    """The scale of K or V of another kv head or sequence over that of the own kv head of this sequence."""
    kv, seq = queries.table["kv"], queries.table["seq"]
    x = queries.k if of == "k" else queries.values
    if other in ("next", "previous", "zero"):
        size: Numbers = np.abs(x).max((0, 2))
        to = {"next": (kv + 1) % queries.kv_heads, "previous": kv - 1, "zero": 0 * kv}[other]
        used, own = size[to], size[kv]
    else:
        sizes = np.array([np.abs(x[keys]).max((0, 2)) for _, keys in sequences(queries.call)])
        there = 0 * seq if other == "first sequence" else np.maximum(seq - 1, 0)
        used, own = sizes[there, kv], sizes[seq, kv]
    return np.asarray(used / np.maximum(own, 1e-30))


def _k_for_v(by_sequence: bool, queries: Queries) -> Numbers:
    """The scale of K over that of V, of the own kv head."""
    kv, seq = queries.table["kv"], queries.table["seq"]
    spans = [k for _, k in sequences(queries.call)] if by_sequence else [slice(None)]
    of_k, of_v = (np.array([np.abs(x[k]).max((0, 2)) for k in spans]) for x in (queries.k, queries.values))
    return np.asarray((of_k / np.maximum(of_v, 1e-30))[seq if by_sequence else 0 * seq, kv])


_Q_HEADS = {
    "first": "the first q head of its group", "next": "the next q head", "previous": "the previous q head",
    "zero": "q head 0", "group": "all q heads of its group",
}  # fmt: skip
_WHOSE = {
    "next": "the next kv head", "previous": "the previous kv head", "zero": "kv head 0",
    "sequence": "the previous sequence", "first sequence": "the first sequence",
}  # fmt: skip
QUANTISED: tuple[Formula, ...] = (
    *(Formula(f"max |q| of {words} / its own, {f'by tiles of {tile} queries' if tile else 'of the sequence'}",
              partial(_largest_q, tile, other), "Q is dequantised with that scale")
      for tile in (1, 16, 32, 64, 128, 0) for other, words in _Q_HEADS.items()),
    *(Formula(f"max |k| of {words} / its own", partial(_largest, "k", other), "K is dequantised with that scale")
      for other, words in _WHOSE.items()),
    *(Formula(f"its own max |k| / that of {words}", partial(_inverse, partial(_largest, "k", other)),
              "K is quantised with that scale")
      for other, words in _WHOSE.items()),
)  # fmt: skip
"""Factors of scores of a quantisation whose scale is not the one that was quantised with: the largest size in a tile."""
SCALES: tuple[Formula, ...] = (
    Formula("1 / scale", partial(_power_of_scale, -1), "the softmax scale is missing"),
    Formula("the softmax scale", partial(_power_of_scale, 1), "it is applied twice"),
    Formula("1 / scale^2", partial(_power_of_scale, -2), "they are divided by the softmax scale"),
    Formula("ln 2", partial(_same, math.log(2)), "exp2 without log2(e) in the scale"),
    Formula("log2(e)", partial(_same, 1 / math.log(2)), "log2(e) in the scale, but exp in place of exp2"),
    Formula("1 / sqrt(q heads)", partial(_power_of_feature, "heads", -0.5), "the scale is that of the dims of all q heads"),
    Formula("1 / sqrt(kv heads)", partial(_power_of_feature, "kv_heads", -0.5), "the scale is that of the dims of all kv heads"),
    Formula("sqrt(q heads per kv head)", partial(_power_of_feature, "group", 0.5)),
    Formula("sqrt(head_dim / head_dim of V)", _value_dim_scale, "the scale is that of V's head_dim"),
    *(Formula(f"sqrt(head_dim / head_dim rounded up to {n})", partial(_padded_dim_scale, n),
              "the scale is that of the padded dims")
      for n in (64, 128)),
    Formula("sqrt(head_dim / head_dim rounded up to a power of two)", partial(_padded_dim_scale, 0),
            "the scale is that of the padded dims"),
    Formula("1 / sqrt(2)", partial(_same, 0.5**0.5)),
    Formula("sqrt(2)", partial(_same, 2**0.5)),
)  # fmt: skip
"""Numbers by which bugs multiply scores: a scale that is missing, doubled or inverted; the base of the exponential, in kernels that
use exp2; head_dim taken from the wrong tensor or dimension. A power of the scale covers each head_dim. Other numbers are fitted."""
_UNNORMALISED, _TWICE = "it is not divided by the softmax denominator", "it is divided by the softmax denominator twice"
_OF_LSE: dict[str, tuple[Callable[[Numbers, Numbers], Numbers], str]] = {
    "exp(lse - m), lse the log-sum-exp, m the maximum": (lambda lse, top: np.exp(lse - top), _UNNORMALISED),
    "exp(m - lse), lse the log-sum-exp, m the maximum": (lambda lse, top: np.exp(top - lse), _TWICE),
    "exp(lse), lse the log-sum-exp": (lambda lse, _: np.exp(lse), "exp(score) is not divided by its sum"),
    "exp(-lse), lse the log-sum-exp": (lambda lse, _: np.exp(-lse), "it is divided by the sum of exp(score) twice"),
    "exp(m), m the maximum": (lambda _, top: np.exp(top), "the maximum is subtracted in the denominator only"),
    "exp(-m), m the maximum": (lambda _, top: np.exp(-top), "the maximum is subtracted in the numerator only"),
    "1 / (1 + exp(lse)), lse the log-sum-exp": (lambda lse, _: 1 / (1 + np.exp(lse)), "the sign of lse is the wrong one"),
    "lse, the log-sum-exp": (lambda lse, _: lse, ""),
}  # fmt: skip
"""Functions of a query's log-sum-exp and maximum. With 1 / (1 + exp(-lse)), a key with a score of 0 counts in the denominator."""


def _of_lse(words: str, queries: Queries) -> Numbers:
    """A function of the log-sum-exp and the maximum of each query's scores; by its words, which can be sent to another process."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(_OF_LSE[words][0](queries.lse, queries.maximum)).ravel()


TIMES: tuple[Formula, ...] = (
    *(Formula(f"max |v| of {words} / its own", partial(_largest, "v", other), "V is dequantised with that scale")
      for other, words in _WHOSE.items()),
    Formula("max |k| / max |v| of its kv head", partial(_k_for_v, False), "V is dequantised with the scale of K"),
    Formula("max |k| / max |v| of its sequence and kv head", partial(_k_for_v, True), "V is dequantised with the scale of K"),
    *(Formula(words, partial(_of_lse, words), bug) for words, (_, bug) in _OF_LSE.items()),
    Formula("the number of q heads per kv head", partial(_power_of_feature, "group", 1)),
    Formula("1 / the number of q heads per kv head", partial(_power_of_feature, "group", -1)),
)  # fmt: skip
"""Numbers by which bugs multiply outputs: the scale of V of another kv head, a sum or a mean over a group of q heads where the
other was meant, and functions of a query's log-sum-exp and maximum. Other numbers are fitted."""
DESCALES: tuple[tuple[Formula, Formula], ...] = tuple(
    (
        Formula(f"max |k| of {words} / its own", partial(_largest, "k", other), "K is dequantised with that scale"),
        Formula(f"max |v| of {words} / its own", partial(_largest, "v", other), "and so is V"),
    )
    for other, words in _WHOSE.items()
)
"""Factors of scores and of outputs where K and V get the scales of the same other head, sequence or call."""
