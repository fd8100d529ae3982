"""A browser, and documents in files that they are compared with, as fixtures."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.judge.report import Report
from assay.reports.document import Document
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.page import to_html
from assay.reports.run_report import run_document
from assay.reports.terminal import render

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def _program(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    message = f"none of {', '.join(names)} is installed (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser(screenshot: Any) -> Callable[..., AbstractContextManager[Any]]:
    chromium = _program("chromium", "chromium-browser", "google-chrome")
    driver = _program("chromedriver", "chromium.chromedriver")

    @contextmanager
    def opened(**kind: Any) -> Iterator[Any]:
        with screenshot.browser(chromium, driver, **kind) as chrome:
            yield chrome
            assert script_errors(chrome) == []

    return opened


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str, Document], None]:
    """A function that compares a document with the files of that name in tests/data/golden.

    They hold the whole of it in a pipe, its first screen on a terminal, its Markdown and its JUnit.
    """

    def compare(name: str, document: Document) -> None:
        pipe = Console(file=io.StringIO(), width=100, force_terminal=False)
        terminal = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
        render(document, pipe, everything=True)
        render(document, terminal)
        found = {"txt": pipe.file.getvalue(), "tty": terminal.file.getvalue()}  # type: ignore[attr-defined]
        found |= {"md": to_markdown(document), "xml": to_junit(document)}
        changed = []
        for ending, text in found.items():
            made, expected = tmp_path / f"{name}.{ending}", GOLDEN / f"{name}.{ending}"
            made.write_text(text, encoding="utf-8")
            if not expected.exists() or text != expected.read_text(encoding="utf-8"):
                changed.append(f"cp {made} {expected}")
        assert not changed, "look at what is different, and if it is right, take it over"

    return compare


def script_errors(chrome: Any) -> list[str]:
    """What scripts raised since the browser's log was read last."""
    return [entry["message"] for entry in chrome.get_log("browser") if entry["source"] == "javascript"]


@pytest.fixture(scope="session")
def chrome(browser: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with browser() as chrome:
        yield chrome


@pytest.fixture(scope="session")
def chrome_without_scripts(browser: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with browser(scripts=False) as chrome:
        yield chrome


@pytest.fixture
def prefers(chrome: Any) -> Iterator[Callable[[str], None]]:
    """A function that makes the browser prefer light or dark pages, until the test ends."""

    def prefer(scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    yield prefer
    prefer("light")


@pytest.fixture
def visit(chrome: Any, screenshot: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page of a report. A script on it that raises an error fails the test."""

    def visit(report: Report, width: int = 1200, height: int = 900, add: str = "") -> Any:
        page = tmp_path / "report.html"
        page.write_text(to_html(run_document(report)).replace("</body>", add + "</body>"), encoding="utf-8")
        screenshot.resize(chrome, width, height)
        assert script_errors(chrome) == []
        chrome.get_log("performance")
        screenshot.open_page(chrome, page)
        return chrome

    yield visit
    assert script_errors(chrome) == []
