"""The page in a real Chromium: what only a browser can say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.judge.report import Report
from assay.reports import page
from assay.reports.run_report import run_document

pytestmark = pytest.mark.browser
WIDTH, HEIGHT = 1200, 900


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


def _requests(chrome: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The first page of a new browser is its own, and asks the browser for icons.
    sent = [r["request"]["url"] for r in requests if not r.get("documentURL", "").startswith("chrome://")]
    assert any(url.endswith("report.html") for url in sent), "the log of requests does not work"
    return [url for url in sent if not url.endswith("report.html") and not url.startswith("data:")]


@pytest.mark.few(1)
def test_opens_from_disk_without_errors_or_requests(visit: Any, any_report: Report) -> None:
    chrome = visit(any_report)
    assert chrome.get_log("browser") == []
    assert _requests(chrome) == []


def test_the_log_of_a_failed_server_can_be_copied_and_a_link_unfolds_what_it_leads_to(visit: Any, examples: ModuleType) -> None:
    chrome = visit(examples.failed_server(), 1280, 800)
    fold = chrome.find_element("css selector", "section[aria-labelledby=shown] details")
    fold.find_element("css selector", "summary").click()
    assert fold.find_element("css selector", ".command button").text == "Copy"
    chrome.execute_script("arguments[0].open = false; location.hash = ''", fold)
    chrome.execute_script("document.querySelector('.command code').id = 'in-the-fold'; location.hash = 'in-the-fold'")
    says = "const done = arguments[1]; setTimeout(() => done(arguments[0].open), 300)"
    assert chrome.execute_async_script(says, fold) is True


@pytest.mark.few(2)
@pytest.mark.parametrize(("width", "height"), [(WIDTH, HEIGHT), (400, 700)])
def test_verdict_is_in_the_first_viewport(visit: Any, any_report: Report, width: int, height: int) -> None:
    chrome = visit(any_report, width, height)
    box = chrome.execute_script("return document.getElementById('verdict').getBoundingClientRect().toJSON()")
    assert 0 <= box["top"] < box["bottom"] <= height / 2
    assert 0 <= box["left"] < box["right"] <= width
    assert box["height"] >= 36
    heading = chrome.find_element("id", "verdict")
    assert heading.text.lower() == any_report.verdict
    sign = chrome.execute_script("return document.querySelector('header .sign').getBoundingClientRect().toJSON()")
    assert sign["width"] >= 30
    headline = chrome.execute_script("return document.querySelector('.headline').getBoundingClientRect().toJSON()")
    assert headline["bottom"] <= height


def test_hostile_text_does_not_run(visit: Any, examples: ModuleType) -> None:
    chrome = visit(examples.hostile())
    for element in chrome.find_elements("css selector", "details"):
        chrome.execute_script("arguments[0].open = true; arguments[0].dispatchEvent(new Event('mouseover'))", element)
    assert chrome.execute_script("return typeof window.pwned") == "undefined"
    assert "pwned'" not in chrome.title.replace("window.pwned", "")
    assert chrome.execute_script("return document.images.length") == 0
    assert chrome.get_log("browser") == []
    assert _requests(chrome) == []


def test_filter(visit: Any, examples: ModuleType) -> None:
    chrome = visit(examples.many_flips(400))

    def shown() -> int:
        flips = "return [...document.querySelectorAll('.flips .flip')].filter((flip) => flip.checkVisibility()).length"
        return int(chrome.execute_script(flips))

    def choose(by: str, value: str) -> None:
        chrome.find_element("css selector", f"select[data-by={by}] option[value='{value}']").click()

    chrome.execute_script("for (const o of document.querySelectorAll('.filter option:not([value])')) o.value = o.text")
    chrome.execute_script("document.querySelector('.suite details').open = true")
    total = shown()
    assert total == 256
    choose("direction", "gained")
    gained = shown()
    assert 0 < gained < total
    choose("group", "stem")
    both = shown()
    assert 0 < both < gained
    assert chrome.find_element("css selector", ".filter output").text == f"{both} of {total}"
    chrome.find_element("css selector", "button[data-open]").click()
    assert len(chrome.find_elements("css selector", ".flips .flip[open]")) == both
    choose("direction", "")
    choose("group", "")
    assert shown() == total


def test_everything_is_readable_without_scripts(
    chrome_without_scripts: Any, screenshot: Any, examples: ModuleType, tmp_path: Path
) -> None:
    chrome, page = chrome_without_scripts, tmp_path / "report.html"
    page.write_text(to_html(examples.regression()), encoding="utf-8")
    screenshot.open_page(chrome, page)
    assert chrome.find_elements("css selector", ".command button") == []
    assert not chrome.find_element("css selector", ".filter").is_displayed()
    assert chrome.find_element("id", "verdict").is_displayed()
    chrome.find_element("css selector", ".suite summary").click()
    flip = chrome.find_element("css selector", ".flips .flip")
    answer = flip.find_element("css selector", "pre")
    assert not answer.is_displayed()
    flip.find_element("css selector", "summary").click()
    assert answer.is_displayed()
    assert "Answer:" in answer.text
    assert chrome.find_element("css selector", ".finding code").is_displayed()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["regression", "error", "hostile"])
@pytest.mark.parametrize("width", [400, 800])
def test_a_narrow_page_does_not_scroll_sideways(visit: Any, examples: ModuleType, name: str, width: int) -> None:
    chrome = visit(getattr(examples, name)(), width=width, height=800)
    chrome.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert chrome.execute_script("return document.documentElement.clientWidth") == width
    assert chrome.execute_script("return document.documentElement.scrollWidth") == width


def _pages(chrome: Any) -> int:
    paper = {"paperWidth": 8.27, "paperHeight": 11.69}
    return len(re.findall(rb"/Type\s*/Page[^s]", base64.b64decode(chrome.execute_cdp_cmd("Page.printToPDF", paper)["data"])))


@pytest.mark.few(1)
def test_it_prints_on_at_most_four_pages(visit: Any, any_report: Report) -> None:
    assert 1 <= _pages(visit(any_report)) <= 4


def test_answer_cause_picture_and_what_to_do_are_in_the_first_screen(visit: Any, examples: ModuleType) -> None:
    report = examples.regression()
    named = report.findings[0].model_copy(update={"does": "masks wrongly", "diagnosis": 'Computes "causal mask top-left". ' * 4})
    chrome = visit(report.model_copy(update={"findings": (named, *report.findings[1:])}), 1280, 800)
    for selector in (".headline", "#cause", "section[aria-labelledby=cause] svg", "#next", ".steps pre"):
        box = chrome.execute_script("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        assert 0 <= box["top"] < box["bottom"] <= 800, (selector, box)


def test_the_contents_stay_and_lead_into_what_is_folded(visit: Any, examples: ModuleType) -> None:
    chrome = visit(examples.passing(), 1280, 800)
    place = "return document.querySelector('.contents').getBoundingClientRect().top"
    chrome.execute_script("scrollTo(0, document.body.scrollHeight)")
    assert chrome.execute_script(place) == 0
    fold = chrome.find_element("css selector", ".suite details")
    assert fold.get_attribute("open") is None
    chrome.find_element("css selector", ".contents a[href='#suite-1']").send_keys("\n")  # by the keyboard
    says = "const done = arguments[1]; setTimeout(() => done(arguments[0].open), 300)"
    assert chrome.execute_async_script(says, fold) is True


@pytest.mark.few(1)
@pytest.mark.parametrize("font", ["DejaVu Sans", "DejaVu Sans Mono", "DejaVu Serif"])
def test_no_label_of_a_chart_is_clipped_in_another_font(visit: Any, any_report: Report, font: str) -> None:
    chrome = visit(any_report)
    clipped = chrome.execute_script(_CLIPPED, font)
    assert clipped == []


_CLIPPED = """
for (const d of document.querySelectorAll('details')) d.open = true;
const found = [];
for (const svg of document.querySelectorAll('svg.chart')) {
  svg.setAttribute('font-family', arguments[0]);
  const view = svg.viewBox.baseVal;
  for (const text of svg.querySelectorAll('text')) {
    const box = text.getBBox();
    const end = box.x + box.width;
    if (box.x < view.x - 0.5 || end > view.x + view.width + 0.5) found.push([text.textContent, box.x, end, view.width]);
  }
}
return found;
"""
