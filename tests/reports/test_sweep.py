"""The document of a sweep, in every medium."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from assay.harness.drivers.sweep.spec import SweepResult, SweptCell
from assay.harness.verdict import Verdict
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.page import to_html
from assay.reports.sweep import sweep_document
from assay.reports.terminal import render


def cell(key: str, candidate: str, verdict: Verdict | None, problem: str = "") -> SweptCell:
    return SweptCell(
        key=key, command=("check", candidate), axes={"candidate": candidate}, verdict=verdict, problem=problem, seconds=12.0,
        headline=f"{candidate} is so" if verdict else "",
    )  # fmt: skip


RESULT = SweepResult(
    verdict="regression", command="assay sweep", folder="runs/sweep-1", created="2026-01-01T00:00:00Z", seconds=60.0,
    axes={"candidate": ("good:f", "bad:f", "lost:f", "<late>:f")}, interrupted=True,
    cells=(
        cell("k1", "good:f", "pass"), cell("k2", "bad:f", "regression"),
        cell("k3", "lost:f", "error", "It could not run on a worker"), cell("k4", "<late>:f", None),
    ),
)  # fmt: skip


def test_a_terminal_shows_the_worst_first() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(sweep_document(RESULT, Path("runs/sweep-1/index.html")), console)
    text = console.export_text()
    cells = [line[:13].strip() for line in text.splitlines() if "  candidate " in line]
    assert cells == ["regression", "error", "pass", "not run"]
    assert "It could not run on a worker" in text


def test_every_medium_has_every_cell() -> None:
    document = sweep_document(RESULT, Path("index.html"))
    page, text, cases = to_html(document), to_markdown(document), to_junit(document)
    for key in ("k1", "k2", "k3", "k4"):
        assert key in page
        assert key in text
    assert "&lt;late&gt;:f" in page
    assert 'href="cells/k1/log.txt"' in page
    assert 'href="cells/k4/log.txt"' not in page, "it did not run"
    assert cases.count("<testcase") == 4
    assert cases.count("<failure") + cases.count("<error") == 3, "only what passes is green"
    counted = "4 cells: 1 regression, 1 error, 1 pass, 1 not run."
    assert (document.code, document.headline) == (1, counted)
    assert document.answer.startswith(f"REGRESSION   {counted[:-1]} · exit 1")
    assert json.loads(document.json(RESULT))["headline"] == counted
    assert SweepResult.model_validate_json(document.json(RESULT)) == RESULT
