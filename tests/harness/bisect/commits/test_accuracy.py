"""``--with accuracy``: from the exit code of ``assay run`` to the measurement of a commit."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.bisect.commits import measure
from assay.harness.bisect.commits.measure import CommitProbing, Forks
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.state import BisectSpec, Measurement
from assay.harness.bisect.commits.worktrees import worktrees
from assay.harness.errors import UsageError
from assay.harness.judge.report import Report
from assay.harness.sweep.executor import Workplace


def probed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    histories: ModuleType,
    report: Report,
    code: int | None,
    imported: str = "measured",
) -> tuple[Measurement, list[list[str]]]:
    ran: list[list[str]] = []

    def run(
        command: list[str], folder: Path, environment: dict[str, str], timeout: float, log: Path, gently: bool, cancelled: object
    ) -> int | None:
        ran.append([environment["PYTHONPATH"], environment["CUDA_VISIBLE_DEVICES"], *command])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "report.json").write_text(report.model_dump_json(by_alias=True))
        log.write_text("No such option")
        return code

    monkeypatch.setattr(measure, "_run_command", run)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made = Measurement.model_validate({"status": imported, "origin": "attn.py"})
    monkeypatch.setattr(Forks, "run", lambda *_: made)
    repo = histories.make(tmp_path / "repo", histories.straight(2), lambda i: f"NUMBER = {i}\n")
    spec = BisectSpec(
        repo=str(repo.path), good="g", bad="b", kernel="attn:forward", measure_with="accuracy", run_args=("--questions=8",)
    )
    place = Workplace(tmp_path, {}, "here", 1, {"CUDA_VISIBLE_DEVICES": "3"}, lambda line: None, threading.Event())
    with worktrees(Repository(repo.path)) as folder:
        return CommitProbing(spec, repo.commits[1], folder)(place), ran


@pytest.mark.parametrize(
    ("code", "status", "regression"),
    [(0, "measured", False), (1, "measured", True), (3, "undecided", None), (None, "died", None), (137, "died", None)],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    histories: ModuleType,
    examples: ModuleType,
    code: int | None,
    status: str,
    regression: bool | None,
) -> None:
    report = examples.inconclusive()
    found, ran = probed(monkeypatch, tmp_path, histories, report, code)
    assert (found.status, found.regression) == (status, regression)
    assert (found.reason != "") == (status != "measured")
    assert Path(ran[0][0]).name == "repo", "the worktree's modules"
    assert Path(ran[0][0]).is_relative_to(tempfile.gettempdir())
    assert ran[0][1] == "3", "the GPU of its place"
    assert ran[0][-1] == "--questions=8"
    if code == 3:
        assert found.reason == f"inconclusive: {report.headline}"


def test_a_commit_that_does_not_import_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, histories: ModuleType, examples: ModuleType
) -> None:
    found, ran = probed(monkeypatch, tmp_path, histories, examples.inconclusive(), 0, imported="import")
    assert (found.status, ran) == ("import", [])


def test_rejected_arguments_end_the_bisection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, histories: ModuleType, examples: ModuleType
) -> None:
    with pytest.raises(UsageError, match="No such option"):
        probed(monkeypatch, tmp_path, histories, examples.inconclusive(), 2)
