"""The parts of a run with servers of their own, timing and switched features: when they are made, and what is recorded."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.checks.replay import replay
from assay.harness.config import RunSpec, make_spec
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import FailureResult
from assay.harness.progress import ProgressDisplay
from assay.harness.run import run as module
from assay.harness.run.bench import BenchPlan, plan_bench
from assay.harness.run.plan import prepare
from assay.harness.run.run import OpenRun, record_pack
from assay.harness.run.run_folder import open_folder

FLAGS: dict[str, Any] = {
    "candidate": "triton", "suites": "accuracy,layers,latency", "questions": 4, "servers": "together",
    "latency_shapes": "short,long", "latency_seconds": 3.0, "latency_bound": 1.2,
}  # fmt: skip


class Benches:
    """Replaces `assay.harness.run.bench.bench`: records its arguments, and plays to the end or dies."""

    def __init__(self) -> None:
        self.dies = False
        self.plans: list[BenchPlan] = []

    def __call__(self, plan: BenchPlan, folder: BenchFolder, display: ProgressDisplay) -> None:
        self.plans.append(plan)
        with (folder.path / TIMINGS).open("a") as file:
            file.write("played\n")
        if self.dies:
            raise EngineError("the candidate died")
        folder.seal()


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> Benches:
    made = Benches()
    monkeypatch.setattr(module, "bench", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(prepare(make_spec(FLAGS)), tmp_path / "run")


def measured(folder: RunFolder, **flags: Any) -> None:
    plan = prepare(make_spec(FLAGS | flags))
    with ProgressDisplay(Console(file=StringIO())) as display:
        bench = plan_bench(plan) if "latency" in plan.spec.workload.suites else None
        OpenRun(plan, bench, folder)._measure_apart(display)


def forget(folder: RunFolder) -> FailureResult:
    failure = folder.progress().failure
    assert failure is not None
    folder.update(folder.progress().model_copy(update={"failure": None}))
    return failure


def test_a_resumed_run_is_not_timed_again(folder: RunFolder, benches: Benches) -> None:
    measured(folder)
    measured(folder)
    (plan,) = benches.plans
    assert (plan.run.spec.workload.latency_seconds, plan.run.spec.policy.latency_bound) == (3.0, 1.2)
    assert shlex.split(plan.command) == [
        "assay", "bench", "--reference=torch_native", "--candidate=triton", "--latency-shapes=short,long",
        "--latency-seconds=3.0", "--latency-bound=1.2", "--servers=together",
    ]  # fmt: skip


def test_an_interrupted_part_starts_over(folder: RunFolder, benches: Benches) -> None:
    benches.dies = True
    measured(folder)
    assert not bench_folder(folder).complete
    failure = forget(folder)
    assert (failure.kind, failure.found) == ("engine", "the candidate died")
    benches.dies = False
    measured(folder)
    assert bench_folder(folder).complete
    assert (bench_folder(folder).path / TIMINGS).read_text() == "played\n", "nothing of the first is left"
    assert folder.progress().failure is None


def test_a_run_that_failed_makes_no_part_and_stays_failed(folder: RunFolder, benches: Benches) -> None:
    failure = FailureResult.of("engine", EngineError("no memory"))
    folder.update(folder.progress().model_copy(update={"failure": failure}))
    measured(folder)
    assert benches.plans == []
    assert folder.progress().failure == failure


def test_parts_are_made_on_request_only(folder: RunFolder, benches: Benches) -> None:
    assert "latency" not in make_spec({}).workload.suites
    measured(folder, suites="accuracy")
    assert benches.plans == []


@pytest.mark.parametrize(
    ("flags", "says"), [({"latency_shapes": "shot"}, "shot is not a shape"), ({"servers": "in-turn"}, "at the same time")]
)
def test_wrong_use_is_refused_before_anything_starts(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_bench(prepare(make_spec(FLAGS | flags)))


RECORDED = RunSpec.of(reference="torch_native", candidate="torch_native", suites=("layers",), budget_mb=16)


def test_a_pack_goes_to_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with ProgressDisplay(Console(file=StringIO())) as display, pytest.raises(UsageError, match="is not empty"):
        record_pack(prepare(RECORDED), tmp_path, display)


@pytest.mark.server
@pytest.mark.slow
def test_a_recorded_pack_can_be_replayed(tmp_path: Path) -> None:
    pack = tmp_path / "packs" / "pack"
    with ProgressDisplay(Console(file=StringIO())) as display:
        manifest = record_pack(prepare(RECORDED), pack, display)
    assert sum(call.bytes for call in manifest.calls) <= 16 * 2**20
    strata = {(call.spec.layer, call.spec.phase, any(call.prefix)) for call in manifest.calls}
    assert strata == {(layer, *kind) for layer in range(4) for kind in (("extend", False), ("extend", True), ("decode", True))}
    result = replay(pack, "assay.harness.attention.sdpa:torch_sdpa")
    assert (result.findings, result.worst < 1, result.with_prefix > 0) == ((), True, True)
