from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.text import clip, in_units, met, one_line, points, ranges, some, three_digits, times, visible

ANYTHING = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("nul\x00 bell\x07 del\x7f", "nul␀ bell␇ del␡"),
        ("c1 \x9b31m", "c1 [U+009B]31m"),
        ("\u202eevil\u2066", "[U+202E]evil[U+2066]"),
        ("zero\u200bwidth\ufeff\u00ad", "zero[U+200B]width[U+FEFF][U+00AD]"),
        ("half \ud800", "half [U+D800]"),
        ("tag \U000e0041", "tag [U+E0041]"),
        ("line\r\nend\rhere\u2028there", "line\nend␍here[U+2028]there"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("مرحبا 中文 é 👩‍👩‍👧 \ufffd", "مرحبا 中文 é 👩‍👩‍👧 \ufffd"),
    ],
)
def test_hidden_characters_are_written_out_and_others_stay(raw: str, shown: str) -> None:
    assert visible(raw) == shown


@given(ANYTHING)
def test_shown_text_has_no_hidden_characters_and_no_control_codes(text: str) -> None:
    shown = visible(text)
    assert visible(shown) == shown
    shown.encode()
    for character in shown.replace("\n", "").replace("\t", ""):
        # Cf without the joiners that emoji need and the marks that are printed; Cc and Cs not at all.
        assert unicodedata.category(character) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(character) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@given(ANYTHING, st.integers(2, 50))
def test_one_line_is_one_short_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert "\n" not in line
    assert len(line) <= limit


def test_one_line_marks_a_cut() -> None:
    assert one_line("a b  c\nd") == "a b c d"
    assert one_line("x" * 11, 10) == "x" * 9 + "…"
    assert one_line(" " * 1_000 + "far away", 10).endswith("…")


def test_clip_keeps_the_start_and_the_last_line_and_counts_the_rest() -> None:
    text = "start" + "x" * 100_000 + "\nAnswer: C"
    cut = clip(text, 2_000)
    assert cut.startswith("startx")
    assert cut.endswith("Answer: C")
    assert f"{len(text) - 2_000:,} characters left out" in cut
    assert len(cut) < 2_100
    assert clip("short", 2_000) == "short"


@pytest.mark.parametrize(
    ("numbers", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((12, 0, 1, 7, 6), "0-1, 6-7, 12")]
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (0.372, "0.37 ×"),
        (140.0, "140 ×"),
        (12_345.0, "12,000 ×"),
        (999_999.0, "1,000,000 ×"),
        (2.4e6, "2,400,000 ×"),
        (1.23e7, "12,000,000 ×"),
        (3.1e11, "310,000,000,000 ×"),
        (3e12, "3e+12 ×"),
        (float("inf"), "not finite"),
    ],
)
def test_a_ratio_has_two_digits_and_no_exponent(ratio: float, shown: str) -> None:
    assert times(ratio) == shown


@pytest.mark.parametrize(("number", "shown"), [(100.0, "100"), (85.46, "85.5"), (-0.04, "0"), (1.87, "1.9"), (1953.0, "1,950")])
def test_points_have_at_most_three_digits(number: float, shown: str) -> None:
    assert three_digits(number) == shown


def test_numbers_that_were_met_are_counted_within_ranges() -> None:
    spans = ((1, 3), (40, 40), (64, 65), (4097, 4097))
    assert met(spans, 64) == "6 of 1 to 65 and 4,097"
    assert met(spans, 1) == "1 to 3, 40, 64 to 65 and 4,097"
    assert met((), 64) == "none"


@pytest.mark.parametrize(
    ("shown", "unit", "said"),
    [("1", "point", "1 point"), ("-1", "nat", "-1 nat"), ("1.0", "point", "1.0 points"), ("0", "call", "0 calls")],
)
def test_a_unit_is_singular_for_one_alone(shown: str, unit: str, said: str) -> None:
    assert in_units(shown, unit) == said


@pytest.mark.parametrize(("number", "said"), [(1.0, "1 point"), (0.96, "1 point"), (1.1, "1.1 points"), (0.0, "0 points")])
def test_points_are_a_number_with_its_unit(number: float, said: str) -> None:
    assert points(number) == said


def test_some_of_several_are_named_with_their_number_or_among_those_there_were() -> None:
    assert some("layer", {0, 1}, {0, 1}) == "all 2 layers"
    assert some("head", {0, 1, 7}, range(8)) == "heads 0-1, 7 of 8"
    assert some("layer", {21}, {0, 3, 21}) == "layer 21 among 3"
