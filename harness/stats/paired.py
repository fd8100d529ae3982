"""Two roles, the same questions: tests, an interval and sample sizes for the difference of their accuracies.

Only the discordant questions carry information: ``lost`` (the reference is right, the candidate is not) and ``gained``
(the other way round). The *loss* is ``(lost - gained) / n``, the accuracy of the reference minus the candidate's; the
*discordance* is ``(lost + gained) / n``. Shares are of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from assay.harness.stats.binomial import at_most, more_than, normal_quantile
from assay.harness.stats.share import Interval, clopper_pearson, root

_OFFSET = 1e-9
"""Distance from the estimate at which the search for an end of the interval starts: at the estimate the variance may be 0."""


@dataclass(frozen=True)
class McNemar:
    """Exact p values: ``two_sided`` of "no difference", ``loss`` of "no loss"."""

    two_sided: float
    loss: float


def mcnemar_exact(lost: int, gained: int) -> McNemar:
    """McNemar's exact (binomial) test of equal accuracies. Both p values are 1 where no answer flipped."""
    flips = lost + gained
    two_sided = min(1.0, 2 * at_most(min(lost, gained), flips, 0.5))
    return McNemar(two_sided=two_sided, loss=more_than(lost - 1, flips, 0.5))


def tango_interval(lost: int, gained: int, n: int, alpha: float) -> Interval:
    """Two-sided score interval of the loss.

    The interval holds all losses d with ``|lost - gained - n d| <= z sqrt(n (2 q(d) + d (1 - d)))``, where q(d) is the constrained
    maximum-likelihood estimate of the share gained. It keeps its level for few questions and few flips, even none.

    Source: Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design, Statistics in Medicine 17, 891-908 (1998).

    Raises:
        ValueError: counts that are negative, or more flips than questions, or no question.
    """
    if lost < 0 or gained < 0 or lost + gained > n or n < 1:
        raise ValueError(f"{lost} lost and {gained} gained of {n} is not a result")
    # Mirroring makes the interval exactly antisymmetric when the roles are swapped.
    return Interval(-_tango_high(gained, lost, n, alpha), _tango_high(lost, gained, n, alpha), 1 - alpha)


def _tango_high(lost: int, gained: int, n: int, alpha: float) -> float:
    if lost == n:
        return 1.0
    z = -normal_quantile(alpha / 2)

    def beyond(loss: float) -> float:
        return lost - gained - n * loss + z * math.sqrt(n * _variance(loss, lost / n, gained / n))

    return root(beyond, (lost - gained) / n + _OFFSET, 1.0)


def _variance(loss: float, share_lost: float, share_gained: float) -> float:
    """Variance of one question's loss if the true loss is ``loss``, by the constrained estimate of the share gained."""
    b = -share_lost - share_gained + (2 - share_lost + share_gained) * loss
    c = -share_gained * loss * (1 - loss)
    gained = (math.sqrt(max(0.0, b * b - 8 * c)) - b) / 4
    return max(0.0, 2 * gained + loss * (1 - loss))


def smallest_detectable(n: int, discordance: float, alpha: float, power: float = 0.8) -> float | None:
    """The smallest true loss that McNemar's test on ``n`` questions detects with probability ``power``.

    Connor's sample size, ``n = ((z_alpha sqrt(psi) + z_power sqrt(psi - d^2)) / d)^2``, solved for d. The discordance
    psi is at least the loss: where hardly any answer flips by chance, every flip is a loss.

    Source: Connor, Sample size for testing differences in proportions for the paired-sample design, Biometrics 43,
    207-211 (1987).

    Args:
        n: number of questions.
        discordance: share of answers that flip. If it is 0, its upper bound of confidence ``1 - alpha`` is used, since "none of
            n" does not mean "never".
        alpha: level of the one-sided test; half of a two-sided test's.
        power: probability of detection.

    Returns:
        The loss as a share of 1; None where not even the loss of every answer would be significant.
    """
    if n < 1 or 0.5**n >= alpha:
        return None
    psi = discordance or clopper_pearson(0, n, 2 * alpha).high

    def short(loss: float) -> float:
        return _connor(loss, psi, alpha, power) - n

    if short(1.0) > 0:
        return None
    return root(short, 1e-9, 1.0)


def _connor(loss: float, discordance: float, alpha: float, power: float) -> float:
    psi = max(discordance, loss)
    reach = -normal_quantile(alpha) * math.sqrt(psi) + normal_quantile(power) * math.sqrt(max(0.0, psi - loss * loss))
    return float((reach / loss) ** 2)


def questions_needed(margin: float, discordance: float, alpha: float, power: float = 0.8, loss: float = 0.0) -> int:
    """Number of questions that give a verdict with probability ``power``, at this loss and discordance.

    The smaller of two numbers: questions to show non-inferiority (the upper end of Tango's interval below the margin), and
    questions to show the loss (McNemar's test).

    Source: Nam, Establishing equivalence of two treatments and sample size requirements in matched-pairs design,
    Biometrics 53, 1422-1430 (1997), for the first; Connor (1987), see `smallest_detectable`, for the second.

    Args:
        margin: largest loss that still passes.
        discordance: share of answers that flip.
        alpha: one-sided level; half of it for the two-sided interval and test.
        power: probability of a verdict.
        loss: the true loss; a gain counts as 0.
    """
    loss = max(0.0, loss)
    psi = max(discordance, loss)
    needed = []
    if loss < margin:
        z_alpha, z_power = -normal_quantile(alpha), normal_quantile(power)
        null = math.sqrt(_variance(margin, (psi + loss) / 2, (psi - loss) / 2))
        truth = math.sqrt(max(0.0, psi - loss * loss))
        needed.append(((z_alpha * null + z_power * truth) / (margin - loss)) ** 2)
    if loss > 0:
        needed.append(_connor(loss, psi, alpha, power))
    # The bound must be exceeded, not only met.
    return math.floor(min(needed)) + 1
