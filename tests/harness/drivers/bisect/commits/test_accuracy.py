"""``--with accuracy``: from the exit code of ``assay run`` to the measurement of a commit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.drivers.bisect.commits import measure
from assay.harness.drivers.bisect.commits.state import BisectSpec
from assay.harness.errors import UsageError
from assay.harness.judge.report import Report


def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Report, code: int | None) -> tuple[dict[str, object], list[str]]:
    words: list[str] = []

    def run(command: list[str], folder: Path, environment: dict[str, str], timeout: float, log: Path) -> int | None:
        words.extend([environment["PYTHONPATH"], *command])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "report.json").write_text(report.model_dump_json(by_alias=True))
        log.write_text("No such option")
        return code

    monkeypatch.setattr(measure, "_run", run)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    spec = BisectSpec(repo="r", good="g", bad="b", kernel="attn:forward", measure_with="accuracy", run_args=("--questions=8",))
    return measure.run_accuracy(spec, tmp_path, tmp_path / "logs" / "run", tmp_path / "log"), words


@pytest.mark.parametrize(
    ("code", "status", "regression"),
    [(0, None, False), (1, None, True), (3, "undecided", None), (None, "died", None), (-9, "died", None)],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    examples: ModuleType,
    code: int | None,
    status: str | None,
    regression: bool | None,
) -> None:
    report = examples.inconclusive()
    found, words = ran(monkeypatch, tmp_path, report, code)
    assert (found.get("status"), found.get("regression")) == (status, regression)
    assert ("reason" in found) == (status is not None)
    assert words[0] == str(tmp_path), "the worktree's modules"
    assert words[-1] == "--questions=8"
    if code == 3:
        assert found["reason"] == f"inconclusive: {report.headline}"


def test_rejected_arguments_end_the_bisection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: ModuleType) -> None:
    with pytest.raises(UsageError, match="No such option"):
        ran(monkeypatch, tmp_path, examples.inconclusive(), 2)
