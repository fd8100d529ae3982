"""``assay gate accept``, of runs whose evidence is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.evidence.baseline import read_all


def test_the_verdict_comes_first_and_a_regression_is_accepted_only_for_a_reason(
    recorded_runs: ModuleType, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_runs.answered(tmp_path / "run", right=lambda number, cached: False)
    command = ("accept", str(tmp_path / "run"), "--yes", "--baselines", str(tmp_path / "baselines"))
    assert call("gate", *command) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.startswith("REGRESSION (exit code 1): Partial run: Do not merge: ")
    assert "is a regression. Expected: a run that passes, or a reason" in said
    assert not read_all(tmp_path / "baselines")[0]

    assert call("gate", *command, "--widen", "the other model is meant to be asked") == 0
    assert {each.reason for each in read_all(tmp_path / "baselines")[0].values()} == {"the other model is meant to be asked"}
