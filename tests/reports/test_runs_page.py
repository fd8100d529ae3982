"""The page of ``assay runs``, and what it shares with the other pages: dates, and a header with or without a verdict."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

from assay.harness.explain.pages import page
from assay.harness.judge.history import RunLine, RunList, Worst, list_runs
from assay.reports.explain import explain_document
from assay.reports.page import to_html
from assay.reports.runs import runs_document, worst_text
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


@pytest.fixture
def many() -> RunList:
    """600 runs: 20 models with 30 candidates, of which the newest regressed on two models; texts of strangers are among them."""
    runs = [
        RunLine(
            folder=f"runs/night/cells/{model:02}-{candidate:02}",
            created=f"2026-11-20T{model:02}:{candidate:02}:00Z",
            verdict="regression" if candidate == 29 and model < 2 else "pass",
            headline=f"</script><img src=x onerror='window.pwned=1'> {model} & {candidate}",
            cause="Off by one" if candidate == 29 and model < 2 else "",
            reference="triton",
            candidate=f"<b>kernel-{candidate:02}</b>",
            model=f"model-{model:02}",
            device="cpu",
            treatment={"backend": ("triton", f"<b>kernel-{candidate:02}</b>")},
        )
        for model in range(20)
        for candidate in range(30)
    ]
    return RunList(folder="runs", runs=tuple(reversed(runs)))


def test_the_matrix_has_the_worst_verdict_of_the_newest_runs(listed: RunList) -> None:
    passed, *_ = (run for run in listed.runs if run.verdict == "pass")
    others = [
        passed.model_copy(
            update={"candidate": "other", "treatment": {"backend": ("a", "other")} | more, "verdict": verdict, "created": at}
        )
        for more, verdict, at in (
            ({}, "regression", "2026-11-01"),
            ({}, "pass", "2026-11-02"),
            ({"--page-size": ("1", "16")}, "error", "2026-11-03"),
            ({"command": ("", "replay")}, "inconclusive", "2026-11-04"),
        )
    ]
    document = runs_document(RunList(folder="runs", runs=(passed, *reversed(others))), Path())
    assert document.verdict == "error", "the newest run of all passed"
    html = to_html(document)
    (table,) = re.findall(r'<div class="scroll matrix.*?</table>', html, re.S)
    assert re.findall(r'<th scope="col" title="([^"]*)"', table) == ["other", "other --page-size=16", passed.candidate]
    assert re.findall(r"<td class=(\w+)>(.)", table) == [("inconclusive", "?"), ("error", "!"), ("pass", "✓")], (
        "an earlier regression is history, and another command of the same kernel is the same cell"
    )


def test_many_runs_are_one_list_with_each_word_once(many: RunList) -> None:
    html = to_html(runs_document(many, Path()))
    assert "600 runs</h1>" in html
    assert "The newest of each treatment: 2 regression, 598 pass." in html
    assert html.count("onerror") == 50 + 598, "the first rows for readers without scripts, and the data"
    assert "<img" not in html
    assert len(html) < 220_000
    assert html.count("Off by one") == 1


@pytest.mark.browser
def test_a_cell_and_a_search_lead_to_runs(chrome: Any, screenshot: Any, tmp_path: Path, many: RunList) -> None:
    (tmp_path / "runs/night/cells/01-29").mkdir(parents=True)
    (tmp_path / "runs/night/cells/01-29/log.txt").write_text("told")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        page = tmp_path / "page.html"
        page.write_text(to_html(runs_document(many, tmp_path)))
    screenshot.resize(chrome, 1280, 900)
    screenshot.open_page(chrome, page)

    def output() -> str:
        return str(chrome.find_element("css selector", ".records output").text)

    assert output() == "100 of 600 shown, of 600"
    chrome.find_element("css selector", "[data-more]").click()
    assert output() == "200 of 600 shown, of 600"
    chrome.find_element("css selector", ".matrix tbody tr:nth-child(2) td.regression").click()
    assert output() == "1 of 1 shown, of 600"
    link = chrome.find_element("css selector", ".records tbody a")
    assert link.text == "night/cells/01-29"
    assert link.get_attribute("href") == (tmp_path / "runs/night/cells/01-29/log.txt").as_uri()
    chrome.find_element("css selector", "[data-reset]").click()
    search = chrome.find_element("css selector", ".records input")
    search.send_keys("OFF by one")
    found = "const done = arguments[0]; setTimeout(() => done(document.querySelector('.records output').textContent), 400)"
    assert chrome.execute_async_script(found) == "2 of 2 shown, of 600"
    search.send_keys(" model-00")
    assert chrome.execute_async_script(found) == "1 of 1 shown, of 600"
    search.send_keys(" nowhere")
    assert chrome.execute_async_script(found) == "0 of 0 shown, of 600"
    assert chrome.execute_script("return typeof window.pwned") == "undefined"
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 1280


@pytest.mark.parametrize(("multiple", "text"), [(138.0, "140x"), (9.9e6, "9.9 million x"), (None, "–")])
def test_a_multiple_of_a_bound_is_a_number_or_words(multiple: float | None, text: str) -> None:
    assert worst_text(Worst(error=1.0, bound=0.1, multiple=multiple)) == text
