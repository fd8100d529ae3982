"""The parts of a run with servers of their own, timing and switched features: when they are made, and what is recorded."""

from __future__ import annotations

import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from assay.evals.invariance_load import probe_load
from assay.harness.checks.replay import replay
from assay.harness.config import RunSpec, make_spec
from assay.harness.engines.sglang.launch import Launch
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.invariance import invariance_folder
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.invariance import judge_invariance
from assay.harness.progress import ProgressDisplay
from assay.harness.run import run as module
from assay.harness.run.bench import BenchPlan
from assay.harness.run.invariance import drive, invariance_plan
from assay.harness.run.plan import prepare
from assay.harness.run.run import OpenRun, _plan_parts, record_pack
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
def launched(monkeypatch: pytest.MonkeyPatch, featured_server: ModuleType) -> list[Launch]:
    """What every server is launched with; the servers are stand-ins, and few probes are asked."""
    made, load, launches = drive.make_engine, probe_load("cpu", 4096, 97), list[Launch]()
    few = replace(load, probes=load.probes[:3])
    monkeypatch.setattr(invariance_plan, "probe_load", lambda *args: few)

    def engine(*args: Any, **kwargs: Any) -> Any:
        launches.append(made(*args, **kwargs).launch)
        return featured_server.FeaturedServer(launches[-1])

    monkeypatch.setattr(drive, "make_engine", engine)
    monkeypatch.setattr(featured_server.FeaturedServer, "started", [], raising=False)
    return launches


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(prepare(make_spec(FLAGS)), tmp_path / "run")


def measured(folder: RunFolder, **flags: Any) -> None:
    plan = prepare(make_spec(FLAGS | flags))
    with ProgressDisplay(Console(file=StringIO())) as display:
        OpenRun(plan, *_plan_parts(plan), folder)._measure_apart(display)


def forget(folder: RunFolder) -> FailureResult:
    failure = folder.progress().failure
    assert failure is not None
    folder.update(folder.progress().model_copy(update={"failure": None}))
    return failure


def test_nothing_is_shadowed_while_servers_are_timed_and_a_resumed_run_is_not_timed_again(
    folder: RunFolder, benches: Benches
) -> None:
    measured(folder)
    measured(folder)
    (plan,) = benches.plans
    assert "layers" not in plan.run.spec.workload.suites
    assert (plan.run.spec.workload.latency_seconds, plan.run.spec.policy.latency_bound) == (3.0, 1.2)
    assert len(plan.run.of("greedy")) == 16, "whose answers' lengths are compared"
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


def test_a_run_that_failed_makes_no_part_and_stays_failed(folder: RunFolder, benches: Benches, launched: list[Launch]) -> None:
    failure = FailureResult.of("engine", EngineError("no memory"))
    folder.update(folder.progress().model_copy(update={"failure": failure}))
    measured(folder, invariance="batch,streamed")
    assert (benches.plans, launched) == ([], [])
    assert folder.progress().failure == failure


def test_parts_are_made_on_request_only(folder: RunFolder, benches: Benches, launched: list[Launch]) -> None:
    assert "latency" not in make_spec({}).workload.suites
    assert make_spec({}).policy.invariance == ()
    measured(folder, suites="accuracy")
    assert (benches.plans, launched) == ([], [])


def test_the_candidates_own_servers_are_switched_once(folder: RunFolder, launched: list[Launch]) -> None:
    asked = {"suites": "accuracy", "invariance": "batch,streamed"}
    measured(folder, **asked)
    before = len(launched)
    measured(folder, **asked)
    assert len(launched) == before > 0
    assert {launch.backend for launch in launched} == {"triton"}
    result = judge_invariance(invariance_folder(folder))
    assert {id_ for arm in result.arms for id_ in arm.features} == {"batch", "streamed"}
    assert "--reference=triton --features=batch,streamed" in result.command, "which shows it again without the run"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"latency_shapes": "shot"}, "shot is not a shape"),
        ({"servers": "in-turn"}, "at the same time"),
        ({"invariance": "batches"}, "--invariance: batches is no feature"),
        ({"invariance": "ngram"}, "--invariance: ngram cannot be switched here"),
        ({"invariance": "page-size", "engine_arg": ("--page-size=16",)}, "the base has it too: --page-size=16"),
        ({"invariance": "batch", "candidate": "http://localhost:1"}, "--invariance: the candidate is the URL"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _plan_parts(prepare(make_spec(FLAGS | flags)))


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
