"""``assay runs``, and ``assay report`` of reports without their evidence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.reports.write import write_reports


@pytest.fixture
def folder(tmp_path: Path, examples: ModuleType) -> Path:
    """Three runs with a report, one without, and a folder that is none."""
    for number, name in enumerate(("passing", "regression", "error")):
        report = getattr(examples, name)().model_copy(update={"created": f"2026-11-2{number}T10:00:00+00:00"})
        write_reports(report, tmp_path / "runs" / name)
    killed = tmp_path / "runs" / "killed"
    killed.mkdir()
    for name in ("manifest.json", "items.jsonl"):
        (killed / name).write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_runs_lists_the_newest_first_and_what_has_no_report(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert call("runs", folder) == 0
    out = capsys.readouterr().out
    assert out.index("Verdict error") < out.index("Verdict regression") < out.index("Verdict pass")
    assert "2026-11-21 10:00" in out
    assert "killed: it has no report.json; once the run has ended, make it: assay report" in out
    assert "notes" not in out


def test_report_prints_the_report_and_exits_with_its_verdict(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert call("report", folder / "regression") == 1
    first, *others, last = capsys.readouterr().out.splitlines()
    assert first.startswith("REGRESSION   ")
    assert last.split() == ["Report", str(folder / "regression" / "report.html")]
    assert len(others) <= 10
    assert call("report", folder / "regression", "--all") == 1
    assert len(capsys.readouterr().out.splitlines()) > 20
    assert call("report", folder / "passing", "--json", "-q") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["verdict"] == "pass"
    assert shown.err == ""
    assert call("report", folder / "passing", "-q") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_run_that_goes_on_is_not_judged(call: Callable[..., int], capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    lock = (
        "import sys, pathlib; from assay.harness.files import lock_folder; "
        "lock = lock_folder(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", lock, str(folder / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        assert call("report", folder / "killed") == 2
        assert f"in use by another run (process {other.pid})" in capsys.readouterr().err
        other.communicate()
    assert not (folder / "killed" / "report.json").exists()


def test_without_a_run_the_newest_is_shown_and_a_unique_beginning_names_one(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    monkeypatch.chdir(folder.parent)
    assert call("report") == 3
    assert "runs/error/report.html" in capsys.readouterr().out
    assert call("report", "regr") == 1
    assert "runs/regression/report.html" in capsys.readouterr().out
    assert call("report", "runs/pass") == 0
    assert "runs/passing/report.html" in capsys.readouterr().out
    (folder / "regression").rename(folder / "passed-not")
    assert call("report", "pass") == 2
    assert "2 runs in runs begin with pass: passed-not and passing." in " ".join(capsys.readouterr().err.split())
    for name in ("passed-not", "passing", "error"):
        (folder / name / "report.json").unlink()
    assert call("report") == 2
    assert "No run in runs has a report." in capsys.readouterr().err


@pytest.mark.parametrize(("run", "code"), [("nowhere", 2), ("notes", 2), ("killed", 3)])
def test_report_of_what_has_no_report(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], folder: Path, run: str, code: int
) -> None:
    assert call("report", folder / run) == code
    assert "What to do: " in capsys.readouterr().err
