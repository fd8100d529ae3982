from __future__ import annotations

import re
from pathlib import Path

import pytest
from scipy.stats import binom

from assay.harness.engines import failures
from assay.harness.ingest import sglang_log
from assay.harness.ingest.result import CitedFinding, FileDocument
from assay.harness.ingest.source_file import SourceFile


def ingested(tmp_path: Path, text: str) -> FileDocument:
    path = tmp_path / "x.log"
    path.write_text(text)
    return sglang_log.READER.read(SourceFile.of(path))


def by_id(document: FileDocument) -> dict[str, CitedFinding]:
    return {one.id: one for one in document.findings}


def test_figures_by_server_are_not_trusted_where_the_time_goes_back(seed_log: Path, tmp_path: Path) -> None:
    text = seed_log.read_text() + "\n[2026-01-24 18:00:00] The server is fired up and ready to roll!\n"
    found = by_id(ingested(tmp_path, text))
    assert not {"prefix-untested", "runaway-generations", "decode-not-shown"} & set(found)
    assert "score-below-guessing" in found


def test_the_p_value_is_that_of_the_exact_test(seed_log: Path) -> None:
    """What else is found in the seed's log is in tests/data/golden/ingest-log.txt."""
    evidence = by_id(sglang_log.READER.read(SourceFile.of(seed_log)))["score-below-guessing"].evidence[0]
    p = float(re.search(r"p = ([\d.e-]+)", evidence)[1])  # type: ignore[index]
    assert p == pytest.approx(binom.cdf(8, 64, 0.25), rel=0.02)


def test_a_name_that_a_shell_would_take_for_something_else_is_left_out(seed_log: Path, tmp_path: Path) -> None:
    text = seed_log.read_text().replace("attention_backend='triton'", "attention_backend='x; rm -rf y'")
    steps = ingested(tmp_path, text).next_steps
    assert steps
    assert not any("rm" in step for step in steps)


def test_requests_without_an_answer_are_counted(tmp_path: Path) -> None:
    start = "[2026-01-24 18:15:48] server_args=ServerArgs(attention_backend='x')"
    request = '[2026-01-24 18:15:48] INFO:     127.0.0.1:1 - "POST /v1/chat/completions{} HTTP/1.1" {}'
    lines = [start, request.format("", "200 OK"), request.format("?a=b", "500 Internal Server Error"), ""]
    finding = by_id(ingested(tmp_path, "\n".join(lines)))["requests-failed"]
    assert finding.diagnosis.startswith("1 of 2 requests were not answered")
    assert [one.first for one in finding.cites] == [3]


def test_a_crash_a_fallback_and_a_failed_test_are_warnings(tmp_path: Path) -> None:
    text = (
        "a/test_x.py::test_y [2026-01-24 18:15:48] Subprocess scheduler_0 (pid=9) crashed with exit code -9. Cleaning up\n"
        "[2026-01-24 18:15:48] SageAttention is not available, falling back to Triton\n"
        "FAILED\n"
    )
    found = by_id(ingested(tmp_path, text))
    assert {one: found[one].severity for one in found} == {"test-failed": "warning", "fallback": "warning", "crash": "warning"}


@pytest.mark.parametrize("name", ["gpu_memory", "missing_module"])
def test_a_server_that_failed_says_why_as_one_of_assays_own_does(name: str) -> None:
    log = Path(__file__).parents[2] / "data" / "server_failures" / f"{name}.log"
    failure = failures.read(log.read_text())
    facts = {fact.id: fact for fact in sglang_log.READER.read(SourceFile.of(log)).facts}
    assert failure.do in facts["cause"].text
    assert failure.line.rstrip(".") in facts["cause"].text


STAMP = "[2026-01-24 18:15:48] "
CRASH = (
    "[METRIC] mmlu_score=0.21875\n100%|██████████| 64/64 [01:04<00:00,  1.01s/it]\n"
    f"{STAMP}Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 77, token usage: 0.00, #running-req: 0, #queue-req: 0,\n"
    f"{STAMP}SageAttention is not available, falling back to Triton\n"
    f"{STAMP}CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def test_the_worst_finding_comes_first(tmp_path: Path) -> None:
    found = ingested(tmp_path, CRASH).findings
    assert [(one.id, one.severity) for one in found] == [
        ("crash", "warning"), ("fallback", "warning"), ("score-below-guessing", "info"),
    ]  # fmt: skip
    assert "memory" in found[0].diagnosis, "why it crashed"


@pytest.mark.parametrize(("invalid", "severity"), [("0.720", "warning"), ("0.050", "info"), ("0.000", None)])
def test_invalid_answers_are_named_beside_the_accuracy(tmp_path: Path, invalid: str, severity: str | None) -> None:
    found = ingested(tmp_path, f"Accuracy: 0.015\nInvalid: {invalid}\nLatency: 115.612 s\n").findings
    assert [(one.id, one.severity) for one in found] == ([("answers-invalid", severity)] if severity else [])
    if severity == "warning":
        assert found[0].diagnosis == "72 % of the answers are invalid, and Accuracy 0.015 counts them as wrong."
        assert [cite.first for cite in found[0].cites] == [2, 1]


COUNTS = "==================== 1 failed, 3 passed, 1 warning in 319.15s (0:05:19) ====================\n"
NAMED = (
    "=========================== short test summary info ============================\n"
    "FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6\n"
)


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        (NAMED + COUNTS, "test_mmlu", "assert 0.125 >= 0.6"),
        (
            COUNTS,
            "the log",
            "pytest counts 1 failed, 3 passed, 1 warning in 319.15s (0:05:19), but the log does not name a failure.",
        ),
    ],
)
def test_a_failed_test_is_found_where_no_line_began_it(tmp_path: Path, text: str, where: str, says: str) -> None:
    start = "============================= test session starts ==============================\n"
    (found,) = ingested(tmp_path, start + text).findings
    assert (found.id, found.where, found.diagnosis) == ("test-failed", where, says)
    assert not ingested(tmp_path, start + COUNTS.replace("1 failed, ", "")).findings


def test_what_an_engine_itself_warns_of_its_accuracy_is_found(tmp_path: Path) -> None:
    says = "Using FP8 KV cache but no scaling factors provided. Defaulting to 1.0. This may lead to less accurate results!"
    (found,) = ingested(tmp_path, f"{STAMP}Load weight begin. avail mem=1.00 GB\n{STAMP}WARNING: x.py:1: {says}\n").findings
    assert (found.id, found.severity, [cite.first for cite in found.cites]) == ("accuracy-warned", "warning", [2])
