"""Numbers derived from the constants of a call, by which bugs multiply scores or outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Numbers
from assay.harness.readout.queries import Queries


@dataclass(frozen=True)
class Formula:
    """A number derived from the constants of a call.

    Attributes:
        words: the formula as text.
        of: (queries) -> the number for each query and head, float64 [rows * heads].
        bug: a description of the bug that this number implies, or an empty string.
    """

    words: str
    of: Callable[[Queries], Numbers] = field(compare=False)
    bug: str = ""


def constant_formula(value: float) -> Formula:
    """Return the formula of a plain number."""
    return Formula(f"{value:.5g}", partial(_same, value))


def _same(value: float, queries: Queries) -> Numbers:
    return np.full(len(queries.table["row"]), value)


def _power_of_scale(power: float, queries: Queries) -> Numbers:
    return _same(queries.call.scale**power, queries)


def _power_of_feature(name: str, power: float, queries: Queries) -> Numbers:
    return queries.table[name].astype(float) ** power


def _largest(of: str, other: str, queries: Queries) -> Numbers:
    """Return the ratio of another kv head's or sequence's scale of K or V to the correct one."""
    kv, seq = queries.table["kv"], queries.table["seq"]
    x = queries.k if of == "k" else queries.values
    if other in ("next", "previous", "zero"):
        size: Numbers = np.abs(x).max((0, 2), initial=0.0)
        to = {"next": (kv + 1) % queries.kv_heads, "previous": kv - 1, "zero": 0 * kv}[other]
        used, own = size[to], size[kv]
    else:
        sizes = np.array(
            [np.abs(x[keys]).max((0, 2), initial=0.0) for _, keys in sequences(queries.call)]
        )  # some have no keys
        there = 0 * seq if other == "first sequence" else np.maximum(seq - 1, 0)
        used, own = sizes[there, kv], sizes[seq, kv]
    return np.asarray(used / np.maximum(own, 1e-30))


def _k_for_v(queries: Queries) -> Numbers:
    """Return the ratio of K's scale to V's scale in the own kv head."""
    of_k, of_v = (np.abs(x).max((0, 2), initial=0.0) for x in (queries.k, queries.values))
    return np.asarray((of_k / np.maximum(of_v, 1e-30))[queries.table["kv"]])


_WHOSE = {
    "next": "the next kv head", "previous": "the previous kv head", "zero": "kv head 0",
    "sequence": "the previous sequence", "first sequence": "the first sequence",
}  # fmt: skip
SCALES: tuple[Formula, ...] = (
    Formula("1 / scale", partial(_power_of_scale, -1), "the softmax scale is missing"),
    Formula("the softmax scale", partial(_power_of_scale, 1), "it is applied twice"),
    Formula("1 / scale^2", partial(_power_of_scale, -2), "they are divided by the softmax scale"),
    Formula("ln 2", partial(_same, math.log(2)), "exp2 without log2(e) in the scale"),
    Formula("log2(e)", partial(_same, 1 / math.log(2)), "log2(e) in the scale, but exp in place of exp2"),
    Formula("1 / sqrt(q heads)", partial(_power_of_feature, "heads", -0.5), "the scale uses the dims of all q heads"),
    Formula("1 / sqrt(kv heads)", partial(_power_of_feature, "kv_heads", -0.5), "the scale uses the dims of all kv heads"),
    Formula("sqrt(q heads per kv head)", partial(_power_of_feature, "group", 0.5)),
    Formula("1 / sqrt(2)", partial(_same, 0.5**0.5)),
    Formula("sqrt(2)", partial(_same, 2**0.5)),
)  # fmt: skip
"""Factors that bugs apply to scores: a missing, doubled or inverted scale; the base of the exponential, in kernels that use exp2;
the dims of all heads. A power of the scale covers each head_dim. Other numbers are fitted."""
TIMES = (Formula("max |k| / max |v| of its kv head", _k_for_v, "V is dequantised with the scale of K"),)
"""Factors that bugs apply to outputs."""
DESCALES: tuple[tuple[Formula, Formula], ...] = tuple(
    (
        Formula(f"max |k| of {words} / its own", partial(_largest, "k", other), "K is dequantised with that scale"),
        Formula(f"max |v| of {words} / its own", partial(_largest, "v", other), "and so is V"),
    )
    for other, words in _WHOSE.items()
)
"""Factors of scores and of outputs if K and V get the scales of the same other head, sequence or call."""
