"""Why both roles' answers to the same prompts ended: how often for each reason, and whether one ends so more often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from assay.harness.judge.answer_lengths import SURE
from assay.harness.stats.share import mcnemar

LIMIT = "length"
"""The reason of an answer that ran to the token limit, of which `assay.harness.judge.answer_lengths` decides."""
_STOP = "stop"


class AnswerEnd(NamedTuple):
    """Why an answer ended.

    Attributes:
        reason: "stop", "length", "abort", "content_filter", ...; empty where it is not known.
        at: the token or the string at which it stopped; empty where the server does not tell.
    """

    reason: str
    at: str = ""


@dataclass(frozen=True)
class ReasonCount:
    """How many answers ended for a reason.

    Attributes:
        reason: in words, such as "stop at 2".
        reference: answers.
        candidate: answers.
        p: exact McNemar p value of "as many ended so", times the number of reasons (Bonferroni).
    """

    reason: str
    reference: int
    candidate: int
    p: float

    @property
    def differs(self) -> bool:
        """True if one role's answers are shown to end so more often, at the level `SURE`."""
        return self.p < SURE

    @property
    def text(self) -> str:
        """The counts in words, the reference first: "abort: 0 against 45 (p = 6e-14)"."""
        said = f" (p = {self.p:.1g})" if self.differs else ""
        return f"{self.reason}: {self.reference:,} against {self.candidate:,}{said}"


def compare_ends(pairs: Sequence[tuple[AnswerEnd, AnswerEnd]]) -> list[ReasonCount]:
    """Count the answers that ended for each reason but the limit, most frequent first.

    What an answer stopped at counts where both servers always tell. An answer that ran to the limit might have stopped in any way:
    prompts with such an answer are left out where ways to stop are counted, and not where others are, as "abort".

    Args:
        pairs: reference's and candidate's end of the answer to each prompt; those with an unknown reason are left out.
    """
    known = [pair for pair in pairs if all(end.reason for end in pair)]
    told = all(end.at for pair in known for end in pair if end.reason == _STOP)
    named = [(_named(ours, told), _named(theirs, told)) for ours, theirs in known]
    reasons = sorted({reason for pair in named for reason in pair} - {LIMIT})
    counts = [
        _count(reason, [pair for pair in named if not (reason.startswith(_STOP) and LIMIT in pair)])
        for reason in reasons
    ]
    used = [count for count in counts if count.reference or count.candidate]
    corrected = [ReasonCount(c.reason, c.reference, c.candidate, min(1.0, len(used) * c.p)) for c in used]
    return sorted(corrected, key=lambda count: -(count.reference + count.candidate))


def _named(end: AnswerEnd, told: bool) -> str:
    return f"{_STOP} at {end.at}" if told and end.reason == _STOP else end.reason


def _count(reason: str, pairs: Sequence[tuple[str, str]]) -> ReasonCount:
    lost = sum(ours == reason != theirs for ours, theirs in pairs)
    gained = sum(theirs == reason != ours for ours, theirs in pairs)
    both = sum(ours == theirs == reason for ours, theirs in pairs)
    return ReasonCount(reason, both + lost, both + gained, mcnemar(lost, gained))
