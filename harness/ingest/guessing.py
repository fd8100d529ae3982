"""Compares a score with guessing: the only conclusion that a single score supports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from assay.harness.ingest.result import CitedFinding, Excerpt
from assay.harness.stats.multiple import holm
from assay.harness.verdict import Severity

GUESSING = {"mmlu": 0.25, "gpqa": 0.25, "hellaswag": 0.25, "mmlu_pro": 0.1, "mmlu_prox": 0.1}
"""Expected score of guessing, with four choices (MMLU, arXiv:2009.03300; GPQA, 2311.12022; HellaSwag, 1905.07830) or ten
(MMLU-Pro, 2406.01574; MMLU-ProX, 2503.10497).
"""
LEVEL = 0.05
"""Significance level for testing a file's scores against guessing."""
# Metrics that are a share of right answers; a log's metric is "". `acc_norm` is one too, over the same answers as `acc`.
_READ = "exact_match"
_SHARES = ("", "acc", _READ)


class TaskScore(NamedTuple):
    """A score that a file states.

    Attributes:
        task: such as "mmlu" or "mmlu_anatomy".
        metric: such as "acc,none".
        score: share of right answers, 0 to 1, if the metric is one.
        questions: 0 if unknown; the score is then not tested.
        where: a readable name for the scored thing, if it is not the task.
        cites: the lines that state the score.
        evidence: other facts.
        choices: choices per question; 0 if only the task's name can tell.
        grouped: whether the file also has the score of its group, which covers more questions.
        run: the run within the file.
    """

    task: str
    metric: str
    score: float
    questions: int = 0
    where: str = ""
    cites: tuple[Excerpt, ...] = ()
    evidence: tuple[str, ...] = ()
    choices: int = 0
    grouped: bool = False
    run: str = ""

    @property
    def guess(self) -> float:
        """Expected score of guessing, by the choices, the name, or its longest known prefix (`mmlu_anatomy`); 0 if unknown."""
        name, metric = self.task.lower(), self.metric.partition(",")[0]
        if metric not in _SHARES or self.grouped or not 0 <= self.score <= 1:
            return 0.0
        known = [task for task in GUESSING if name == task or name.startswith(f"{task}_")]
        return 1 / self.choices if self.choices else GUESSING[max(known, key=len)] if known else 0.0

    @property
    def right(self) -> int:
        """Number of right answers."""
        return round(self.score * self.questions)

    @property
    def p(self) -> float:
        """One-sided p-value that the score is below guessing; 1 if it is not below."""
        tested = self.questions and self.score < self.guess
        return at_most(self.right, self.questions, self.guess) if tested else 1.0


def below_guessing(scores: Iterable[TaskScore]) -> list[CitedFinding]:
    """Find a file's scores that are below guessing, with exact one-sided p-values.

    All scores share the level (Holm). Of 2,000 simulated files of a guessing model, with 20 tasks of 100 questions each, 5 % get a
    serious finding; 53 % would if each task had the level to itself. A task's best score counts, since a stricter filter finds
    fewer answers in the same texts. Extracted answers raise at most a warning, because they may all have an unexpected form.
    """
    best: dict[tuple[str, str, str], TaskScore] = {}
    for each in scores:
        of = each.task, each.where, each.run
        if each.guess and (of not in best or each.score > best[of].score):
            best[of] = each
    shared = holm([each.p for each in best.values()])
    return [_finding(each, p) for each, p in zip(best.values(), shared, strict=True) if each.score < each.guess]


def _finding(each: TaskScore, shared: float) -> CitedFinding:
    severity: Severity = "warning"
    says = f"{each.task} {each.score:g} is below guessing ({each.guess:g}); the number of questions is not stated."
    test: tuple[str, ...] = ()
    if n := each.questions:
        right, below, read = each.right, shared < LEVEL, each.metric.startswith(_READ)
        severity = "info" if not below else "warning" if read else "serious"
        words = "less than guessing explains" if below else "below guessing, within its noise"
        unread = ", unless its answers have an unexpected form" if below and read else ""
        says = f"{each.task} {each.score:g} is {words}{unread}: {right:,} of {n:,} right, p = {each.p:.2g}."
        test = (
            f"{right} of {n} right; guessing gets {each.guess:g}; exact binomial test, one-sided: p = {each.p:.2g}",
        )
    return CitedFinding(
        id="score-below-guessing", title="Score below guessing", severity=severity, where=each.where or each.task,
        diagnosis=says, evidence=(*test, *each.evidence), reproduce="", cites=each.cites,
    )  # fmt: skip


def at_most(k: int, n: int, p: float) -> float:
    """Compute the probability of at most `k` of `n` independent events of probability `p` each, strictly between 0 and 1."""
    from scipy.special import bdtr  # takes 0.2 s to import

    return float(bdtr(min(k, n), n, p))
