"""Each kind of page in a real Chromium: what only a browser can say of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from assay.reports.page import to_html
from assay.reports.run_report import run_document

pytestmark = pytest.mark.browser
KINDS = (
    "run-regression", "run-pass", "run-inconclusive", "run-error", "check-wrong", "check-right", "compare-answers",
    "compare-lm-eval", "compare-choices", "compare-traces", "compare-tensors", "compare-fingerprints", "fingerprint", "ingest",
    "invariance", "sweep", "bisect", "runs",
)  # fmt: skip
HEIGHTS = {"run-regression": 3_000, "run-inconclusive": 2_200, "compare-lm-eval": 2_200, "ingest": 3_700}
"""The most CSS pixels of a page that is folded, on a screen of 1280."""


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, pages: ModuleType, examples: ModuleType, arm_records: ModuleType
) -> dict[str, Path]:
    """The file of each page."""
    folder, made = tmp_path_factory.mktemp("pages"), {}
    documents = pages.documents(folder, examples, arm_records)
    assert set(documents) == set(KINDS)
    for kind, document in documents.items():
        made[kind] = folder / f"{kind}.html"
        made[kind].write_text(to_html(document()), encoding="utf-8")
    return made


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")], ids=lambda shape: f"{shape[0]}-{shape[1]}")
def shaped(request: pytest.FixtureRequest, chrome: Any, screenshot: Any, prefers: Callable[[str], None]) -> Iterator[int]:
    """A screen of a width, in a colour scheme."""
    width, scheme = request.param
    prefers(scheme)
    screenshot.resize(chrome, width, 900)
    chrome.execute_cdp_cmd("Page.enable", {})
    hook = chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _RECORD})
    yield width
    chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", hook)


@pytest.mark.few(20)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_readable(kind: str, shaped: int, chrome: Any, screenshot: Any, files: dict[str, Path]) -> None:
    """No script error, contrast by WCAG 2.2 AA, no scrolling sideways, and no word or label is broken or overprinted."""
    chrome.get_log("browser")
    screenshot.open_page(chrome, files[kind])
    height = chrome.execute_script("return document.documentElement.scrollHeight")
    assert shaped == 390 or height <= HEIGHTS.get(kind, 5_000)
    contrast = chrome.execute_script(_CONTRAST)  # it opens what is folded
    assert contrast["checked"] > 15
    assert contrast["low"] == []
    assert chrome.execute_script("return document.documentElement.scrollWidth") == shaped
    assert chrome.execute_script(_BROKEN) == []
    assert chrome.execute_async_script(_OVERPRINTED) == []
    assert chrome.execute_script("return [...document.querySelectorAll('button')].filter((b) => b.clientHeight > 40).length") == 0
    assert chrome.get_log("browser") == []


@pytest.mark.few(1)
def test_questions_are_searched_by_text_with_the_keyboard_alone(
    chrome: Any, screenshot: Any, examples: ModuleType, tmp_path: Path
) -> None:
    """Of the question, of either answer, together with what is chosen; and right answers are among them."""
    report = examples.regression()
    first, second, *_ = report.suites[0].flips
    flips = (
        first.model_copy(update={"direction": "lost", "prompt": "Answer. Who  wrote\nHAMLET?", "candidate_text": "Marlowe"}),
        second.model_copy(update={"direction": "gained", "prompt": "Answer. Who wrote Faust?", "candidate_text": "Goethe"}),
    )
    steady = (second.model_copy(update={"direction": "both right", "prompt": "Answer. Who painted Guernica?"}),)
    suite = report.suites[0].model_copy(update={"flips": flips, "steady": steady})
    page = tmp_path / "report.html"
    page.write_text(to_html(run_document(report.model_copy(update={"suites": (suite,)}))), encoding="utf-8")
    chrome.get_log("browser")
    screenshot.open_page(chrome, page)
    chrome.execute_script("document.querySelector('.suite details').open = true")
    search = chrome.find_element("css selector", ".filter input[type=search]")

    def seen() -> list[str]:
        shown = "return [...document.querySelectorAll('.flip')].filter((one) => one.checkVisibility()).map((one) => one.innerText)"
        return [name for text in chrome.execute_script(shown) for name in ("HAMLET", "Faust", "Guernica") if name in text]

    def searched(text: str) -> list[str]:
        chrome.switch_to.active_element.send_keys(Keys.ESCAPE, text)  # Escape empties a field
        return seen()

    chrome.execute_script("document.querySelector('.filter select').focus()")
    for _ in range(3):
        if chrome.switch_to.active_element == search:
            break
        chrome.switch_to.active_element.send_keys(Keys.TAB)
    assert chrome.switch_to.active_element == search, "it is reached without a mouse"
    assert seen() == ["HAMLET", "Faust", "Guernica"]
    assert searched("wrote hamlet") == ["HAMLET"], "over the end of a line, in any case"
    assert searched("goethe") == ["Faust"], "in an answer that is folded"
    assert searched("Guernica") == ["Guernica"], "a question that both got right"
    assert searched("candidate") == [], "not in the headings that all have"
    assert chrome.find_element("css selector", ".filter output").text == "0 of 3"
    assert searched("who wrote") == ["HAMLET", "Faust"]
    chrome.find_element("css selector", "select[data-by=direction] option[value=gained]").click()
    assert seen() == ["Faust"], "both filters hold"
    assert chrome.get_log("browser") == []


_CONTRAST = """
for (const d of document.querySelectorAll('details')) d.open = true;
const context = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true});
const rgb = (layers) => {
  context.clearRect(0, 0, 1, 1);
  for (const colour of layers) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
  return [...context.getImageData(0, 0, 1, 1).data];
};
const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const low = []; let checked = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(getComputedStyle(e).backgroundColor);
  const style = getComputedStyle(element);
  const back = rgb(layers), front = rgb([...layers, element.closest('svg') ? style.fill : style.color]);
  const [a, b] = [light(front), light(back)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  checked++;
  if (ratio < 4.5) low.push([ratio.toFixed(2), element.outerHTML.slice(0, 120)]);
}
return {checked, low};
"""
# Words of prose and numbers that are on two lines.
_BROKEN = """
const broken = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  if (!node.parentElement.checkVisibility() || node.parentElement.closest("pre, svg, script")) continue;
  for (const word of node.data.matchAll(/[0-9]+\\.[0-9]+ s\\b|[A-Za-z0-9.,]+(?: → [0-9.]+)?/g)) {
    if (word[0].length > 24) continue;
    const range = document.createRange();
    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size > 1) broken.push(word[0]);
  }
}
return broken;
"""
# Where canvases have text, as it was drawn last.
_RECORD = """
const fillText = CanvasRenderingContext2D.prototype.fillText, clearRect = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...area) { this.canvas.drawn = []; return clearRect.apply(this, area); };
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {
  const width = Math.min(this.measureText(text).width, most ?? Infinity), {e, f} = this.getTransform(), scale = devicePixelRatio;
  const left = x + e / scale - ({center: width / 2, right: width, end: width}[this.textAlign] ?? 0);
  const top = y + f / scale - ({middle: 5, bottom: 10}[this.textBaseline] ?? 0);
  (this.canvas.drawn ??= []).push({text, left, right: left + width, top, bottom: top + 10});
  return fillText.call(this, text, x, y, ...(most === undefined ? [] : [most]));
};
"""
_OVERPRINTED = """
const done = arguments[0];
requestAnimationFrame(() => setTimeout(() => {
  const found = [];
  const groups = [...document.querySelectorAll("canvas")].map((canvas) => canvas.drawn ?? []);
  for (const svg of document.querySelectorAll("svg.chart")) groups.push([...svg.querySelectorAll("text")].map((part) => {
    const {left, right, top, bottom} = part.getBoundingClientRect();
    return {text: part.textContent, left, right, top: top + 2, bottom: bottom - 2};
  }));
  for (const texts of groups) texts.forEach((a, n) => texts.slice(n + 1).forEach((b) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
      found.push(`${a.text} over ${b.text}`);
  }));
  done(found);
}, 60));
"""
