from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.result import Excerpt, IngestResult
from assay.reports import page, terminal
from assay.reports.ingest import _cited, _place, ingest_document

TRACE = Path(__file__).parents[1] / "data/traces/mlc_engine.txt"
LOG = Path(__file__).parents[1] / "data/sglang_log/seed.log"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture(scope="module")
def result() -> IngestResult:
    return ingest([LOG])


@pytest.fixture
def hostile(tmp_path: Path) -> IngestResult:
    """A log that a hostile model and a hostile command wrote to."""
    path = tmp_path / "x.log"
    path.write_text(f"[METRIC] mmlu_score=0.5\ncommand=python3 {HOSTILE}\n{HOSTILE}\n", encoding="utf-8")
    return ingest([path])


def text_of(result: IngestResult) -> str:
    console = Console(file=io.StringIO(), width=120)
    terminal.render(ingest_document(result), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def to_html(result: IngestResult) -> str:
    return page.to_html(ingest_document(result))


def shown(page: str) -> str:
    return " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def test_the_text_has_findings_lines_facts_and_the_conclusion(result: IngestResult) -> None:
    text = text_of(result)
    parts = ["serious: test_mmlu: mmlu 0.125", _cited(result.documents[0].findings[0], "line"), result.next_steps[-1],
             "Tests (3 passed, 1 failed)"]  # fmt: skip
    assert sorted(parts, key=text.index) == parts


def test_the_page_has_the_findings_first_and_the_unread_lines_last(result: IngestResult) -> None:
    page = to_html(result)
    order = [page.index(f'id="{name}"') for name in ("verdict", "findings", "next", "file-1", "unread")]
    assert order == sorted(order)
    text = shown(page)
    for part in ("8 of 64 right", "Nothing: all of it was read.", "cuda_graph_max_bs", *result.next_steps):
        assert part in text


def test_the_page_names_an_unknown_file(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("one\n")
    text = shown(to_html(ingest([other])))
    assert "Not recognised." in text
    assert "1 of 1 line." in text


def test_what_was_not_read_is_shown(hostile: IngestResult) -> None:
    assert hostile.documents[0].file.unread == 1
    assert "line 3:  <script>" in text_of(hostile)
    assert "1 of 3 lines" in shown(to_html(hostile))


def test_text_of_others_is_inert(hostile: IngestResult) -> None:
    for text in (text_of(hostile), to_html(hostile)):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<script>alert" not in to_html(hostile)


def test_files_without_findings_are_named_together_and_their_facts_are_printed() -> None:
    result = ingest([LOG, TRACE])
    assert f"Nothing was found in {TRACE}." in shown(to_html(result))
    assert "Segments of request 1: " in text_of(result)


def test_places() -> None:
    finding = ingest([LOG]).documents[0].findings[0]
    one, many = Excerpt(first=3, last=3, text=""), Excerpt(first=5, last=9, text="")
    says = [_cited(finding.model_copy(update={"cites": cites}), "event") for cites in ((), (one,), (many,), (one, many))]
    assert says == ["", "event 3", "events 5-9", "events 3, 5-9"]
    assert (_place(one, "line"), _place(many, "line")) == ("line 3", "lines 5-9")
