from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.ingest.recognise import READERS, ingest
from assay.harness.ingest.result import UNKNOWN
from assay.harness.ingest.source_file import SourceFile

DATA = Path(__file__).parents[2] / "data"


def test_an_unknown_file_is_named(tmp_path: Path, seed_log: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("one\ntwo\n")
    alone, both = ingest([other]), ingest([seed_log, other])
    assert (alone.verdict, both.verdict) == ("inconclusive", "regression")
    file = both.documents[1].file
    assert (file.format, file.lines, file.read, file.unread) == (UNKNOWN, 2, 0, 2)


def test_a_log_that_an_engine_printed_its_trace_into_is_a_log(tmp_path: Path, seed_log: Path) -> None:
    mixed = tmp_path / "mixed.log"
    mixed.write_text((DATA / "traces/mlc_engine.txt").read_text() + seed_log.read_text())
    document = ingest([mixed]).documents[0]
    assert document.file.format == "sglang-log"
    assert "score-below-guessing" in {one.id for one in document.findings}


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("sglang_log/seed.log", "sglang-log"),
        ("traces/mlc_engine.txt", "mlc-llm-actions"),
        ("results/lm_eval_a", "lm-eval"),
        ("results/simple_evals_a/gsm8k_tiny.html", "simple-evals"),
        ("results/simple_evals_a/gsm8k_tiny.json", "simple-evals"),
        ("results/inspect_a.eval", "inspect-ai"),
        ("results/inspect_a.json", "inspect-ai"),
    ],
)
def test_every_kind_of_file_finds_its_reader_and_no_other_takes_it(name: str, format_: str) -> None:
    path = DATA / name
    document = ingest([path]).documents[0]
    assert document.file.format == format_
    assert document.file.read
    assert not document.file.unread
    assert document.facts or document.tables
    takers = [one.id for one in READERS if one.recognises(SourceFile.of(path))]
    assert len(takers) == 1
    assert format_.startswith(takers[0])


def test_a_log_proves_no_pass_and_its_name_does_not_matter(tmp_path: Path, server_log: Path) -> None:
    copy = tmp_path / "results.json"
    copy.write_bytes(server_log.read_bytes())
    result = ingest([copy])
    assert (result.documents[0].file.format, result.verdict, result.exit_code) == ("sglang-log", "inconclusive", 3)
    assert not result.next_steps
