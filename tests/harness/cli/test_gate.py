"""``assay gate accept``, of runs whose evidence is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.evidence.baseline import read_baseline


def test_the_verdict_comes_first_and_only_the_reference_is_accepted(
    recorded_runs: ModuleType, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_runs.answered(tmp_path / "run", right=lambda number, cached: False)
    assert call("gate", "accept", str(tmp_path / "run"), "--baselines", str(tmp_path / "baselines")) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.startswith("REGRESSION ")
    assert "Accepted the reference: " in said
    (place,) = (tmp_path / "baselines").iterdir()
    assert read_baseline(place).key.backend == "torch_native"


def _cut(runs: ModuleType, path: Path) -> None:
    runs.answered(path)
    records = path / "records.jsonl"
    lines = records.read_text().splitlines()
    records.write_text("".join(f"{line}\n" for line in lines[: len(lines) * 9 // 10]))


@pytest.mark.parametrize(
    ("make", "verdict"),
    [
        (lambda runs, path: runs.answered(path, counted=False), "INCONCLUSIVE "),
        (lambda runs, path: runs.fails(path), "ERROR "), (_cut, "INCONCLUSIVE "),
        (lambda runs, path: runs.logits(path), "INCONCLUSIVE "),
    ],
)  # fmt: skip
def test_a_run_without_a_verdict_is_refused(
    recorded_runs: ModuleType, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    make: Callable[[ModuleType, Path], object], verdict: str,
) -> None:  # fmt: skip
    make(recorded_runs, tmp_path / "run")
    command = ("accept", str(tmp_path / "run"), "--baselines", str(tmp_path / "baselines"))
    assert call("gate", *command) == 2
    assert " ".join("".join(capsys.readouterr()).split()).startswith(verdict)
    assert not (tmp_path / "baselines").exists()


def test_a_bench_is_not_a_run_to_be_accepted(call: Callable[..., int], tmp_path: Path, recorded_runs: ModuleType) -> None:
    recorded_runs.benches.write_bench(tmp_path / "bench")
    assert call("gate", "accept", str(tmp_path / "bench"), "--baselines", str(tmp_path / "baselines")) in (2, 3)
    assert not (tmp_path / "baselines").exists()


def test_a_pass_of_some_suites_is_accepted_and_says_what_was_left_out(
    recorded_runs: ModuleType, call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_runs.answered(tmp_path / "run")
    assert call("gate", "accept", str(tmp_path / "run"), "--baselines", str(tmp_path / "baselines")) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.startswith("PASS ")
    assert "without logits and layers · " in said
