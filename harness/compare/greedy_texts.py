"""Two greedy generations of one prompt: where they diverge, and whether that is a tie.

Tokens are compared by their text, since OpenAI-compatible servers give no ids. Two tokens with one text (pieces of a
character, for example, all appear as U+FFFD) count as equal; what follows distinguishes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from pydantic import Field

from assay.harness.evidence.records import Token
from assay.harness.schema import Part

Kind = Literal["tie", "close", "apart"]


class TextDivergence(Part):
    """Where the candidate's generation diverges from the reference's."""

    kind: Kind = Field(
        description='"tie": the reference\'s preference there is within its own run-to-run floor; "close": each role\'s token is '
        "among the other's best alternatives, the criterion of vLLM's check_logprobs_close; else \"apart\""
    )
    position: int = Field(
        description="index of the first differing token; if one generation ended earlier, the index after its last token"
    )
    gap: float | None = Field(
        description="log-probability of the reference's token minus that of the candidate's, in the reference, in nats; null "
        "where the candidate's is not among its best alternatives, or where one generation had ended"
    )


def first_divergence(first: Sequence[Token], second: Sequence[Token]) -> int | None:
    """Index of the first token whose text differs, or that only one generation has; None if all are equal."""
    for position, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None or one.text != other.text:
            return position
    return None


def compare_text(reference: Sequence[Token], candidate: Sequence[Token], floor: float) -> TextDivergence | None:
    """Compare the greedy generations of one prompt.

    Args:
        reference: the reference's tokens, with their top alternatives.
        candidate: the candidate's.
        floor: the reference's own run-to-run floor in nats, see `floor_between`.

    Returns:
        The first divergence, or None where the texts are equal. What follows is not compared, since the
        histories differ.
    """
    position = first_divergence(reference, candidate)
    if position is None:
        return None
    gap = _gap_at(position, reference, candidate)
    if gap is not None and abs(gap) <= floor:
        return TextDivergence(kind="tie", position=position, gap=gap)
    close = gap is not None and _gap_at(position, candidate, reference) is not None
    return TextDivergence(kind="close" if close else "apart", position=position, gap=gap)


def floor_between(first: Sequence[Token], second: Sequence[Token]) -> float:
    """The difference between two runs of one server on one prompt, in nats.

    The largest difference of a token's log-probability over the positions with the same history and, where the texts diverge, the
    larger of the two runs' preferences for their own token there. A preference outside the top alternatives cannot be measured and
    does not count, so the floor is too low rather than too high.

    Returns:
        0.0 where nothing differs.
    """
    position = first_divergence(first, second)
    shared = min(len(first), len(second)) if position is None else position
    differences = [
        abs(one.logprob - other.logprob)
        for one, other in zip(first[:shared], second[:shared], strict=True)
        if one.logprob != other.logprob
    ]
    if position is not None:
        gaps = (_gap_at(position, first, second), _gap_at(position, second, first))
        differences += [abs(gap) for gap in gaps if gap is not None]
    return max(differences, default=0.0)


def _gap_at(position: int, own: Sequence[Token], others: Sequence[Token]) -> float | None:
    """By how much one role prefers its own token to the other's; see `TextDivergence.gap`."""
    if position >= len(own) or position >= len(others):
        return None
    token, other = own[position], others[position]
    alternatives = dict(reversed(token.top))  # of two with the same text, the better one
    return token.logprob - alternatives[other.text] if other.text in alternatives else None
