"""The document of a sweep, in every medium."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from assay.harness.sweep.result import SweepResult, SweptCell, SweptCombination
from assay.harness.verdict import Verdict
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.page import to_html
from assay.reports.sweep import sweep_document
from assay.reports.terminal import render


def cell(key: str, stage: str, candidate: str, verdict: Verdict | None, **more: object) -> SweptCell:
    given = {"headline": f"{candidate} is so", "seconds": 12.0, "attempts": 1, "worker": "node-1"} if verdict else {}
    return SweptCell(
        key=key, command=(stage, candidate), axes={"candidate": candidate}, verdict=verdict, **{**given, **more}  # type: ignore[arg-type]
    )  # fmt: skip


CELLS = (
    cell("k1", "check", "good:f", "pass", environment={"torch": "2.9"}),
    cell("k2", "check", "bad:f", "regression", environment={"torch": "2.9"}),
    cell(
        "k3",
        "run",
        "good:f",
        "error",
        problem="Its workers were lost 8 times",
        attempts=8,
        headline="",
        environment={"torch": "2.8"},
    ),
    cell("k4", "check", "<late>:f", None, problem="the sweep was stopped"),
)
RESULT = SweepResult(
    verdict="regression", command="assay sweep", folder="runs/sweep-1", created="2026-01-01T00:00:00Z", seconds=60.0,
    stages=("check", "run"), axes={"candidate": ("good:f", "bad:f", "<late>:f")}, headline="4 cells: 1 regression.", cells=CELLS,
    combinations=(
        SweptCombination(axes={"candidate": "good:f"}, cells={"check": "k1", "run": "k3"}, stopped="run"),
        SweptCombination(axes={"candidate": "bad:f"}, cells={"check": "k2"}, stopped="check"),
        SweptCombination(axes={"candidate": "<late>:f"}, cells={}),
    ),
    ended_early="it was interrupted",
)  # fmt: skip


def test_a_terminal_shows_the_worst_first_and_where_each_candidate_stopped() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(sweep_document(RESULT, Path("runs/sweep-1/index.html")), console)
    text = console.export_text()
    lines = [line.strip() for line in text.splitlines()]
    assert "Not all cells were run: it was interrupted." in text
    cells = [line.partition(":")[0] for line in lines if "; Cell k" in line]
    assert cells == ["regression", "error", "pass", "not run"]
    assert "Its workers were lost 8 times (8 attempts)" in text
    assert "the sweep was stopped" in text
    assert any("bad:f" in line and "stopped at check" in line for line in lines)
    assert "Cells ran in different environments" in text


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
    assert (document.code, document.conclusion.partition(":")[0]) == (1, "REGRESSION (exit code 1)")


def test_a_result_can_be_read_back() -> None:
    assert SweepResult.model_validate_json(sweep_document(RESULT, Path("x")).json(RESULT)) == RESULT
