"""Where a kernel's range ends: one value, or one score, is doubled until the answer is not what it should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from assay.harness.attention.bugs import E4M3_MAX, FP16_MAX
from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Asked
from assay.harness.readout.effects import Limited
from assay.harness.readout.probing import Plan

_EXACT = 5e-4
"""Relative width to which a limit is bisected: limits are given with three digits."""
_NEAR = 2e-3
"""Relative distance up to which a limit is the largest number of a format: what bisection and the kernel's own rounding leave."""
_LARGEST: dict[str, float] = {"values": 2.0**20, "scores": 2.0**18}
"""Sizes beyond which no limit is sought: 16 times what fp16 holds; and as far as float32 products surely tell two scores apart that
differ by 2 after scaling: they are rounded to 0.03 at 2**18."""
_VALUE_OFF = 1e-2
"""Relative error of a value that arrives: bfloat16 rounds by 4e-3."""
_GAP = 2.0
"""Difference of the two scores that are tried: both keys then have a weight that can be read (0.88 and 0.12)."""
_GAP_OFF = 0.1
"""Error of that difference when it arrives: what a bfloat16 output leaves of it, and a product of 2**18 in float32."""
_SURE = 1e-6
"""Least weight of either key, so that its log is finite."""
_CAPS = (1e-2, 1e4)
"""Soft caps that are sought."""
_CAP_STEPS = 60
"""Bisections of a cap, beyond what a float64 holds."""
_SAME_CAP = 0.02
"""Relative difference of the caps that two scores are bent by, if it is one cap."""


@dataclass(frozen=True)
class Answer:
    """What became of a value or a score.

    Attributes:
        how: "clamped": it became the limit; "capped": it became limit * tanh(score / limit), after the softmax scale; "infinite"
            and "NaN": so did the output; "raised": there was none.
        limit: the limit, of a value or of a score before the softmax scale; of a cap, after it.
        top: what the larger of two scores became, if the other one is right; before the softmax scale.
    """

    how: Literal["right", "clamped", "capped", "infinite", "NaN", "raised", "else"]
    limit: float = 0.0
    top: float = 0.0


def limits(ask: Asked, plan: Plan) -> list[Limited]:
    """The limits of a kernel's values and scores; none where they are wrong at any size.

    Args:
        ask: the kernel.
        plan: head counts, head_dim and dtype of the calls.
    """
    top = float(torch.finfo(plan.dtype).max)
    found = []
    for what, of in (("values", _value_answer), ("scores", _score_answer)):
        limit = _limit(partial(of, ask, plan), min(top, _LARGEST[what]))
        if limit is not None:
            found.append(Limited(what, *limit))
    return found


def _limit(answer: Callable[[float], Answer], largest: float) -> tuple[float, str] | None:
    """The limit from which on an answer is not right, and what it is then."""
    low, high = 1.0, 2.0
    if answer(low).how != "right":
        return None  # wrong whatever the size
    while high <= largest and answer(high).how == "right":
        low, high = high, 2 * high
    if high > largest:
        return None
    while high - low >= _EXACT * low:
        middle = (low + high) / 2
        low, high = (middle, high) if answer(middle).how == "right" else (low, middle)
    found = answer(high)
    if found.how == "capped":
        later, soon = answer(2 * high), answer(1.25 * high)
        if math.isclose(found.limit, later.limit, rel_tol=_SAME_CAP):
            return _rounded(found.limit), "capped"
        # A soft cap goes on growing; a small clamp is where it was, and looks like another soft cap at each score.
        return (_rounded(soon.top), "clamped") if math.isclose(found.top, soon.top, rel_tol=_SAME_CAP) else None
    if found.how not in ("clamped", "infinite", "NaN"):
        return None
    return _rounded(found.limit if found.how == "clamped" else low), found.how


def _rounded(limit: float) -> float:
    """The largest number of a narrow format (fp8 e4m3fn and e5m2, fp16), if it is near; else with three digits."""
    for known in (E4M3_MAX, 57344.0, FP16_MAX):
        if math.isclose(limit, known, rel_tol=_NEAR):
            return known
    return float(f"{limit:.3g}")


def _defined(out: Tensor | None) -> Tensor | Answer:
    """The output, if there is one and it is finite."""
    if out is None:
        return Answer("raised")
    if bool(out.isnan().any()):
        return Answer("NaN")
    return Answer("infinite") if bool(out.isinf().any()) else out


def _value_answer(ask: Asked, plan: Plan, x: float) -> Answer:
    """One key, all of whose values are x: the output should be x."""
    call = replace(plan, lens=((1, 0),)).make()
    out = _defined(ask(replace(call, v=torch.full_like(call.v, x))))
    if isinstance(out, Answer):
        return out
    if bool((out / x - 1).abs().max() < _VALUE_OFF):
        return Answer("right")
    return Answer("clamped" if bool((out < x).all()) else "else", float(out.max()))


def _score_answer(ask: Asked, plan: Plan, x: float) -> Answer:
    """Two keys whose products with q are x and a little less: their weights say whether the difference arrives."""
    call = _two_keys(replace(plan, lens=((1, 1),)).make(), x)
    out = _defined(ask(call))
    if isinstance(out, Answer):
        return out
    first = min(max(float(out[0, :, 0].mean()), _SURE), 1 - _SURE)  # V says which key it is
    q, k = call.q.double(), call.k.double()
    score = call.scale * float(q[0, 0] @ k[0, 0])
    gap = score - call.scale * float(q[0, 0] @ k[1, 0])
    arrived = math.log(first / (1 - first))
    if abs(arrived - gap) < _GAP_OFF:
        return Answer("right")
    if abs(arrived) < _GAP_OFF or score - gap + arrived > 20 * gap:
        # Clamped scores are equal beyond the limit, and differ by less than they should just below it.
        return Answer("clamped", (score - gap + arrived) / call.scale)
    return Answer("capped", _cap(score, gap, arrived), (score - gap + arrived) / call.scale)


def _cap(score: float, gap: float, arrived: float) -> float:
    """The soft cap that makes a smaller difference of two scores, by bisection: with a larger cap, more of it arrives."""
    low, high = _CAPS
    for _ in range(_CAP_STEPS):
        cap = math.sqrt(low * high)
        less = cap * (math.tanh(score / cap) - math.tanh((score - gap) / cap)) < arrived
        low, high = (cap, high) if less else (low, cap)
    return low


def _two_keys(call: AttentionCall, x: float) -> AttentionCall:
    q, k, v = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    size = math.sqrt(x)
    q[..., 0], q[..., 1] = size, 1.0
    k[..., 0] = size
    k[1, :, 1] = -_GAP / call.scale
    v[0, :, 0], v[1, :, 1] = 1.0, 1.0
    return replace(call, q=q, k=k, v=v)
