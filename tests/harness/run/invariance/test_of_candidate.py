"""The features of a run's candidate, over a stand-in for servers: when they are switched, in which server, and what is recorded."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from assay.evals.invariance_load import probe_load
from assay.harness.config import make_spec
from assay.harness.engines.sglang.launch import Launch
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.invariance import invariance_folder
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.invariance import judge_invariance
from assay.harness.progress import ProgressDisplay
from assay.harness.run.invariance import drive, invariance_plan
from assay.harness.run.invariance.of_candidate import plan_features, switch_features
from assay.harness.run.plan import prepare
from assay.harness.run.run_folder import open_folder

FLAGS: dict[str, Any] = {"candidate": "triton", "questions": 4, "invariance": "batch,streamed"}


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


def switched(folder: RunFolder, **flags: Any) -> None:
    with ProgressDisplay(Console(file=StringIO())) as display:
        switch_features(plan_features(prepare(make_spec(FLAGS | flags))), folder, display)


def test_the_candidates_own_servers_are_switched(folder: RunFolder, launched: list[Launch]) -> None:
    switched(folder)
    assert {launch.backend for launch in launched} == {"triton"}
    result = judge_invariance(invariance_folder(folder))
    assert {id_ for arm in result.arms for id_ in arm.features} == {"batch", "streamed"}
    assert "--reference=triton --features=batch,streamed" in result.command, "which shows it again without the run"


def test_a_resumed_run_does_not_switch_them_again(folder: RunFolder, launched: list[Launch]) -> None:
    switched(folder)
    before = len(launched)
    switched(folder)
    assert len(launched) == before > 0


def test_an_interrupted_comparison_starts_over(
    folder: RunFolder, launched: list[Launch], featured_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(featured_server.FeaturedServer, "refused", ("--disable-overlap-schedule",))
        switched(folder)
    failure = folder.progress().failure
    assert failure is not None
    assert failure.kind == "engine"
    assert not invariance_folder(folder).complete
    folder.update(folder.progress().model_copy(update={"failure": None}))
    switched(folder)
    assert invariance_folder(folder).complete
    assert folder.progress().failure is None


def test_a_run_that_failed_switches_nothing(folder: RunFolder, launched: list[Launch]) -> None:
    folder.update(folder.progress().model_copy(update={"failure": FailureResult.of("engine", EngineError("no memory"))}))
    switched(folder)
    assert launched == []


def test_features_are_switched_by_name_only(folder: RunFolder, launched: list[Launch]) -> None:
    assert make_spec({}).policy.invariance == ()
    switched(folder, invariance=None)
    assert launched == []
    assert not invariance_folder(folder).path.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"invariance": "batches"}, "--invariance: batches is no feature"),
        ({"invariance": "ngram"}, "--invariance: ngram cannot be switched here"),
        ({"invariance": "page-size", "engine_arg": ("--page-size=16",)}, "the base has it too: --page-size=16"),
        ({"candidate": "http://localhost:1"}, "--invariance: the candidate is the URL"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_features(prepare(make_spec(FLAGS | flags)))
