"""Two greedy generations of one prompt: where they diverge, and whether that is a tie.

Tokens are compared by their text, since OpenAI-compatible servers give no ids. Two tokens with one text (pieces of a
character, for example, all appear as U+FFFD) count as equal; what follows distinguishes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from pydantic import Field

from assay.harness.evidence.records import Token
from assay.harness.schema import Part

_Kind = Literal["tie", "close", "apart"]


class TextDivergence(Part):
    """The place where the candidate's generation diverges from the reference's."""

    kind: _Kind = Field(
        description='"tie": the log-odds of both tokens change by no more than the reference\'s own run-to-run floor; "close": '
        "within the limit of the declared noise, and each role's token is among the other's best alternatives, the criterion of "
        'vLLM\'s check_logprobs_close; else "apart"'
    )
    position: int = Field(
        description="index of the first differing token; if one generation ended earlier, the index after its last token"
    )
    gap: float | None = Field(
        description="log-probability of the reference's token minus that of the candidate's, in the reference, in nats; null "
        "if the candidate's is not among its best alternatives, or if one generation had ended"
    )
    swing: float | None = Field(
        None,
        description="change of the log-odds of the two tokens between the roles, in nats: the reference's preference for its own "
        "token plus the candidate's for its own, or null if one of them is unknown or not finite",
    )


def first_divergence(first: Sequence[Token], second: Sequence[Token]) -> int | None:
    """Return the index of the first token whose text differs, or that only one generation has, or None if all are equal."""
    for position, (token, other) in enumerate(zip_longest(first, second)):
        if token is None or other is None or token.text != other.text:
            return position
    return None


def is_finite(tokens: Sequence[Token]) -> bool:
    """Return True if every token's log-probability is finite."""
    return all(math.isfinite(token.logprob) for token in tokens)


def compare_text(
    reference: Sequence[Token], candidate: Sequence[Token], floor: float, limit: float
) -> TextDivergence | None:
    """Compare the greedy generations of one prompt.

    Args:
        floor: the reference's own run-to-run floor in nats, see `floor_between`.
        limit: largest change of log-odds, in nats, that rounding explains.

    Returns:
        The first divergence, or None if the texts are equal. Later tokens are not compared, since the histories differ. A
        log-probability that is not finite is a divergence too, whatever the texts.
    """
    position = first_divergence(reference, candidate)
    shared = min(len(reference), len(candidate)) if position is None else position + 1
    for place, (token, other) in enumerate(zip(reference[:shared], candidate[:shared], strict=False)):
        if not (math.isfinite(token.logprob) and math.isfinite(other.logprob)):
            return TextDivergence(kind="apart", position=place, gap=None)
    if position is None:
        return None
    gap, swing = _gap_at(position, reference, candidate), _swing_at(position, reference, candidate)
    kind: _Kind = "apart"
    if swing is not None and swing <= limit:
        kind = "close"
    if swing is not None and swing <= floor:
        kind = "tie"
    return TextDivergence(kind=kind, position=position, gap=gap, swing=swing)


def floor_between(first: Sequence[Token], second: Sequence[Token]) -> float:
    """Compute the difference between two runs of one server on one prompt, in nats.

    The largest change of a token's log-probability, or of its log-odds against its best alternative, over the positions with the
    same history and, where the texts diverge, the change of the log-odds there. A token outside the top alternatives cannot be
    measured and does not count, so the floor is too low rather than too high.
    """
    position = first_divergence(first, second)
    shared = min(len(first), len(second)) if position is None else position
    differences = [
        change
        for own, other in zip(first[:shared], second[:shared], strict=True)
        for change in (abs(own.logprob - other.logprob), _odds_change(own, other), _odds_change(other, own))
        if math.isfinite(change)
    ]
    if position is not None and (swing := _swing_at(position, first, second)) is not None:
        differences.append(swing)
    return max(differences, default=0.0)


def _odds_change(mine: Token, other: Token) -> float:
    """Compute how the log-odds of a token change against the best alternative that one run lists, or 0 if the other lacks it."""
    best = next((text for text, _ in mine.top if text != mine.text), None)
    ours, theirs = (dict(reversed(token.top)) for token in (mine, other))
    if best not in theirs:
        return 0.0
    return abs((mine.logprob - ours[best]) - (other.logprob - theirs[best]))


def _swing_at(position: int, first: Sequence[Token], second: Sequence[Token]) -> float | None:
    """See `TextDivergence.swing`: both roles' preferences for their own token, or None unless both are known and finite."""
    gaps = (_gap_at(position, first, second), _gap_at(position, second, first))
    swing = sum(math.inf if gap is None else abs(gap) for gap in gaps)
    return swing if math.isfinite(swing) else None


def _gap_at(position: int, own: Sequence[Token], others: Sequence[Token]) -> float | None:
    """Compute by how much one role prefers its own token to the other's; see `TextDivergence.gap`."""
    if position >= len(own) or position >= len(others):
        return None
    token, other = own[position], others[position]
    alternatives = dict(reversed(token.top))  # of two with the same text, the better one
    return token.logprob - alternatives[other.text] if other.text in alternatives else None
