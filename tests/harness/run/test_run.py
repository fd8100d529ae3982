"""One call from spec to report, where no server is needed."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import assay.harness.run.run as module
from assay import run
from assay.harness.config import RunSpec, make_spec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import FLOOR_REPEAT
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import prepare
from assay.harness.run.run import OpenRun
from assay.harness.run.run_folder import open_folder
from assay.harness.sides import ROLES


def spec(**flags: object) -> RunSpec:
    return make_spec({"questions": 8, "suites": ("accuracy",), "candidate": "sage_attn", "startup_timeout": 1.0} | flags)


def answer_everything(out: Path, runs: ModuleType) -> None:
    plan = prepare(spec())
    folder = open_folder(plan, out)
    for role, repeat in ((role, repeat) for role in ROLES for repeat in (0, FLOOR_REPEAT)):
        for item in plan.of("accuracy"):
            folder.append(runs.answer_of(role, item, repeat=repeat))
    runs.see_fault(folder, plan)
    runs.mark_traced(folder)


def test_a_run_with_all_its_answers_is_judged_without_a_server(tmp_path: Path, runs: ModuleType) -> None:
    answer_everything(tmp_path / "run", runs)
    shown = StringIO()
    report = run(spec(), tmp_path / "run", display=ProgressDisplay(Console(file=shown)))
    assert "All questions were already answered." in shown.getvalue()
    assert report.verdict == "inconclusive", "nothing shows that the candidate's kernel ran"
    assert [suite.id for suite in report.suites] == ["accuracy"]
    assert report.reproduce.startswith("assay run ")


def test_a_run_that_has_ended_is_sealed_until_it_is_resumed(tmp_path: Path, runs: ModuleType) -> None:
    answer_everything(tmp_path / "run", runs)
    run(spec(), tmp_path / "run")
    assert "records.jsonl" in RunFolder(tmp_path / "run").progress().sealed
    run(spec(), tmp_path / "run")  # which finds everything answered, and seals it again
    records = tmp_path / "run" / "records.jsonl"
    records.write_text(records.read_text().replace('"finish_reason":"stop"', '"finish_reason":"length"', 1))
    with pytest.raises(EvidenceError, match=r"records\.jsonl was changed"):
        run(spec(), tmp_path / "run")


@pytest.mark.parametrize(
    ("gate", "flags", "required"),
    [
        (False, {}, "require = () (default)"),
        (True, {}, "require = ('accuracy', 'greedy', 'logits', 'layers') (assay gate)"),
        (True, {"require": ("logits",)}, "require = ('logits',) (--require)"),
    ],
)
def test_a_gate_requires_every_suite_unless_the_policy_names_some(
    tmp_path: Path, gate: bool, flags: dict[str, Any], required: str
) -> None:
    shown = ProgressDisplay(Console(quiet=True))
    opened = OpenRun.open(spec(**flags), tmp_path / "run", gate=gate, display=shown)
    assert opened.plan.spec.policy.line("require") == required
    assert opened.folder.manifest().command.startswith(f"assay {'gate' if gate else 'run'} ")


def test_wrong_use_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no_such_backend"):
        run(spec(candidate="no_such_backend"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_server_that_cannot_be_reached_is_an_error_with_a_report(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    report = run(spec(reference=nowhere, candidate=nowhere), tmp_path / "run")
    assert (report.verdict, report.exit_code) == ("error", 3)
    assert report.failure is not None
    assert nowhere in report.failure.found


def test_a_kernel_that_changes_while_it_runs_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernel_that_changes.py"
    kernel.write_text("def attend(call):\n    return call.q\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "collect", lambda *_: kernel.write_text("def attend(call):\n    raise SystemExit\n"))
    report = run(spec(candidate="kernel_that_changes:attend"), tmp_path / "run")
    assert (report.verdict, report.exit_code) == ("error", 3)
    assert report.failure is not None
    assert report.failure.found.startswith("The candidate's kernel changed during the run (module kernel_that_changes)")
    assert RunFolder(tmp_path / "run").progress().sealed == {}


def test_an_interrupted_run_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "collect", interrupt)
    report = run(spec(), tmp_path / "run")
    assert report.verdict == "inconclusive", "no suite ran"
