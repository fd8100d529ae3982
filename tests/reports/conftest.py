"""A browser, as fixtures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from assay.harness.judge.report import Report
from assay.reports.run_page import to_html


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
    return lambda **kind: screenshot.browser(chromium, driver, **kind)


@pytest.fixture(scope="module")
def chrome(browser: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    with browser() as chrome:
        yield chrome


@pytest.fixture
def visit(chrome: Any, screenshot: Any, tmp_path: Path) -> Callable[..., Any]:
    def visit(report: Report, width: int = 1200, height: int = 900, add: str = "") -> Any:
        page = tmp_path / "report.html"
        page.write_text(to_html(report).replace("</body>", add + "</body>"), encoding="utf-8")
        screenshot.resize(chrome, width, height)
        for log in ("browser", "performance"):
            chrome.get_log(log)
        chrome.get(page.as_uri())
        return chrome

    return visit
