"""A score beside what guessing gets: the one thing that a score shows without a second one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from assay.harness.ingest.result import CitedFinding, Excerpt
from assay.harness.verdict import Severity

GUESSING = {"mmlu": 0.25, "gpqa": 0.25, "hellaswag": 0.25, "mmlu_pro": 0.1}
"""Score that guessing gets: four choices (MMLU, arXiv:2009.03300; GPQA, 2311.12022; HellaSwag, 1905.07830), or ten (MMLU-Pro,
2406.01574).
"""
LEVEL = 0.05
"""Level of the test of a score against guessing."""


def _guessed_share(task: str) -> float | None:
    """Return the score that guessing gets on a task, by its name or its longest known beginning (`mmlu_anatomy`), or None."""
    name = task.lower()
    known = [task for task in GUESSING if name == task or name.startswith(f"{task}_")]
    return GUESSING[max(known, key=len)] if known else None


def below_guessing(
    task: str, score: float, count: int, where: str, evidence: Iterable[str], cites: tuple[Excerpt, ...]
) -> CitedFinding | None:
    """Return the finding that a score is below what guessing gets, with its exact one-sided p-value; None if it is not.

    Args:
        task: such as "mmlu" or "mmlu_anatomy".
        score: share of right answers, 0 to 1.
        count: questions; 0 if unknown, and then nothing is tested.
        where: what the score is of, for people.
        evidence: what else is known.
        cites: the lines that state it.
    """
    guess = _guessed_share(task)
    if guess is None or score >= guess:
        return None
    severity: Severity = "warning"
    says = f"{task} {score:g} is below {guess:g}, which guessing gets; the number of questions is not stated."
    test: tuple[str, ...] = ()
    if count:
        right = round(score * count)
        p = at_most(right, count, guess)
        severity = "serious" if p < LEVEL else "info"
        words = "less than guessing explains" if p < LEVEL else "below guessing, within its noise"
        says = f"{task} {score:g} is {words}: {right:,} of {count:,} right, p = {p:.2g}."
        test = (f"{right} of {count} right; guessing gets {guess:g}; exact binomial test, one-sided: p = {p:.2g}",)
    return CitedFinding(
        id="score-below-guessing", title="Score below guessing", severity=severity, where=where, diagnosis=says,
        evidence=(*test, *evidence), reproduce="", cites=cites,
    )  # fmt: skip


def at_most(k: int, n: int, p: float) -> float:
    """Compute the probability of at most `k` of `n` independent events of probability `p` each, strictly between 0 and 1."""
    # Not scipy's: logs are read in the base install.
    logs = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(min(k, n) + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))
