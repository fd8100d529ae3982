"""Limits, in nats, on how far a declared noise family may move next-token distributions: for ``greedy`` and ``logits``.

Rounding of a relative size e in the attention of a model changes its logits in proportion to e, and a divergence in proportion to
e squared. The size follows from how the family stores Q, K, V and the softmax weights: independent rounding errors add up in
squares. Measured with the model that ships with assay (SageAttention against PyTorch's attention, e = 0.013): a mean KL of 1.6e-5
in float32 on a CPU and 6.3e-5 on an H100, and log-odds that change by at most 0.9 nats over 288 positions. Published for scale
(llama.cpp, an 8B model): 8-bit weights (Q8_0) 2.4e-4, 5-bit weights (Q5_K_M) 4.7e-3, 3-bit weights (Q3_K_M) 5.1e-2.

Other models may need other limits: a policy may set ``logits_limit``, and limits are never below a multiple of the measured floor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from assay.harness.attention.noise import FORMATS, Quantised, family

# As `NumberFormat.relative_error`, for the arithmetic of both products; sums kept in fp16 round at each addition.
_ARITHMETIC_ERROR = {"fp32": 0.0, "tf32": 2**-12, "fp16": 2**-10}
EXACT_KL = 2.4e-4
"""Largest mean KL, in nats, of a kernel that declares nothing: the cost of 8-bit weights in an 8B model. It includes the bf16
rounding in the rest of the model, which follows the attention's."""
# Nats of mean KL for each unit of e squared: ten times what an H100 showed (6.3e-5 at e = 0.013).
_KL_PER_SQUARE = 4.0
# The end of a name that `measured_noise` makes.
_MEASURED = re.compile(r"\(measured: (\S+) nats\)$")
EXACT_SWING = 0.5
"""Largest change of the log-odds of two tokens, in nats, of a kernel that declares nothing: four steps of a bf16 logit between 16
and 32, since both logits may move by one step in both roles."""
# Nats of log-odds for each unit of e: twice the measured value for int8 (0.9 at e = 0.013).
_SWING_PER_UNIT = 140.0
MAX_SWING = 8.0
"""No noise family excuses a larger change of log-odds: a factor of 3,000."""


def measured_noise(declared: str, kl: float) -> str:
    """Name a rounding by what it declares and by its mean KL in nats, as measured: the limits allow four times as much."""
    return f"{declared} (measured: {kl:.3g} nats)"


def _relative_error(noise: str) -> float:
    """Compute the relative size e of a noise family's rounding errors, or of a measured rounding."""
    if measured := _MEASURED.search(noise):
        return math.sqrt(4 * float(measured[1]) / _KL_PER_SQUARE)
    declared = family(noise)
    stored = [factor for factor in (declared.q, declared.k, declared.v, declared.p) if isinstance(factor, Quantised)]
    return math.hypot(
        *(FORMATS[factor.format].relative_error for factor in stored), _ARITHMETIC_ERROR[declared.accumulation]
    )


def kl_limit(noise: Iterable[str]) -> float:
    """Compute the largest mean KL, in nats, that the declared noise of both roles explains: their errors add up in squares."""
    return EXACT_KL + _KL_PER_SQUARE * sum(_relative_error(name) ** 2 for name in noise)


def swing_limit(noise: Iterable[str]) -> float:
    """Compute the largest change of the log-odds of two tokens, in nats, that the declared noise of both roles explains."""
    return min(EXACT_SWING + _SWING_PER_UNIT * math.hypot(*map(_relative_error, noise)), MAX_SWING)


def change_limit(kl: float) -> float:
    """Compute the largest mean change of a token's log-likelihood, in nats, under a limit of the mean KL.

    For a small change d of log-probabilities, KL is half of the mean of d squared, so the mean of d is at most the root of twice
    the KL (Cauchy and Schwarz).
    """
    return math.sqrt(2 * kl)
