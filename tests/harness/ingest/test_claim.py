from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.claim import CheckedClaims, Outcome, _check, _parse, verify
from assay.harness.ingest.result import Statement
from assay.reports.write import write_reports

SUMMARY = "ALL TESTS PASSED, MMLU ~0.60+, ready for production"


def outcomes(checked: CheckedClaims) -> list[Outcome]:
    return [one.outcome for one in checked.claims]


def number(name: str, value: float) -> Statement:
    return Statement("number", (name,), value, "x.log:7", f"{name}={value}")


def test_the_published_summary_is_refuted_by_its_log_claim_by_claim(seed_log: Path) -> None:
    checked = verify([seed_log], [SUMMARY])
    assert [(one.claim, one.outcome) for one in checked.claims] == [
        ("ALL TESTS PASSED", "refuted"),
        ("MMLU ~0.60+", "refuted"),
        ("ready for production", "undecided"),
    ]
    assert checked.exit_code == 1
    lines = seed_log.read_text().splitlines()
    cited = [one.cites[0].removeprefix(f"{seed_log}:").partition(":")[0] for one in checked.claims[:2]]
    assert lines[int(cited[0]) - 1] == "FAILED"
    assert "mmlu_score=0.125" in lines[int(cited[1]) - 1]


def test_what_the_log_says_is_confirmed(seed_log: Path) -> None:
    says = ["MMLU >= 12.5 %", "test_mmlu failed", "humanities < 0.1", "Output token throughput > 96", "test_latency passed"]
    checked = verify([seed_log], says)
    assert outcomes(checked) == ["confirmed"] * 5
    assert checked.exit_code == 0


def test_what_the_log_does_not_say_is_undecided(seed_log: Path) -> None:
    checked = verify([seed_log], ["gsm8k >= 0.5", "test_nothing passed"])
    assert outcomes(checked) == ["undecided"] * 2
    assert checked.exit_code == 3


def test_a_refuted_claim_outweighs_an_undecided_one(seed_log: Path) -> None:
    assert verify([seed_log], ["gsm8k >= 0.5", "mmlu >= 0.5", "mmlu > 0.1"]).exit_code == 1


@pytest.mark.parametrize(
    ("claim", "value", "outcome"),
    [
        ("MMLU >= 0.6", 0.6, "confirmed"),
        ("MMLU > 0.6", 0.6, "refuted"),
        ("MMLU ≥ 60%", 0.6, "confirmed"),
        ("MMLU <= 0.6", 0.61, "refuted"),
        ("MMLU < 0.6", 0.59, "confirmed"),
        ("MMLU = 0.60", 0.604, "confirmed"),  # rounds to it
        ("MMLU = 0.60", 0.606, "refuted"),
        ("MMLU == 60.4 %", 0.6041, "confirmed"),
        ("MMLU is 0.6", 0.64, "confirmed"),
        ("MMLU: 0.60", 0.71, "refuted"),
        ("MMLU ~ 0.60", 0.608, "confirmed"),
        ("MMLU ~ 0.60", 0.62, "refuted"),
        ("MMLU ~0.60+", 0.72, "confirmed"),
        ("MMLU ~0.60+", 0.591, "confirmed"),
        ("MMLU ~0.60+", 0.58, "refuted"),
        ("MMLU score >= 6e-1", 0.6, "confirmed"),
        ("mmlu accuracy of 60 %", 0.6, "confirmed"),
        ("MMLU >= 0.6", math.nan, "refuted"),
        ("accuracy >= 0.6", 0.5, "undecided"),  # of what?
        ("MMLU >= 60", 0.65, "undecided"),  # percent may be meant
        ("MMLU >= 0.60, or so", 0.65, "undecided"),
        ("mml >= 0.6", 0.65, "undecided"),
        ("MMLU", 0.65, "undecided"),
    ],
)
def test_numbers(claim: str, value: float, outcome: str) -> None:
    assert _check(_parse(claim), [number("mmlu_score", value)]).outcome == outcome


def test_one_contradiction_is_enough() -> None:
    found = _check(_parse("MMLU >= 0.6"), [number("mmlu_score", 0.7), number("mmlu_score", 0.5)])
    assert (found.outcome, found.cites) == ("refuted", ("x.log:7: mmlu_score=0.5",))
    assert found.why == "the evidence states 0.5"


@pytest.mark.parametrize("said", ["score", "Accuracy", "acc"])
def test_a_score_without_a_name_is_any_word_for_it(said: str) -> None:
    stated = [number("Score", 0.5), number("mmlu_score", 0.9)]
    found = _check(_parse(f"{said} >= 0.6"), stated)
    assert (found.outcome, found.why) == ("refuted", "the evidence states 0.5")


def test_the_score_of_another_metric_is_not_taken() -> None:
    assert _check(_parse("MMLU >= 0.6"), [number("mmlu_latency", 64.0), number("mmlu_pro_score", 0.7)]).outcome == "undecided"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["passed", "xfailed"], "confirmed"),
        (["passed", "failed"], "refuted"),
        (["passed", "error"], "refuted"),
        (["passed", ""], "undecided"),
        (["passed", "skipped"], "undecided"),
        ([], "undecided"),
    ],
)
def test_all_tests(outcomes: list[str], expected: str) -> None:
    stated = [Statement("test", (f"a.py::test_{i}",), one, "x:1", one) for i, one in enumerate(outcomes)]
    assert _check(_parse("all tests passed"), stated).outcome == expected


def test_a_failure_that_only_the_summary_counts_refutes(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("============ test session starts ============\n========= 1 failed, 3 passed in 3.00s =========\n")
    assert outcomes(verify([log], ["all tests passed"])) == ["refuted"]


def test_a_log_that_is_cut_off_before_the_outcome_confirms_nothing(seed_log: Path, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(seed_log.read_bytes().partition(b'Traceback (most recent call last):\n  File "/root')[0])
    assert outcomes(verify([log], ["all tests passed", "test_latency passed"])) == ["undecided", "confirmed"]


def test_tests_that_a_log_or_a_suite_counts_and_does_not_list_confirm_nothing(tmp_path: Path) -> None:
    def outcome(name: str, text: str) -> Outcome:
        (tmp_path / name).write_text(text)
        return verify([tmp_path / name], ["all tests passed"]).claims[0].outcome

    rule = "=" * 30
    start, passed = (f"{rule} test session starts {rule}\ncollected 3 items", "test/a.py::TestX::test_{} PASSED  [ 33%]\n")
    two = passed.format("a") + passed.format("b")
    assert outcome("cut.log", f"{start}\n\n{two}") == "undecided"
    assert outcome("all.log", f"{start}\n\n{two}{passed.format('c')}\n{rule} 3 passed in 1.00s {rule}\n") == "confirmed"
    deselected = f"{start} / 1 deselected / 2 selected\n\n{two}\n{rule} 2 passed, 1 deselected in 1.00s {rule}\n"
    assert outcome("deselected.log", deselected) == "confirmed"
    suite = '<testsuites><testsuite name="s" errors="0" failures="{}" tests="{}"><testcase name="a"/></testsuite></testsuites>'
    assert outcome("fails.xml", suite.format(1, 2)) == "refuted"
    assert outcome("lacks.xml", suite.format(0, 2)) == "undecided"
    assert outcome("whole.xml", suite.format(0, 1)) == "confirmed"


def test_junit_is_evidence(tmp_path: Path) -> None:
    junit = tmp_path / "x.xml"
    junit.write_text(
        '<testsuites><testsuite name="s"><testcase name="test_a" classname="m"/><testcase name="test_b" classname="m">'
        '<failure message="no"/></testcase></testsuite></testsuites>'
    )
    checked = verify([junit], ["test_a passed", "all tests passed", "test_b passed"])
    assert outcomes(checked) == ["confirmed", "refuted", "refuted"]


def test_a_run_of_assay_is_evidence(tmp_path: Path, examples: ModuleType) -> None:
    report = examples.regression()
    write_reports(report, tmp_path)
    tally = next(one for suite in report.suites for one in suite.tallies if suite.id == "accuracy" and one.role == "candidate")
    share = tally.right / tally.total
    checked = verify([tmp_path], [f"accuracy >= {share}", f"accuracy > {share + 0.01}", f"accuracy <= {share}"])
    assert outcomes(checked) == ["confirmed", "refuted", "confirmed"]  # of the candidate, never of the reference
    named = [
        suite.model_copy(update={"title": "Multiple-choice questions of cais/mmlu"}) if suite.id == "accuracy" else suite
        for suite in report.suites
    ]
    write_reports(report.model_copy(update={"suites": tuple(named)}), tmp_path)
    assert outcomes(verify([tmp_path], [f"MMLU >= {share}", "gsm8k >= 0.1"])) == ["confirmed", "undecided"]


def test_evidence_that_nobody_reads_is_an_error(tmp_path: Path) -> None:
    other = tmp_path / "x.bin"
    other.write_bytes(b"\0\1")
    with pytest.raises(EvidenceError, match="No reader knows"):
        verify([other], ["a >= 1"])
    with pytest.raises(UsageError, match="no file"):
        verify([tmp_path / "missing"], ["a >= 1"])
    with pytest.raises(UsageError, match="No claim"):
        verify([other], [" "])


def test_a_damaged_junit_file_is_an_error(tmp_path: Path) -> None:
    junit = tmp_path / "x.xml"
    junit.write_text('<testsuites><testsuite name="s"><testcase')
    with pytest.raises(EvidenceError, match="not JUnit XML"):
        verify([junit], ["all tests passed"])


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        ("throughput >= 90 tok/s", "confirmed"),
        ("throughput >= 100 tokens per second", "refuted"),
        ("output throughput 96+ tok/s", "undecided"),
        ("output throughput: 96+ tok/s", "confirmed"),
        ("request throughput > 20 req/min", "confirmed"),
        ("throughput > 50 ms", "undecided"),
    ],
)
def test_a_rate_is_decided_in_its_unit(claim: str, outcome: str, seed_log: Path) -> None:
    assert outcomes(verify([seed_log], [claim])) == [outcome]


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [("TTFT < 0.1 s", "confirmed"), ("TTFT < 10 ms", "refuted"), ("latency < 0.001 min", "refuted"), ("TTFT < 1 s", "confirmed")],
)
def test_a_time_is_decided_in_its_unit(claim: str, outcome: str) -> None:
    path = Path(__file__).parents[2] / "data" / "results" / "serving_a.jsonl"
    assert outcomes(verify([path], [claim])) == [outcome]
