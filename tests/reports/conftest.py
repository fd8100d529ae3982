"""The example reports and a browser, as fixtures: test folders are no packages, so tests cannot import one another."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reports.html import to_html
from reports.model import Report


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tests_reports_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def examples() -> ModuleType:
    return load(Path(__file__).parent / "examples.py")


@pytest.fixture(scope="session")
def inside() -> ModuleType:
    return load(Path(__file__).parent / "examples_inside.py")


@pytest.fixture(scope="session")
def made_up_bench() -> ModuleType:
    return load(Path(__file__).parents[1] / "harness" / "bench" / "made_up.py")


@pytest.fixture(params=["pass", "regression", "inconclusive", "error"])
def any_report(request: pytest.FixtureRequest, examples: ModuleType) -> Report:
    report: Report = examples.BY_VERDICT[request.param]()
    return report


def _program(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    message = f"none of {', '.join(names)} is installed (Debian: apt-get install chromium chromium-driver)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def screenshot() -> Any:
    if os.environ.get("CI") != "true":
        pytest.importorskip("selenium")
    return load(Path(__file__).parents[2] / "docs" / "screenshot.py")


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
