from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import UsageError
from assay.harness.ingest.recognise import UNKNOWN, ingest


def test_a_serious_finding_is_a_regression(seed_log: Path) -> None:
    result = ingest([seed_log])
    assert (result.verdict, result.exit_code) == ("regression", 1)
    assert "8 of 64 right" in result.headline
    assert result.next_steps[0] == "assay check sage_attn_as_shipped"
    assert len(result.documents[0].file.sha256) == 64


def test_a_log_cannot_prove_a_pass(server_log: Path) -> None:
    result = ingest([server_log])
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert not result.next_steps


def test_an_unknown_file_is_named(tmp_path: Path, seed_log: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("one\ntwo\n")
    alone, both = ingest([other]), ingest([seed_log, other])
    assert "notes.txt" in alone.headline
    assert "notes.txt" in both.headline
    assert alone.verdict == "inconclusive"
    file = both.documents[1].file
    assert (file.format, file.lines, file.read, file.unread) == (UNKNOWN, 2, 0, 2)


def test_the_name_of_a_file_does_not_matter(tmp_path: Path, seed_log: Path) -> None:
    copy = tmp_path / "results.json"
    copy.write_bytes(seed_log.read_bytes())
    assert ingest([copy]).documents[0].file.format == "sglang-log"


def test_no_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no file"):
        ingest([tmp_path / "missing.log"])
    with pytest.raises(UsageError):
        ingest([])


def test_a_result_reads_back(seed_log: Path) -> None:
    result = ingest([seed_log])
    assert type(result).model_validate_json(result.model_dump_json()) == result
