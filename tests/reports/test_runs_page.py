"""The page of ``assay runs``, and what it shares with the other pages: dates, and a header with or without a verdict."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

from assay.harness.explain.pages import page
from assay.harness.judge.history import RunList, list_runs
from assay.reports.explain import explain_document
from assay.reports.page import to_html
from assay.reports.runs import runs_document
from assay.reports.summary import when
from assay.reports.write import write_reports


@pytest.fixture
def listed(tmp_path: Path, examples: ModuleType) -> RunList:
    """A run of each verdict."""
    for number, name in enumerate(("passing", "regression", "inconclusive", "error")):
        report = getattr(examples, name)().model_copy(update={"created": f"2026-11-2{number}T10:00:00+00:00"})
        write_reports(report, tmp_path / "runs" / name)
    return list_runs(tmp_path / "runs")


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-11-22T20:43:19+00:00", "2026-11-22 20:43 UTC"),
        ("2026-11-22T20:43:19Z", "2026-11-22 20:43 UTC"),
        ("2026-11-22T20:43:19", "2026-11-22 20:43"),
        ("Nov 22\n20:43", "Nov 22 20:43"),
    ],
)
def test_a_time_is_shown_to_the_minute(created: str, shown: str) -> None:
    assert when(created) == shown


def test_the_rows_have_their_dates(listed: RunList) -> None:
    assert '<th scope="row">2026-11-21 10:00 UTC</th>' in to_html(runs_document(listed, Path()))


def test_the_rows_lead_to_the_reports_and_say_how_long_the_runs_took(listed: RunList, tmp_path: Path) -> None:
    page = tmp_path / "pages of mine" / "runs.html"
    page.parent.mkdir()
    (tmp_path / "runs" / "error" / "report.html").unlink()
    page.write_text(to_html(runs_document(listed, page.parent)))
    html = page.read_text()
    links = re.findall(r'<a href="([^"]+)" rel="noreferrer"><code>', html)
    assert {(page.parent / unquote(link)).resolve() for link in links} == {
        tmp_path / "runs" / name / "report.html" for name in ("passing", "regression", "inconclusive")
    }
    assert len(re.findall(r'data-label="Took">[\d,]+ s<', html)) == 4
    assert ">11-20 10:00</th>" in html, "runs of one day have different columns"


def test_a_header_without_a_verdict_has_neither_its_colour_nor_its_sign(listed: RunList) -> None:
    assert '<header class="verdict error">' in to_html(runs_document(listed, Path())), "the newest run's"
    empty = listed.model_copy(update={"runs": ()})
    for html in (to_html(runs_document(empty, Path())), to_html(explain_document(page("mask-top-left")))):
        header = html.partition("</header>")[0]
        assert '<header class="verdict none">' in header
        assert '<svg class="sign"' not in header


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 600, 1280])
def test_no_column_of_the_runs_is_cut_off(chrome: Any, screenshot: Any, tmp_path: Path, listed: RunList, width: int) -> None:
    path = tmp_path / "runs.html"
    path.write_text(to_html(runs_document(listed, path.parent)))
    screenshot.resize(chrome, width, 844)
    screenshot.open_page(chrome, path)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == width
    right = "[cell.textContent.trim(), cell.getBoundingClientRect().right]"
    cells = chrome.execute_script(f"return [...document.querySelectorAll('.runs td')].map(cell => {right})")
    assert cells
    assert [text for text, right in cells if text and right > width] == []
