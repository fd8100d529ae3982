"""The reader of MLC-LLM engine traces, on an excerpt of a real one, whole and damaged.

What it counts is compared with counts by regular expressions, which share no code with it.
"""

from __future__ import annotations

from pathlib import Path

from assay.harness.ingest import mlc_trace
from assay.harness.ingest.mlc_trace import StepTrace
from assay.harness.ingest.source_file import SourceFile

DATA = Path(__file__).parents[2] / "data" / "traces" / "mlc_engine.txt"
TEXT = DATA.read_text()


def read(tmp_path: Path, data: bytes | str) -> StepTrace:
    path = tmp_path / "trace.txt"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return mlc_trace.READER.steps(SourceFile.of(path))


def test_the_answers_of_the_excerpt_are_whole() -> None:
    """Its other facts are in tests/data/golden/ingest-several.txt."""
    facts = {fact.id: fact for fact in mlc_trace.READER.read(SourceFile.of(DATA)).facts}
    assert facts["request-1-sequence"].cites[0].text == "[engine debug] kv_cache_add_sequence_func_"
    assert facts["request-1-output"].text.startswith("Can you introduce yourself?I'd be happy")
    assert facts["request-1-output"].text.count("\n") == 4
    assert [(one.first, one.last) for one in facts["request-1-output"].cites] == [(75, 79)]
    assert facts["request-2-output"].text.endswith("3. **Course")


def test_a_line_that_no_rule_knows_is_counted_and_quoted(tmp_path: Path) -> None:
    lines = TEXT.splitlines()
    lines.insert(40, "[engine debug] teleport")
    lines.insert(60, "something else")
    file = read(tmp_path, "\n".join(lines)).file
    assert (file.read, file.unread) == (147, 2)
    assert [(one.first, one.text) for one in file.excerpts] == [(41, "[engine debug] teleport"), (61, "something else")]


def test_an_answer_ends_where_the_engine_writes(tmp_path: Path) -> None:
    text = "[engine debug] ***Add Request***\nMLC-LLM Output: one\ntwo\n[engine debug] nonsense\nthree\n"
    found = read(tmp_path, text)
    assert found.tracks[0].output == "one\ntwo\nthree"
    assert found.file.unread == 1


def test_every_prefix_is_read(tmp_path: Path) -> None:
    for length in range(0, len(TEXT), 97):
        found = read(tmp_path, TEXT[:length])
        assert found.file.read + found.file.unread == found.file.lines
    assert "trace-cut-off" in {one.rule for one in read(tmp_path, TEXT[:2500]).violations}


def test_other_files_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("INFO: started\n" * 50)
    assert not mlc_trace.READER.recognises(SourceFile.of(path))
    assert mlc_trace.READER.recognises(SourceFile.of(DATA))
