"""The first screens of ``fingerprint``, ``bisect`` and ``sweep``: the answer, then at most twenty lines."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from assay.reports.document import Document, Row
from assay.reports.sweep import sweep_document
from assay.reports.terminal import render

KINDS = ("fingerprint", "compare-fingerprints", "bisect", "sweep")


@pytest.fixture(scope="module")
def documents(
    tmp_path_factory: pytest.TempPathFactory, pages: ModuleType, examples: ModuleType, arm_records: ModuleType
) -> dict[str, Document]:
    made = pages.documents(tmp_path_factory.mktemp("documents"), examples, arm_records)
    return {kind: made[kind]() for kind in KINDS}


def printed(document: Document, everything: bool = False) -> list[str]:
    out = io.StringIO()
    render(document, Console(file=out, width=120, force_terminal=True, color_system=None), everything)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_comes_first_and_at_most_twenty_lines_below_it(kind: str, documents: dict[str, Document]) -> None:
    document = documents[kind]
    first, *body = printed(document)
    assert document.answer.startswith(first.lstrip("✓✕? ").rstrip())
    assert 3 <= len(body) <= 20
    assert body[-1].startswith("More ")
    assert "--all prints the rest" in body[-1]
    everything = printed(document, everything=True)
    assert everything[0] == first
    assert not any(line.startswith("More ") for line in everything)


def test_many_cells_are_counted_and_the_worst_are_named(pages: ModuleType) -> None:
    swept = pages._sweep()
    cell = swept.cells[0]
    cells = tuple(
        cell.model_copy(update={"key": f"k{n}", "verdict": verdict, "axes": cell.axes | {"candidate": f"mine:f{n}"}})
        for n, verdict in enumerate(["pass"] * 20 + ["regression"] * 2)
    )
    rows: list[Row] = list(sweep_document(swept.model_copy(update={"cells": cells}), Path("index.html")).screen)
    assert [row.label for row in rows[:3]] == ["regression", "", "pass"]
    assert "mine:f20" in str(rows[0].text)
    assert "and 10 more cells" in [row.text for row in rows]
