from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.ingest.claim import _CheckedClaim, verify


def check(path: Path, claim: str) -> _CheckedClaim:
    return verify([path], [claim]).claims[0]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("lm_eval_a", "assay_synthetic >= 0.6", "assay_synthetic < 0.6"),
        ("lm_eval_a", "exact_match,letter >= 60 %", "exact_match < 0.6"),
        ("lm_eval_b", "acc < 0.71", "acc >= 0.6"),
        ("sgl_eval_a", "gsm8k = 0", "accuracy > 0.5"),
        ("inspect_a.eval", "synthetic = 1", "accuracy < 0.5"),
        ("inspect_b.eval", "pattern = 0", "score > 0.5"),
        ("simple_evals_a/gsm8k_tiny.html", "gsm8k score = 0", "gsm8k > 0.5"),
        ("simple_evals_a/gsm8k_tiny.json", "gsm8k = 0", "output throughput < 100"),
        ("serving_a.jsonl", "median TTFT ms <= 45", "completed < 40"),
        ("junit_b.xml", "test_cached_prefix failed", "all tests passed"),
    ],
)
def test_results_are_evidence_for_claims(data: Path, name: str, right: str, wrong: str) -> None:
    path = data / name
    assert (check(path, right).outcome, check(path, wrong).outcome) == ("confirmed", "refuted")


def test_a_score_that_lm_eval_states_is_cited_with_its_line(data: Path) -> None:
    (cite, _) = check(data / "lm_eval_b", "assay_synthetic >= 0.9").cites  # the excerpt's own mean is the other one
    path, line = cite.partition(".json:")[0] + ".json", int(cite.partition(".json:")[2].partition(":")[0])
    assert '"exact_match,letter": 0.28' in Path(path).read_text().splitlines()[line - 1]


def test_a_standard_error_is_no_score(data: Path) -> None:
    assert check(data / "lm_eval_b", "exact_match_stderr,letter < 0.1").outcome == "undecided"


def test_the_message_of_a_failure_is_cited(data: Path) -> None:
    assert "query 3 sees key 7" in check(data / "junit_b.xml", "all tests passed").cites[0]


def test_a_percentage_may_be_meant_by_any_name_of_a_score(data: Path) -> None:
    assert check(data / "lm_eval_a", "exact_match >= 60").outcome == "undecided"


def test_damaged_results_are_an_error(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sgl_eval"
    folder.mkdir()
    for file in (data / "sgl_eval_a").rglob("*"):
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "metrics.json").write_text('{"name": ')
    with pytest.raises(EvidenceError, match="not JSON"):
        check(folder, "gsm8k = 0")
