from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from assay.harness.ingest.result import IngestResult

LOG = Path(__file__).parents[2] / "data/sglang_log/seed.log"


def test_ingest_prints_the_findings_and_exits_with_the_verdict(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("ingest", str(LOG)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0].startswith("REGRESSION   mmlu 0.125 "), len(lines) <= 12) == (True, True)
    assert call("ingest", str(LOG), "--all") == 1
    out = capsys.readouterr().out
    assert "lines read: 525 of 525" in out
    assert "8 of 64 right" in out
    assert "assay check sage_attn_as_shipped" in out


def test_ingest_writes_its_reports(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, junit = tmp_path / "i.html", tmp_path / "i.xml"
    assert call("ingest", str(LOG), "--json", "--html", str(page), "--junit", str(junit)) == 1
    written = json.loads(capsys.readouterr().out)
    assert "8 of 64 right" in page.read_text()
    [failure] = ElementTree.parse(junit).iter("failure")
    assert "8 of 64 right" in failure.get("message", "")
    assert (written["schema"], written["exit_code"]) == ("assay.ingest/1", 1)
    assert len(IngestResult.model_validate(written).documents[0].file.sha256) == 64


def test_an_unknown_file_gives_no_verdict_and_a_missing_one_is_a_usage_error(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "x.txt"
    other.write_text("hello\n")
    assert call("ingest", str(other)) == 3
    assert "x.txt" in capsys.readouterr().out
    assert call("ingest", str(tmp_path / "none")) == 2
