"""From a measurement, or the exit code of ``assay run``, to the outcome of a probe; and what changed between two commits."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.drivers.bisect.commits import measure
from assay.harness.drivers.bisect.commits.outcome import changes, outcome_of
from assay.harness.drivers.bisect.commits.state import BisectSpec, CallErrors, Measurement
from assay.harness.errors import UsageError
from assay.reports.json_report import to_json
from assay.reports.wording.verdict import headline


def spec(**over: object) -> BisectSpec:
    return BisectSpec.model_validate({"repo": "r", "good": "g", "bad": "b", "kernel": "attn:forward"} | over)


def measured(*owns: tuple[float, ...]) -> Measurement:
    rows = (
        CallErrors(call=f"call {i}", condition={"layer": str(i % 2), "prefix": "01"[i % 2]}, own=own, bound=0.01)
        for i, own in enumerate(owns)
    )
    return Measurement(status="measured", rows=tuple(rows))


def test_the_worst_head_of_the_worst_call_decides() -> None:
    right = outcome_of(measured((0.001, 0.009), (0.0, 0.01)), spec())
    assert (right.outcome, right.worst) == ("good", 1.0)
    wrong = outcome_of(measured((0.001, 0.009), (0.011, 0.01)), spec())
    assert (wrong.outcome, wrong.worst) == ("bad", pytest.approx(1.1))
    assert (wrong.where, wrong.own) == ("call 1, head 0", 0.011)
    assert outcome_of(measured((0.0, math.inf)), spec()).outcome == "bad"
    nothing = outcome_of(measured(), spec())
    assert (nothing.outcome, nothing.status) == ("skip", "no call")


@pytest.mark.parametrize(
    ("status", "raises", "outcome"),
    [
        ("raised", "skip", "skip"), ("died", "skip", "skip"), ("raised", "bad", "bad"), ("died", "bad", "bad"),
        ("build", "bad", "skip"), ("undecided", "bad", "skip"),
    ],
)  # fmt: skip
def test_a_commit_that_cannot_be_measured(status: str, raises: str, outcome: str) -> None:
    found = outcome_of(Measurement.model_validate({"status": status, "reason": "x"}), spec(raises=raises))
    assert (found.outcome, found.status, found.reason) == (outcome, status, "x")


def test_changes_by_layer_head_and_condition() -> None:
    before = measured((0.0, 0.0), (0.0, 0.02))
    at = measured((0.0, 0.02), (0.0, 0.02))
    found = {change.axis: change for change in changes(at, before)}
    assert found["layer"].failing == ("0", "1")
    assert found["layer"].new == ("0",)
    assert found["prefix"].new == ("0",)
    assert (found["head"].failing, found["head"].new, found["head"].values) == (("1",), (), ("0", "1"))
    assert {c.axis: c.new for c in changes(at, None)}["head"] == ("1",)


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [(0, None, "good"), (1, None, "bad"), (2, None, ""), (3, "undecided", "skip"), (None, "died", "skip"), (-9, "died", "skip")],
)
def test_an_accuracy_run_decides_by_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: ModuleType, code: int | None, status: str | None, outcome: str
) -> None:
    words: list[str] = []

    def run(command: list[str], folder: Path, *, environment: dict[str, str], log: Path, seconds: float) -> int | None:
        words.extend([environment["PYTHONPATH"], *command])
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "report.json").write_text(to_json(examples.inconclusive()))
        log.write_text("No such option")
        return code

    monkeypatch.setattr(measure, "run_command", run)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    asked = (spec(measure_with="accuracy", run_args=("--questions=8",)), tmp_path, tmp_path / "logs" / "run", tmp_path / "log")
    if code == 2:
        with pytest.raises(UsageError, match="No such option"):
            measure._run_accuracy(*asked)
        return
    found = measure._run_accuracy(*asked)
    assert found.get("status") == status
    assert outcome_of(Measurement.model_validate({"status": "measured", **found}), spec()).outcome == outcome
    assert (words[0], words[-1]) == (str(tmp_path), "--questions=8"), "the worktree's modules, and the user's flags"
    if code == 3:
        assert found["reason"] == f"inconclusive: {headline(examples.inconclusive())}"
