from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness.picture import MAX_KEYS, MAX_QUERIES, Picture
from assay.reports.operator_picture import NARROW, WIDTH, _summary, caption, svg, text
from assay.reports.svg import PALETTE

SVG = "{http://www.w3.org/2000/svg}"


def largest(examples: ModuleType, sign: str = "#", **more: object) -> Picture:
    drawn: Picture = examples.picture((sign * MAX_KEYS,) * MAX_QUERIES, query_positions=range(MAX_QUERIES), **more)
    return drawn


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg(picture)).iter(f"{SVG}text")]


def test_three_panels_with_labels_and_a_legend_of_what_is_there(examples: ModuleType) -> None:
    shown = texts(examples.picture(examples.TOP_LEFT))
    assert [shown.count(title) for title in ("expected", "read", "difference")] == [2, 1, 1]  # "expected" is in the legend too
    assert {"query", "key", "2", "3", "4", "5", "0"} <= set(shown)
    assert {"as expected", "unseen", "read, stronger for more weight"} <= set(shown)
    assert not {"wrongly seen", "wrong weight", "from elsewhere"} & set(shown)


def test_every_kind_of_cell_and_of_row_is_named(examples: ModuleType) -> None:
    shown = texts(examples.picture((*examples.EVERY_KIND, "####.."[:5]), rows=(
        "shifted", "nonlinear", "read", "nan", "infinite", "zero", "constant", "right", "wrong", "read",
    )))  # fmt: skip
    for word in ("as expected", "unseen", "wrongly seen", "wrong weight", "from elsewhere", "something is added",
                 "not the whole output"):  # fmt: skip
        assert shown.count(word) == 1, word
    for word in ("NaN", "infinite", "zero", "constant", "right, not read", "wrong, not read"):
        assert shown.count(word) == 2, word  # what was read, and the difference
    assert shown.count("+") == shown.count("&") == 2  # the row, and the legend


@pytest.mark.parametrize("name", ["TOP_LEFT", "EVERY_KIND"])
def test_a_static_image_in_the_colours_of_the_page_with_an_alternative_text(examples: ModuleType, name: str) -> None:
    picture = examples.picture(getattr(examples, name))
    found = svg(picture)
    root = ET.fromstring(found)
    assert root.get("role") == "img"
    for words in (caption(picture), _summary(picture)):
        assert words in (root.get("aria-label") or "")
    assert caption(picture) in (root.findtext(f"{SVG}title") or "")
    assert root.findtext(f"{SVG}desc") == _summary(picture)
    assert set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', found)) <= set(PALETTE.values())
    assert {element.tag for element in root.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "path", "line", "rect", "text", "title", "desc")
    }
    assert not [key for element in root.iter() for key in element.attrib if key == "style" or key.startswith("on")]


def test_signs_differ_in_their_outlines_and_not_only_in_their_colours(examples: ModuleType) -> None:
    outlines = set()
    for sign in "#o!~x":
        *_, path = ET.fromstring(svg(examples.picture((f"{sign}.....",)))).iter(f"{SVG}path")
        shape = re.sub(r"[\d.,-]+", "", path.get("d", ""))
        size = re.findall(r"h([\d.]+)", path.get("d", ""))[:1]
        outlines.add((shape, path.get("fill") == "none", *size))
    assert len(outlines) == 5


def test_stronger_shades_are_for_more_weight(examples: ModuleType) -> None:
    one = examples.picture(("###",), expected=((0.01, 0.25, 0.74),), read=((0.74, 0.25, 0.01),), query_positions=(0,))
    [expected, read] = [
        [path for path in ET.fromstring(svg(one)).iter(f"{SVG}path") if path.get("fill") == PALETTE[colour]]
        for colour in ("chart-reference", "chart-candidate")
    ]

    def at(paths: list[ET.Element]) -> list[str]:
        """Opacities from left to right."""
        spots = [(float(path.get("d", "").split(",")[0][1:]), path.get("fill-opacity", "")) for path in paths]
        return [opacity for _, opacity in sorted(spots)]

    assert at(expected) == sorted(at(expected)) == at(read)[::-1]
    assert at(expected)[-1] == "1"
    assert len(set(at(expected))) == 3


def test_a_title_says_which_keys_differ_and_by_how_much(examples: ModuleType) -> None:
    titles = [element.text for element in ET.fromstring(svg(examples.picture(examples.TOP_LEFT))).iter(f"{SVG}title")]
    assert "query 3: keys 2-3 unseen; expected 50 % of the weight, read 0 %" in titles


def test_hostile_text_is_escaped(examples: ModuleType) -> None:
    hostile = examples.HOSTILE.replace("\ud800", "")
    found = svg(examples.picture(examples.TOP_LEFT, call=hostile, shown=hostile))
    tags = {element.tag.removeprefix(SVG) for element in ET.fromstring(found).iter()}
    assert tags <= {"svg", "path", "line", "rect", "text", "title", "desc"}
    assert "\u202e" not in found
    assert "\x1b" not in text(examples.picture(examples.TOP_LEFT, call=hostile)).plain


@pytest.mark.parametrize("sign", ["#", "o", "!", "~", "x"])
def test_the_largest_picture_fits_a_page(examples: ModuleType, sign: str) -> None:
    found = svg(largest(examples, sign))
    root = ET.fromstring(found)
    assert float(root.get("width", "inf")) <= WIDTH + 20
    assert float(root.get("height", "inf")) < 850
    assert len(found) < 200_000


@pytest.mark.parametrize("keys", [1, 20, 30, 50, 64])
def test_signs_are_large_enough_to_be_told_apart(examples: ModuleType, keys: int) -> None:
    *_, path = ET.fromstring(svg(examples.picture(("!" * keys,)))).iter(f"{SVG}path")
    [side] = set(re.findall(r"h(\d+)", path.get("d", "")))
    assert 9 <= int(side) <= 19


def test_the_caption_says_what_is_shown(examples: ModuleType) -> None:
    assert (
        caption(examples.picture(examples.TOP_LEFT)) == "layer 0 extend, new+prefix 4+2; q head 1 of 4; wrong in q heads 0-1 of 4"
    )
    more = {"shown": "queries 4-7 of 9", "foreign_kv_heads": (0, 2), "key_sequences": (0, 0, 0, 1, 1, 1)}
    assert caption(examples.picture(examples.TOP_LEFT, **more)).endswith(
        "reads from kv heads 0, 2, not its own; queries 4-7 of 9; labels are sequence:position"
    )


def test_the_summary_counts_what_differs(examples: ModuleType) -> None:
    assert _summary(examples.picture(examples.EVERY_KIND)) == (
        "pairs of a query and a key: 5 as expected, 1 unseen, 1 wrongly seen, 1 wrong weight, 1 from elsewhere; NaN in 1 query; "
        "infinite in 1 query; zero in 1 query; constant in 1 query; right, not read in 1 query; wrong, not read in 1 query"
    )


SMALL = """\
      expected  read      difference
query 0    5    0    5    0    5
2     ###...    #.....    #oo...
3     ####..    ##....    ##oo..
4     #####.    ###...    ###oo.
5     ######    ####..    ####oo
# as expected, o unseen, . rightly none
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


def test_rows_whose_weights_are_not_all_are_marked(examples: ModuleType) -> None:
    drawn = text(examples.picture(("##", "##"), rows=("shifted", "nonlinear"))).plain
    assert [line.split()[-2:] for line in drawn.splitlines()[2:4]] == [["##", "+"], ["##", "&"]]


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


@pytest.mark.parametrize("no_colour", [True, False])
def test_colours_are_left_out_on_request(examples: ModuleType, no_colour: bool) -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, no_color=no_colour, color_system="standard", width=100).print(
        text(examples.picture(examples.TOP_LEFT)), soft_wrap=True
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert plain.strip("\n") == SMALL
    assert ("\x1b[31moo\x1b[0m" in out.getvalue()) == (not no_colour)


@pytest.mark.parametrize(("keys", "lines"), [(8, 2), (25, 2), (30, 3), (64, 3)])
def test_a_picture_for_a_phone_is_narrow_and_its_signs_stay_large(examples: ModuleType, keys: int, lines: int) -> None:
    picture = examples.picture(("#" * (keys - 1) + "!",) * 8)
    root = ET.fromstring(svg(picture, NARROW))
    width = float(root.get("width", "inf"))
    assert width <= NARROW or (keys > 25 and width < 10 * keys + 80), "what does not fit is scrolled"
    titles = [element for element in root.iter(f"{SVG}text") if element.text in ("expected", "read", "difference")]
    panels = [element for element in titles if element.get("x") != "20"]  # which is the legend's
    assert len({element.get("y") for element in panels}) == lines
