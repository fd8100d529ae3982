from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

LOG = Path(__file__).parents[2] / "data/sglang_log/seed.log"


def test_ingest_prints_the_findings_and_exits_with_the_verdict(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("ingest", str(LOG)) == 1
    out = capsys.readouterr().out
    assert "525 of 525 lines read" in out
    assert "8 of 64 right" in out
    assert "assay check sage_attn_as_shipped" in out


def test_ingest_writes_its_reports(call: Callable[..., int], tmp_path: Path) -> None:
    assert call("ingest", str(LOG), "--out", str(tmp_path / "r")) == 1
    assert sorted(one.name for one in (tmp_path / "r").iterdir()) == ["ingest.html", "ingest.json", "ingest.junit.xml"]
    written = json.loads((tmp_path / "r/ingest.json").read_text())
    assert (written["schema"], written["exit_code"]) == ("assay.ingest/1", 1)


def test_ingest_prints_json_and_nothing_else(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("ingest", "--json", "--out", str(tmp_path), str(LOG)) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "regression"


def test_an_unknown_file_gives_no_verdict_and_a_missing_one_is_a_usage_error(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "x.txt"
    other.write_text("hello\n")
    assert call("ingest", str(other)) == 3
    assert "x.txt" in capsys.readouterr().out
    assert call("ingest", str(tmp_path / "none")) == 2


@pytest.mark.parametrize(
    ("says", "code", "sign"),
    [("MMLU >= 0.60", 1, "✕ refuted"), ("MMLU >= 0.10", 0, "✓ confirmed"), ("gsm8k >= 0.10", 3, "? undecided")],
)
def test_verify_claim_exits_with_what_the_evidence_says(
    says: str, code: int, sign: str, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("verify-claim", str(LOG), "--says", says) == code
    assert f"{sign}: {says}" in capsys.readouterr().out


def test_verify_claim_prints_json(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify-claim", str(LOG), "--json", "--says", "all tests passed", "--says", "mmlu > 0") == 1
    written = json.loads(capsys.readouterr().out)
    assert [one["outcome"] for one in written["claims"]] == ["refuted", "confirmed"]
    assert (written["schema"], written["exit_code"]) == ("assay.claims/1", 1)
