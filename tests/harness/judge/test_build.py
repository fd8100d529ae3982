"""Reports from synthetic evidence on disk."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from assay.harness import judge
from assay.harness.config import make_spec
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import FailureResult
from assay.harness.evidence.records import Answer
from assay.harness.judge import latency
from assay.harness.judge.build import CLAIMS, build, policy_claim
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.report import Report, read_report
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check
from assay.reports.wording.verdict import headline, reasons

QUESTIONS, GREEDY, COLD = 160, 128, 16
TORCH = ("aten::scaled_dot_product_attention",)

Evidence = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def sound(recorded_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A complete run of two equal servers."""
    folder: RunFolder = recorded_runs.answered(tmp_path_factory.mktemp("sound") / "run")
    return folder


@pytest.fixture
def evidence(sound: RunFolder, recorded_runs: ModuleType, tmp_path: Path) -> Evidence:
    """A function that writes a complete run; its arguments are those of `recorded_runs.answered`."""

    def write(**made: Any) -> RunFolder:
        path = tmp_path / "run"
        folder: RunFolder = recorded_runs.answered(path, **made) if made else recorded_runs.runs.copied(sound, path)
        return folder

    return write


@pytest.fixture
def broken(recorded_runs: ModuleType) -> dict[str, Any]:
    """A candidate that answers only questions without a cached prefix, and every prompt with another text."""
    return {"right": recorded_runs.without_prefix, "greedy": lambda number: "no"}


@pytest.fixture
def nothing(recorded_runs: ModuleType, tmp_path: Path) -> RunFolder:
    """A run without servers."""
    folder: RunFolder = recorded_runs.nothing_happened(tmp_path / "run")
    return folder


def check_of(report: Report, id_: str) -> Check:
    (found,) = [check for check in report.checks if check.id == id_]
    return found


def test_a_sound_run_passes(evidence: Evidence) -> None:
    report = build(evidence())
    assert (report.verdict, report.exit_code, report.findings) == ("pass", 0, ())
    assert {check.status for check in report.checks} == {"ok", "not checked"}
    assert all(suite.synthetic for suite in report.suites)


def test_the_seed_case_is_found_by_its_condition(evidence: Evidence, broken: dict[str, Any]) -> None:
    report = build(evidence(**broken))
    assert (report.verdict, report.exit_code) == ("regression", 1)
    (finding,) = report.findings
    assert finding.where == "cached prefix >= 16"
    assert finding.claim is not None
    assert finding.claim.values["intact"] == [["0", 16, 16, 16]]
    assert finding.claim.values["broken"] == [[">= 16", 0, 144, 144]]
    assert report.suites[0].tallies[1].unparsed == QUESTIONS - COLD
    assert len(report.suites[1].divergences) == GREEDY


def test_a_kernel_that_was_called_but_answered_with_pytorchs_attention_is_no_pass(evidence: Evidence) -> None:
    report = build(evidence(ran=TORCH))
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    checks = {check.id: check for check in report.checks}
    assert checks["kernel-ran-extend"].status == "ok"
    assert checks["kernel-executed-extend"].status == "failed"
    found = state("reference-kernels-ran", phase="extend", backend="sage_attn", names=TORCH)
    assert checks["kernel-executed-extend"].outcome == found


def test_a_workload_that_does_not_see_a_seeded_fault_is_no_pass(evidence: Evidence) -> None:
    report = build(evidence(see={"lost": 0}))
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    check = check_of(report, "workload-sensitive")
    nothing = state("fault-in-answers", lost=0, gained=0, questions=8, p=1.0)
    assert check.outcome.id == "faults-seen"
    assert ["accuracy", False, nothing] in check.outcome.values["parts"]
    assert report.sensitivity is not None


def test_a_fault_that_changed_no_call_is_no_pass(evidence: Evidence) -> None:
    report = build(evidence(see={"changed": 0}))
    check = check_of(report, "workload-sensitive")
    assert (report.verdict, check.status) == ("inconclusive", "missing")
    assert check.outcome == state("fault-changed-nothing", fault="mask-top-left", changed=0, calls=40, why="")


def test_without_a_seeded_fault_there_is_no_pass(evidence: Evidence) -> None:
    folder = evidence()
    shutil.rmtree(folder.server_folder("candidate") / "sensitivity")
    assert build(folder).verdict == "inconclusive"


@pytest.mark.parametrize("suite", ["accuracy", "greedy"])
def test_an_answer_to_another_prompt_does_not_count_as_answered(evidence: Evidence, suite: str) -> None:
    folder = evidence()
    records = folder.path / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if f'"suite":"{suite}"' in line)
    changed = Answer.model_validate_json(lines[number]).model_copy(update={"prompt_hash": "another"})
    records.write_text("".join([*lines[:number], changed.model_dump_json() + "\n", *lines[number + 1 :]]))
    report = build(folder)
    check = check_of(report, "all-answered")
    assert (report.verdict, check.status) == ("inconclusive", "missing")
    assert check.outcome.id == "another-prompt-answered"
    assert [check.outcome.values[name] for name in ("answered", "asked", "mismatched")] == [575, 576, 1]


def test_a_failure_says_its_cause_and_its_remedy_and_nothing_that_contradicts_it(evidence: Evidence) -> None:
    folder = evidence()
    error = EngineError("The server failed: KeyError: 'x'", "", "read it.", details="log\n  line", cause="port")
    folder.update(folder.progress().model_copy(update={"failure": FailureResult.of("engine", error), "servers": ()}))
    report = build(folder)
    assert headline(report) == "No verdict: the server failed: KeyError: 'x'"
    assert reasons(report) == ["What to do: read it."]
    assert report.failure is not None
    assert (report.failure.cause, report.failure.details) == ("port", "log\n  line")
    assert {check.status for check in report.checks} == {"ok"}, "no list of what the run did not come to"


def test_a_run_in_which_nothing_happened_is_no_pass(nothing: RunFolder) -> None:
    report = build(nothing)
    assert (report.verdict, report.exit_code, report.suites) == ("inconclusive", 3, ())
    assert report.candidate.engine == "never ready"


def test_a_report_needs_no_kernel(evidence: Evidence) -> None:
    folder = evidence()
    here = [path for kind in ("json", "jsonl") for path in folder.path.rglob(f"*.{kind}")]
    for path in here:
        path.write_text(path.read_text().replace("sage_attn", "no.such:kernel"))
    assert build(folder).verdict == "pass", "what it claims to compute is in the evidence"


def test_no_claim_is_forgotten() -> None:
    """Every module of the judge that makes a claim is looped over, or judged after the others."""
    names = [name for _, name, _ in pkgutil.iter_modules(judge.__path__)]
    modules = [importlib.import_module(f"{judge.__name__}.{name}") for name in names]
    made = {module.__name__: module.claim for module in modules if hasattr(module, "claim")}
    after = {latency.claim}
    assert after < set(made.values())
    assert set(made.values()) - after == {claim for claim in CLAIMS if claim.__name__ == "claim"}


@pytest.mark.parametrize(
    ("flags", "noise", "status", "found"),
    [
        ({}, {"reference": "int8_qk", "candidate": ""}, "ok", state("policy-strict")),
        ({}, {"candidate": "int8_qk"}, "not checked", state("policy-weakened", lines=[], declared="int8_qk")),
        (
            {"margin": 0.1, "alpha": 0.2}, {}, "not checked",
            state("policy-weakened", lines=["margin = 0.1 (--margin)", "alpha = 0.2 (--alpha)"], declared=""),
        ),
    ],
)  # fmt: skip
def test_a_weaker_policy_is_named(
    tmp_path: Path, flags: dict[str, Any], noise: dict[str, str], status: str, found: Statement
) -> None:
    manifest = SimpleNamespace(noise=noise, model="tiny", created="")
    folder = SimpleNamespace(path=tmp_path / "run")
    run = SimpleNamespace(spec=make_spec(flags), manifest=manifest, folder=folder)
    check = policy_claim(cast(RunEvidence, run), ()).checks[-1]
    assert (check.id, check.status, check.outcome) == ("policy", status, found)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), ("not json", "is damaged"), ('{"schema": "assay.report/3"}', "it has no verdict")],
)
def test_the_reader_says_what_is_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvidenceError, match=says):
        read_report(path)
