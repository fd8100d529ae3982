"""Two roles, the same questions: the exact test of equal accuracies.

Only the discordant questions carry information: ``lost`` (the reference is right, the candidate is not) and ``gained``
(the other way round). The test of a run's verdict, which may look at every answer, is in `assay.harness.stats.betting`.
"""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.stats.binomial import at_most, more_than


@dataclass(frozen=True)
class McNemar:
    """Exact p values: ``two_sided`` of "no difference", ``loss`` of "no loss"."""

    two_sided: float
    loss: float


def mcnemar_exact(lost: int, gained: int) -> McNemar:
    """Run McNemar's exact (binomial) test of equal accuracies. Both p values are 1 where no answer flipped."""
    flips = lost + gained
    two_sided = min(1.0, 2 * at_most(min(lost, gained), flips, 0.5))
    return McNemar(two_sided=two_sided, loss=more_than(lost - 1, flips, 0.5))
