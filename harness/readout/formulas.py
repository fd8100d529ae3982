"""Numbers that follow from the constants of a call, by which bugs multiply scores or outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.readout.queries import Queries
from assay.harness.readout.reading import Numbers


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
    found: Numbers = queries.table[name].astype(float) ** power
    return found


def _value_dim_scale(queries: Queries) -> Numbers:
    return _same((queries.call.q.shape[2] / queries.call.v.shape[2]) ** 0.5, queries)


def _largest_values(by: int, queries: Queries) -> Numbers:
    """Largest size of a value of the kv head that is `by` further, as a multiple of that of the own one."""
    largest = np.abs(queries.values).max((0, 2))
    ratio = np.roll(largest, -by) / np.maximum(largest, 1e-30)
    found: Numbers = ratio[queries.table["kv"]]
    return found


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
    Formula("1 / sqrt(2)", partial(_same, 0.5**0.5)),
    Formula("sqrt(2)", partial(_same, 2**0.5)),
)  # fmt: skip
"""Numbers by which bugs multiply scores: a scale that is missing, doubled or inverted; the base of the exponential, in kernels that
use exp2; head_dim taken from the wrong tensor or dimension. A power of the scale covers each head_dim. Other numbers are fitted."""

TIMES: tuple[Formula, ...] = (
    Formula("max |V| of the next kv head / max |V| of its own", partial(_largest_values, 1),
            "V is dequantised with the scale of the next kv head"),
    Formula("max |V| of the previous kv head / max |V| of its own", partial(_largest_values, -1),
            "V is dequantised with the scale of the previous kv head"),
    Formula("the number of q heads per kv head", partial(_power_of_feature, "group", 1)),
    Formula("1 / the number of q heads per kv head", partial(_power_of_feature, "group", -1)),
)  # fmt: skip
"""Numbers by which bugs multiply outputs: the scale of V of another kv head, and a sum or a mean over a group of q heads where the
other was meant. Other numbers are fitted."""
