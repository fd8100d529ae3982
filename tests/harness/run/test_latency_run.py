"""When a run is timed, and when it is not. The bench itself is replaced; real ones are in test_bench_server.py."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.config import make_spec
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import FailureResult
from assay.harness.progress import ProgressDisplay
from assay.harness.run import latency_run
from assay.harness.run.bench_plan import BenchPlan
from assay.harness.run.latency_run import plan_latency, time_servers
from assay.harness.run.plan import prepare
from assay.harness.run.run_folder import open_folder

FLAGS: dict[str, Any] = {
    "candidate": "torch_native", "suites": "accuracy,layers,latency", "questions": 4, "servers": "together",
    "latency_shapes": "short,long", "latency_seconds": 3.0, "latency_bound": 1.2,
}  # fmt: skip


class Benches:
    """Replaces `assay.harness.run.bench_drive.bench`: records its arguments, and plays to the end or dies."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.plans: list[BenchPlan] = []

    def __call__(self, plan: BenchPlan, folder: BenchFolder, display: ProgressDisplay) -> None:
        self.plans.append(plan)
        with (folder.path / TIMINGS).open("a") as file:
            file.write("played\n")
        if self.dies:
            raise EngineError("the candidate died")
        folder.seal()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(prepare(make_spec(FLAGS)), tmp_path / "run")


def timed(folder: RunFolder, benches: Benches, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
    monkeypatch.setattr(latency_run, "bench", benches)
    with ProgressDisplay(Console(file=StringIO())) as display:
        time_servers(plan_latency(prepare(make_spec(FLAGS | flags))), folder, display)


def test_nothing_is_shadowed_while_servers_are_timed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    benches = Benches()
    timed(folder, benches, monkeypatch)
    (plan,) = benches.plans
    assert "layers" not in plan.run.spec.workload.suites
    assert plan.run.spec.workload.latency_shapes == ("short", "long")
    assert (plan.run.spec.workload.latency_seconds, plan.run.spec.policy.latency_bound) == (3.0, 1.2)
    assert len(plan.run.of("greedy")) == 16, "whose answers' lengths are compared"
    assert shlex.split(plan.command) == [
        "assay", "bench", "--reference=torch_native", "--candidate=torch_native", "--latency-shapes=short,long",
        "--latency-seconds=3.0", "--latency-bound=1.2", "--servers=together",
    ]  # fmt: skip


def test_a_resumed_run_is_not_timed_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    benches = Benches()
    timed(folder, benches, monkeypatch)
    timed(folder, benches, monkeypatch)
    assert len(benches.plans) == 1


def test_an_interrupted_bench_starts_over(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(folder, Benches(dies=True), monkeypatch)
    failure = folder.progress().failure
    assert failure is not None
    assert (failure.kind, failure.found) == ("engine", "the candidate died")
    assert not bench_folder(folder).complete
    folder.update(folder.progress().model_copy(update={"failure": None}))
    timed(folder, Benches(), monkeypatch)
    assert bench_folder(folder).complete
    assert (bench_folder(folder).path / TIMINGS).read_text() == "played\n", "nothing of the first is left"
    assert folder.progress().failure is None


def test_a_run_that_failed_is_not_timed_and_stays_failed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = FailureResult.of("engine", EngineError("no memory"))
    folder.update(folder.progress().model_copy(update={"failure": failure}))
    benches = Benches()
    timed(folder, benches, monkeypatch)
    assert benches.plans == []
    assert folder.progress().failure == failure


def test_latency_is_timed_on_request_only(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "latency" not in make_spec({}).workload.suites
    benches = Benches()
    timed(folder, benches, monkeypatch, suites="accuracy")
    assert benches.plans == []


@pytest.mark.parametrize(
    ("flags", "says"), [({"latency_shapes": "shot"}, "shot is not a shape"), ({"servers": "in-turn"}, "at the same time")]
)
def test_wrong_use_is_refused_before_anything_starts(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_latency(prepare(make_spec(FLAGS | flags)))
