"""``--with accuracy``: from the exit code of ``assay run`` to the measurement of a commit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.bisect.commits import executor
from assay.harness.bisect.commits.executor import accuracy_prober
from assay.harness.bisect.commits.state import BisectSpec, Measurement
from assay.harness.errors import UsageError
from assay.harness.judge.report import Report


def probed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Report, code: int | None, imported: str = "measured"
) -> tuple[Measurement, list[list[str]]]:
    ran: list[list[str]] = []

    def run(command: list[str], folder: Path, environment: dict[str, str], timeout: float, log: Path, gently: bool) -> int | None:
        ran.append([environment["PYTHONPATH"], *command])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "report.json").write_text(report.model_dump_json(by_alias=True))
        log.write_text("No such option")
        return code

    monkeypatch.setattr(executor, "run_command", run)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    spec = BisectSpec(repo="r", good="g", bad="b", kernel="attn:forward", measure_with="accuracy", run_args=("--questions=8",))
    (tmp_path / "logs").mkdir()
    made = Measurement.model_validate({"status": imported, "origin": "attn.py"})
    found = accuracy_prober(spec, lambda *_: made, tmp_path)("c", tmp_path / "logs" / "0001.log", False)
    return found, ran


@pytest.mark.parametrize(
    ("code", "status", "regression"),
    [(0, "measured", False), (1, "measured", True), (3, "undecided", None), (None, "died", None), (137, "died", None)],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: ModuleType, code: int | None, status: str, regression: bool | None
) -> None:
    report = examples.inconclusive()
    found, ran = probed(monkeypatch, tmp_path, report, code)
    assert (found.status, found.regression) == (status, regression)
    assert (found.reason != "") == (status != "measured")
    assert ran[0][0] == str(tmp_path), "the worktree's modules"
    assert ran[0][-1] == "--questions=8"
    if code == 3:
        assert found.reason == f"inconclusive: {report.headline}"


def test_a_commit_that_does_not_import_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: ModuleType
) -> None:
    found, ran = probed(monkeypatch, tmp_path, examples.inconclusive(), 0, imported="import")
    assert (found.status, ran) == ("import", [])


def test_rejected_arguments_end_the_bisection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: ModuleType) -> None:
    with pytest.raises(UsageError, match="No such option"):
        probed(monkeypatch, tmp_path, examples.inconclusive(), 2)
