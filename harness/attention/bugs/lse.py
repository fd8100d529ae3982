"""Bugs of log-sum-exps. They do not change outputs, so they are not hypotheses about outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, Compute
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import log_sum_exp

_Change = Callable[[AttentionCall], "Tensor | None"]
"""A call -> the log-sum-exps of a kernel with the bug, float64 [total_q, num_q_heads], or None where it cannot show."""


def _of_some(change: _Change, call: AttentionCall, rows: Tensor | None = None) -> Tensor | None:
    changed = change(call)
    return changed if changed is None or rows is None else changed[rows]


def _computing(change: _Change) -> Compute:
    return partial(_of_some, change)


def _largest(call: AttentionCall, at: float = 2.0**16) -> Tensor:
    """Compute the largest score of each query: the log-sum-exp of scores that are far apart, divided by as much."""
    far = call.with_spec(scale=call.scale * at, sinks=())
    return log_sum_exp(far) / at


def _transposed(call: AttentionCall) -> Tensor | None:
    right = log_sum_exp(call)
    return None if 1 in right.shape else right.T.reshape(right.shape)


def _without_scale(call: AttentionCall) -> Tensor | None:
    return None if call.scale == 1.0 else log_sum_exp(call.with_spec(scale=1.0))


def _without_sinks(call: AttentionCall) -> Tensor | None:
    return log_sum_exp(call.with_spec(sinks=())) if call.spec.sinks else None


def _without_maximum(call: AttentionCall) -> Tensor | None:
    # A cap or a temperature changes which scores are far apart; where neither is asked for, the bug shows all the same.
    if call.spec.softcap or call.spec.temperature or call.spec.sinks:
        return None
    return log_sum_exp(call) - _largest(call)


def _maximum_unscaled(call: AttentionCall) -> Tensor | None:
    if call.spec.softcap or call.spec.temperature or call.spec.sinks or call.scale == 1.0:
        return None
    top = _largest(call)
    return log_sum_exp(call) - top + top / call.scale


def _bug(id: str, title: str, about: str, does: str, change: _Change, *reports: str) -> Bug:
    return Bug(id, title, about, does, "log-sum-exp", _computing(change), reports=reports)


BUGS = (
    _bug("lse-base-2", "log-sum-exp in base 2", "the log-sum-exp is a logarithm in base 2 where a natural one is expected",
         "returns log-sum-exps in base 2", lambda call: log_sum_exp(call) / math.log(2), "sgl-project/sglang#40903"),
    _bug("lse-transposed", "log-sum-exp transposed", "the log-sum-exps lie head after head in memory, and not token after token",
         "returns transposed log-sum-exps", _transposed, "vllm-project/vllm#22103"),
    _bug("lse-unscaled", "log-sum-exp of unscaled scores", "the log-sum-exp is that of scores without the softmax scale",
         "returns log-sum-exps of unscaled scores", _without_scale),
    _bug("lse-maximum-unscaled", "log-sum-exp with an unscaled maximum",
         "the maximum that is added to the logarithm of the sum is that of unscaled scores",
         "adds the maximum of unscaled scores to log-sum-exps", _maximum_unscaled),
    _bug("lse-without-maximum", "log-sum-exp without the maximum",
         "the value subtracted from the scores before the exponentials is not added back to the logarithm of their sum",
         "returns log-sum-exps without the maximum", _without_maximum),
    _bug("lse-without-sinks", "log-sum-exp without the sinks", "the log-sum-exp leaves out the sink, which divides the output",
         "leaves sinks out of log-sum-exps", _without_sinks),
)  # fmt: skip
"""Every known bug of log-sum-exps. `Bug.compute` gives float64 [rows, num_q_heads]."""
