from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest

from assay.harness.picture import MAX_KEYS, MAX_QUERIES, Picture
from assay.reports.operator_picture import caption, legend, panels, text
from assay.reports.svg import PALETTE

SVG = "{http://www.w3.org/2000/svg}"


def largest(examples: ModuleType, sign: str = "#", **more: object) -> Picture:
    drawn: Picture = examples.picture((sign * MAX_KEYS,) * MAX_QUERIES, query_positions=range(MAX_QUERIES), **more)
    return drawn


def texts(panel: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(panel).iter(f"{SVG}text")]


def test_every_kind_of_cell_and_of_row_is_named(examples: ModuleType) -> None:
    rows = ("shifted", "nonlinear", "read", "nan", "infinite", "zero", "constant", "right", "wrong", "read")
    picture = examples.picture((*examples.EVERY_KIND, "####.."[:5]), rows=rows)
    _, read, difference = map(texts, panels(picture))
    blocks = {"NaN", "infinite", "zero", "constant", "right, not read", "wrong, not read", "its weights are not the whole output"}
    assert blocks < set(read)
    assert blocks < set(difference)
    assert "+" in difference
    assert [words for _, words in legend(picture)] == [
        "as expected", "missing", "wrongly seen", "wrong weight", "from elsewhere", "something is added",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["TOP_LEFT", "EVERY_KIND"])
def test_static_images_in_the_colours_of_the_page_with_an_alternative_text(examples: ModuleType, name: str) -> None:
    picture = examples.picture(getattr(examples, name), call=(hostile := examples.HOSTILE.replace("\ud800", "")))
    for panel in panels(picture):
        root = ET.fromstring(panel)
        assert caption(picture) in (root.get("aria-label") or "")
        assert set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', panel)) <= set(PALETTE.values())
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "path", "line", "rect", "text", "title"}
        assert not [key for element in root.iter() for key in element.attrib if key == "style" or key.startswith("on")]
        assert "\u202e" not in panel
    assert "\x1b" not in text(examples.picture(examples.TOP_LEFT, call=hostile)).plain


def test_a_title_says_which_keys_differ_and_by_how_much(examples: ModuleType) -> None:
    difference = panels(examples.picture(examples.TOP_LEFT))[2]
    titles = [element.text for element in ET.fromstring(difference).iter(f"{SVG}title")]
    assert "query 3: keys 2-3 missing; expected 50 % of the weight, read 0 %" in titles


@pytest.mark.parametrize("keys", [1, 20, 30, 50, 64])
def test_panels_fit_a_page_and_signs_are_large_enough_to_be_told_apart(examples: ModuleType, keys: int) -> None:
    drawn = panels(examples.picture(("!" * keys,) * MAX_QUERIES, query_positions=range(MAX_QUERIES)))
    assert max(float(ET.fromstring(panel).get("width", "inf")) for panel in drawn) <= 1000
    assert sum(map(len, drawn)) < 250_000
    *_, path = ET.fromstring(drawn[2]).iter(f"{SVG}path")
    [side] = set(re.findall(r"h(\d+)", path.get("d", "")))
    assert 9 <= int(side) <= 19


def test_the_caption_says_what_is_shown(examples: ModuleType) -> None:
    more = {"shown": "queries 4-7 of 9", "foreign_kv_heads": (0, 2), "key_sequences": (0, 0, 0, 1, 1, 1)}
    assert caption(examples.picture(examples.TOP_LEFT, **more)) == (
        "layer 0 extend, new+prefix 4+2; q head 1 of 4; wrong in q heads 0-1 of 4; reads from kv heads 0, 2, not its own; "
        "queries 4-7 of 9; labels are sequence:position"
    )


SMALL = """\
      expected  read      difference
query 0    5    0    5    0    5
2     ###...    #.....    #oo...
3     ####..    ##....    ##oo..
4     #####.    ###...    ###oo.
5     ######    ####..    ####oo
# as expected, o missing, . correctly masked
layer 0 extend, new+prefix 4+2; q head 1 of 4; wrong in q heads 0-1 of 4"""


def test_a_small_picture_in_characters(examples: ModuleType) -> None:
    assert text(examples.picture(examples.TOP_LEFT)).plain == SMALL


EVERY_KIND = """\
0     #o...
1     ##!..
2     #~#x.
3     NNNNN
4     IIIII
5     00000
6     CCCCC
7     =====
8     ?????
"""


def test_rows_without_weights_have_a_character_of_their_own(examples: ModuleType) -> None:
    drawn = text(examples.picture(examples.EVERY_KIND), 24).plain
    assert EVERY_KIND in drawn
    assert "N NaN, I infinite, 0 zero, C constant, = right, not read, ? wrong, not read" in " ".join(drawn.splitlines())


def test_sequences_are_told_apart(examples: ModuleType) -> None:
    drawn = text(
        examples.picture(
            ("#oo..", "...##"), query_sequences=(0, 1), query_positions=(2, 1), key_sequences=(0, 0, 0, 1, 1),
            key_indices=(0, 1, 2, 0, 1),
        )
    ).plain.splitlines()  # fmt: skip
    assert drawn[1].split() == ["query", *["0:0", "1:0"] * 3]
    assert drawn[2].split() == ["0:2", "###|..", "#..|..", "#oo|.."]
    assert drawn[3].split() == ["1:1", "...|##", "...|##", "...|##"]
    assert {row.index("1:0", 12) - row.index("0:0", 12) for row in drawn[1:2]} == {drawn[2].index("|", 6) + 1 - 6}


def test_only_the_difference_is_shown_where_three_panels_do_not_fit(examples: ModuleType) -> None:
    lines = text(largest(examples), 80).plain.splitlines()
    assert lines[0].strip() == "difference"
    assert lines[2] == "0     " + "#" * MAX_KEYS
    assert "fit here" not in lines[-1]


def test_only_keys_that_fit_are_shown_with_the_first_that_differs(examples: ModuleType) -> None:
    picture = examples.picture(("#" * 40 + "o" * 5 + "#" * 19,), query_positions=(63,))
    lines = text(picture, 30).plain.splitlines()
    assert lines[2] == "63    ##ooooo" + "#" * 17
    assert " ".join(lines[3:]).endswith("of these, keys 38-61 fit here")
    assert max(map(len, lines)) <= 30


@pytest.mark.parametrize("width", [30, 60, 80, 100, 230])
def test_no_line_is_wider_than_the_terminal(examples: ModuleType, width: int) -> None:
    for picture in (examples.picture(examples.TOP_LEFT), examples.picture(examples.EVERY_KIND), largest(examples, "o")):
        assert max(map(len, text(picture, width).plain.splitlines())) <= width
