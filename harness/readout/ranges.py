"""Where a kernel's range ends: one value, or one score, is doubled until the answer is not what it should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.readout.effects import Limited
from assay.harness.readout.probing import Asked, Plan


@dataclass(frozen=True)
class Answer:
    """What became of a value or a score: "right", "clamped", "capped", "infinite", "NaN", "raised", "else"; and its limit."""

    how: str
    limit: float = 0.0


_STEPS = 30
"""Bisections of a limit, which is then known to a relative 1e-3 or better."""


def limits(ask: Asked, plan: Plan) -> list[Limited]:
    """The limits of a kernel's values and scores.

    Args:
        ask: the kernel.
        plan: head counts, head_dim and dtype of the calls.
    """
    top = float(torch.finfo(plan.dtype).max)
    found = []
    for what, of, largest in (
        ("values", _value_answer, min(top, 2.0**20)), ("scores", _score_answer, min(top, 2.0**18))
    ):  # fmt: skip
        limit = _limit(lambda x, of=of: of(ask, plan, x), largest)
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
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if high - low < 5e-4 * low:
            break
        low, high = (middle, high) if answer(middle).how == "right" else (low, middle)
    found = answer(high)
    if found.how == "capped":
        later = answer(2 * high)
        return (_rounded(found.limit), "capped") if math.isclose(found.limit, later.limit, rel_tol=0.02) else None
    if found.how not in ("clamped", "infinite", "NaN"):
        return None
    return _rounded(found.limit if found.how == "clamped" else low), found.how


def _rounded(limit: float) -> float:
    """The largest number of a narrow format, if it is near."""
    for known in (448.0, 57344.0, 65504.0, 240.0, 127.0):
        if math.isclose(limit, known, rel_tol=2e-3):
            return known
    return float(f"{limit:.3g}")


def _undefined(out: Tensor | None) -> Answer | None:
    if out is None:
        return Answer("raised")
    if bool(out.isnan().any()):
        return Answer("NaN")
    return Answer("infinite") if bool(out.isinf().any()) else None


def _value_answer(ask: Asked, plan: Plan, x: float) -> Answer:
    call = replace(plan, lens=((1, 0),)).make()
    out = ask(replace(call, v=torch.full_like(call.v, x)))
    if out is None or (undefined := _undefined(out)):
        return Answer("raised") if out is None else undefined
    if bool((out / x - 1).abs().max() < 1e-2):
        return Answer("right")
    return Answer("clamped" if bool((out < x).all()) else "else", float(out.max()))


def _score_answer(ask: Asked, plan: Plan, x: float) -> Answer:
    """Two keys whose products with q are x and a little less: their weights say whether the difference arrives."""
    call = _two_keys(replace(plan, lens=((1, 1),)).make(), x)
    out = ask(call)
    if out is None or (undefined := _undefined(out)):
        return Answer("raised") if out is None else undefined
    first = min(max(float(out[0, :, 0].mean()), 1e-6), 1 - 1e-6)  # V says which key it is
    q, k = call.q.double(), call.k.double()
    score = call.scale * float(q[0, 0] @ k[0, 0])
    gap = score - call.scale * float(q[0, 0] @ k[1, 0])
    arrived = math.log(first / (1 - first))
    if abs(arrived - gap) < 0.1:
        return Answer("right")
    if abs(arrived) < 0.1 or score - gap + arrived > 20 * gap:
        # Clamped scores are equal beyond the limit, and differ by less than they should just below it.
        return Answer("clamped", (score - gap + arrived) / call.scale)
    low, high = 1e-2, 1e4
    for _ in range(60):
        cap = math.sqrt(low * high)
        less = cap * (math.tanh(score / cap) - math.tanh((score - gap) / cap)) < arrived
        low, high = (cap, high) if less else (low, cap)
    return Answer("capped", low)


def _two_keys(call: AttentionCall, x: float) -> AttentionCall:
    q, k, v = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    size = math.sqrt(x)
    q[..., 0], q[..., 1] = size, 1.0
    k[..., 0] = size
    k[1, :, 1] = -2 / call.scale  # the second key scores 2 less
    v[0, :, 0], v[1, :, 1] = 1.0, 1.0
    return replace(call, q=q, k=k, v=v)
