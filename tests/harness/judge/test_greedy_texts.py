from __future__ import annotations

import math

import pytest

from assay.harness.evidence.records import Token
from assay.harness.judge.greedy_texts import compare_text, first_divergence, floor_between, is_finite

LIMIT = 0.9
"""Change of log-odds, in nats, that these tests let noise explain."""


def token(text: str, logprob: float = -0.1, **top: float) -> Token:
    ranked = sorted({text: logprob, **top}.items(), key=lambda entry: -entry[1])
    return Token(text=text, logprob=logprob, top=tuple(ranked))


def tokens(text: str) -> tuple[Token, ...]:
    return tuple(token(character) for character in text)


def test_equal_texts_do_not_diverge() -> None:
    assert compare_text(tokens("abc"), tokens("abc"), 0.0, LIMIT) is None
    assert compare_text((), (), 0.0, LIMIT) is None


@pytest.mark.parametrize(
    ("first", "second", "position"),
    [("abc", "abd", 2), ("abc", "xbc", 0), ("abc", "ab", 2), ("ab", "abc", 2), ("", "a", 0), ("abc", "abc", None)],
)
def test_the_first_divergence_is_found(first: str, second: str, position: int | None) -> None:
    assert first_divergence(tokens(first), tokens(second)) == position


def diverging(gap: float, candidate_top: bool = True) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
    reference = (*tokens("ab"), token("x", -0.5, y=-0.5 - gap))
    own = token("y", -0.4, x=-0.6) if candidate_top else token("y", -0.4, z=-0.6)
    return reference, (*tokens("ab"), own, token("q"))


def test_a_swing_within_the_floor_is_a_tie() -> None:
    divergence = compare_text(*diverging(0.02), 0.23, LIMIT)
    assert divergence is not None
    assert (divergence.position, divergence.kind) == (2, "tie")
    assert (divergence.gap, divergence.swing) == (pytest.approx(0.02), pytest.approx(0.22))


def test_a_swing_within_the_limit_is_close_if_each_token_is_among_the_others_alternatives() -> None:
    divergence = compare_text(*diverging(0.5), 0.03, LIMIT)
    assert divergence is not None
    assert divergence.kind == "close"
    assert (divergence.gap, divergence.swing) == (pytest.approx(0.5), pytest.approx(0.7))


def test_alternatives_that_are_not_finite_or_listed_twice() -> None:
    divergence = compare_text((token("A", -0.5, B=math.nan),), (token("B", -0.5, A=-0.6),), 10.0, 10.0)
    assert divergence is not None
    assert (divergence.kind, divergence.swing) == ("apart", None)
    twice = Token(text="x", logprob=-0.5, top=(("x", -0.5), ("\ufffd", -0.6), ("\ufffd", -3.0)))
    divergence = compare_text((twice,), (token("\ufffd", x=-0.2),), 0.21, LIMIT)
    assert divergence is not None
    assert divergence.kind == "tie", "of two alternatives with one text the better counts"
    again = Token(text="x", logprob=-0.5, top=(("x", -0.5), ("y", -0.6), ("y", -3.0)))
    assert floor_between((again,), (token("x", -0.5, y=-0.6),)) == 0.0
    unknown = (token("a", math.nan), token("b", -0.2))
    assert floor_between(unknown, (token("a"), token("b", -0.3))) == pytest.approx(0.1)


@pytest.mark.parametrize("where", ["reference", "candidate"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ["b", "x"])
def test_what_is_not_finite_is_apart_whatever_the_text(where: str, bad: float, text: str) -> None:
    broken, sound = (token("a"), Token(text=text, logprob=bad), token("c")), tokens("abc")
    pair = (broken, sound) if where == "reference" else (sound, broken)
    assert (divergence := compare_text(*pair, 0.01, LIMIT)) is not None
    assert (divergence.kind, divergence.position, divergence.gap) == ("apart", 1, None)
    assert [is_finite(broken), is_finite(sound)] == [False, True]


def test_a_token_outside_the_references_alternatives_is_apart_by_an_unknown_gap() -> None:
    reference, candidate = (token("x", -0.5, y=-1.5, z=-4.0),), (token("w", -0.4, x=-0.6),)
    divergence = compare_text(reference, candidate, 100.0, LIMIT)
    assert divergence is not None
    assert divergence.kind == "apart"
    assert divergence.gap is None


@pytest.mark.parametrize(("reference", "candidate"), [("abc", "ab"), ("ab", "abc"), ("", "a")])
def test_an_earlier_end_is_a_divergence(reference: str, candidate: str) -> None:
    divergence = compare_text(tokens(reference), tokens(candidate), 1.0, LIMIT)
    assert divergence is not None
    assert divergence.position == min(len(reference), len(candidate))
    assert (divergence.kind, divergence.gap) == ("apart", None)


def test_the_floor_is_the_largest_shift_with_an_equal_history() -> None:
    first = (token("a", -0.10), token("b", -0.20), token("c", -0.3))
    second = (token("a", -0.11), token("b", -0.25), token("c", -0.3))
    assert floor_between(first, second) == pytest.approx(0.05)


def test_the_floor_counts_the_log_odds_against_the_best_alternative() -> None:
    first, second = (token("a", -0.10, b=-3.0),), (token("a", -0.12, b=-3.5),)
    assert floor_between(first, second) == floor_between(second, first) == pytest.approx(0.48)


def test_what_follows_a_divergence_is_not_in_the_floor_but_its_swing_is() -> None:
    first = (token("a", -0.10), token("x", -0.5, y=-0.57), token("b", -0.1))
    second = (token("a", -0.11), token("y", -0.5, x=-0.53), token("b", -9.0))
    assert floor_between(first, second) == pytest.approx(0.10)
    assert floor_between(second, first) == pytest.approx(0.10)
