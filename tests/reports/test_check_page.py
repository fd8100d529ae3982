from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.matrix import cases
from assay.harness.checks.check import check
from assay.harness.evidence.kernel_result import Axis, KernelResult, Property, Tried
from assay.harness.files import write_whole
from assay.reports import page as pages
from assay.reports.check import check_document


def to_html(result: KernelResult) -> str:
    return pages.to_html(check_document(result))


TEST = "def test_mine():\n    assert_correct(forward, call)"


@pytest.fixture(scope="module")
def wrong(examples: ModuleType) -> KernelResult:
    """A wrong kernel, whose finding has an operator and a picture."""
    found = check(fault("mask-top-left"), cases=cases(("extend",), dtypes=[torch.float32], head_dims=[64])[::40], read_out=0)
    drawn = {"operator": "query i does not see keys j > i", "picture": examples.picture(examples.TOP_LEFT)}
    first, *others = found.findings
    rule = (Property(feature="prefix", kind=">=", values=(1.0,)),)
    where = {
        "tried": Tried(rule=rule, wrong=15, right=17, calls=400),
        "axes": (Axis(name="cached prefix", wrong=(1, 64), right=(0,)),),
    }
    changed = where | {"findings": (first.model_copy(update=drawn), *others), "again": "assay check mine:forward", "test": TEST}
    return found.model_copy(update=changed)


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def test_verdict_findings_conditions_and_reproduction_are_there(wrong: KernelResult) -> None:
    page = to_html(wrong)
    assert '<header class="verdict regression">' in page
    shown = text_of(page)
    for part in (
        f"wrong on {len(wrong.failing)} of", "Exit code 1.", "Observed: query i does not see keys j &gt; i",
        "q head 1 of 4; wrong in q heads 0-1 of 4", "Wrong exactly where a prefix is cached.", "Varied around the smallest call",
        "Smallest failing call: layer 0", "assay check mine:forward", "assert_correct(forward, call)",
    ):  # fmt: skip
        assert part in shown, part


def test_a_right_kernel_has_a_short_page() -> None:
    result = check(rounded_oracle, cases=cases(("decode",))[:3])
    page = to_html(result)
    assert f'<header class="verdict {result.verdict}">' in page
    assert "<svg xmlns" not in page
    assert "Where it is wrong" not in page


def test_a_finding_without_a_command_has_no_empty_box_for_one(wrong: KernelResult) -> None:
    first, *_ = wrong.findings
    assert first.reproduce == ""
    assert "Reproduce it" not in to_html(wrong)
    again = first.model_copy(update={"reproduce": "assay check mine:forward"})
    assert "Reproduce it" in to_html(wrong.model_copy(update={"findings": (again,)}))


def test_hostile_text_stays_text(wrong: KernelResult, examples: ModuleType) -> None:
    hostile = examples.HOSTILE.replace("\ud800", "")
    drawn = examples.picture(examples.TOP_LEFT, call=hostile)
    found = wrong.findings[0].model_copy(update={"operator": hostile, "where": hostile, "picture": drawn})
    changed = {"kernel": hostile, "findings": (found,), "missing": (hostile,), "again": hostile, "test": hostile}
    page = to_html(wrong.model_copy(update=changed))
    assert "<script>window" not in page
    assert "<img" not in page
    assert "\u202e" not in page


# The axes of a bounding box that leave their image, in CSS pixels.
_CUT_OFF = """
const cut = [];
for (const svg of document.querySelectorAll('figure.observed svg')) {
  const frame = svg.getBoundingClientRect();
  for (const part of svg.querySelectorAll('path, rect, line, text')) {
    const box = part.getBoundingClientRect();
    if (box.left < frame.left - .5 || box.right > frame.right + .5 || box.top < frame.top - .5 || box.bottom > frame.bottom + .5)
      cut.push(part.outerHTML.slice(0, 200));
  }
}
return cut;
"""
_OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('figure.observed svg')) {
  const boxes = [...svg.querySelectorAll('text')].map((part) => [part.textContent, part.getBoundingClientRect()]);
  for (const [n, [one, a]] of boxes.entries()) for (const [other, b] of boxes.slice(n + 1))
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
      found.push(one + ' over ' + other);
}
return found;
"""


@pytest.mark.browser
@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_in_the_browser_shows_whole_pictures(
    wrong: KernelResult, examples: ModuleType, screenshot: Any, chrome: Any, prefers: Callable[[str], None], tmp_path: Path,
    width: int, scheme: str,
) -> None:  # fmt: skip
    batch = {
        "query_sequences": (0, 0, 3, 3), "query_positions": (998, 999, 1007, 1008), "key_sequences": (0,) * 20 + (3,) * 44,
        "key_indices": (*range(980, 1000), *range(965, 1009)),
    }  # fmt: skip
    pictures = [
        examples.picture(examples.TOP_LEFT),
        examples.picture(examples.EVERY_KIND),
        examples.picture(("#o",)),
        examples.picture(("#" * 32 + "o" * 32,) * 32, query_positions=range(100_000, 100_032)),
        examples.picture(("#" * 20 + "o" * 44,) * 4, **batch),
        examples.picture(("#" * 30,) * 31 + ("x" * 30,), rows=("read",) * 30 + ("shifted", "nonlinear")),
        examples.picture(("#" * 30, *["nan"] * 20)),
    ]
    found = tuple(wrong.findings[0].model_copy(update={"picture": picture}) for picture in pictures)
    page = tmp_path / "check.html"
    write_whole(page, pages.to_html(check_document(wrong.model_copy(update={"findings": found}))))
    prefers(scheme)
    screenshot.resize(chrome, width, 900)
    screenshot.open_page(chrome, page)
    assert chrome.get_log("browser") == []
    drawings = chrome.find_elements("css selector", "figure.observed .panels svg")
    assert len([one for one in drawings if one.is_displayed()]) == 3 * len(pictures)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == width
    assert chrome.execute_script(_CUT_OFF) == []
    assert chrome.execute_script(_OVERLAPS) == []
    sizes = chrome.execute_script(
        "return [...document.querySelectorAll('svg.chart')].filter((s) => s.checkVisibility())"
        ".map((s) => [s.clientWidth, s.width.baseVal.value])"
    )
    if width > 390:
        room = chrome.execute_script("return document.querySelector('figure.observed').clientWidth")
        assert max(drawn for _, drawn in sizes) <= room, "nothing scrolls where there is room"
    assert all(shown == pytest.approx(drawn, abs=1) for shown, drawn in sizes)  # not scaled down
