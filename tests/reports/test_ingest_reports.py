from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.result import Excerpt, IngestResult
from assay.reports import page, terminal
from assay.reports.document import Document
from assay.reports.ingest import _cited, _place, ingest_document

DATA = Path(__file__).parents[1] / "data"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


def ingested(*names: str) -> IngestResult:
    return ingest([Path(name) for name in names]).model_copy(update={"created": "2026-01-01T00:00:00Z"})


def test_what_was_read_says_the_same_in_every_medium(
    golden: Callable[[str, Document], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA)
    golden("ingest-log", ingest_document(ingested("sglang_log/seed.log")))
    golden("ingest-several", ingest_document(ingested("sglang_log/server_0.5.23.log", "traces/mlc_engine.txt", "traces/README.md")))


def test_the_page_has_the_findings_first_and_the_unread_lines_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA)
    html = page.to_html(ingest_document(ingested("sglang_log/seed.log")))
    order = [html.index(f'id="{name}"') for name in ("verdict", "findings", "next", "file-1", "unread")]
    assert order == sorted(order)
    assert "cuda_graph_max_bs" in html


def test_text_of_others_is_inert_and_what_was_not_read_is_shown(tmp_path: Path) -> None:
    """A log that a hostile model and a hostile command wrote to."""
    path = tmp_path / "x.log"
    path.write_text(f"[METRIC] mmlu_score=0.5\n{HOSTILE}\n[METRIC] {HOSTILE}\n", encoding="utf-8")
    document = ingest_document(ingest([path]))
    console = Console(file=io.StringIO(), width=120)
    terminal.render(document, console)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), page.to_html(document)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "1 of 3 lines" in text
    assert "line 3:  [METRIC] <script>" in console.file.getvalue()
    assert "<script>alert" not in page.to_html(document)


def test_places() -> None:
    finding = ingest([DATA / "sglang_log/seed.log"]).documents[0].findings[0]
    one, many = Excerpt(first=3, last=3, text=""), Excerpt(first=5, last=9, text="")
    says = [_cited(finding.model_copy(update={"cites": cites}), "event") for cites in ((), (one,), (many,), (one, many))]
    assert says == ["", "event 3", "events 5-9", "events 3, 5-9"]
    assert (_place(one, "line"), _place(many, "line")) == ("line 3", "lines 5-9")
