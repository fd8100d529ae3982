"""Real CPU servers with the tiny model: a fault that is seeded in the scheduler is found, and honest servers are clean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from assay.harness.config import RunSpec
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.run.run import compare_features
from assay.harness.sides import Side
from assay.reports.wording.verdict import headline

pytestmark = [pytest.mark.server, pytest.mark.slow]
FEATURES = ("prefix-cache", "conversation", "batch", "weights-again", "streamed")
"""Features without a restart, so that one server does."""
FAULTY = Path(__file__).parents[3] / "stand_ins/faulty_scheduler"


def side_with(fault: str) -> Side:
    paths = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Side(backend="torch_native", environment={"PYTHONPATH": paths, "TEST_SCHEDULER_FAULT": fault})


def compared(out: Path, fault: str = "") -> InvarianceResult:
    side = side_with(fault) if fault else Side(backend="torch_native")
    return compare_features(RunSpec.of(reference=side, candidate=side), out, features=FEATURES)


def test_honest_servers_are_clean(tmp_path: Path) -> None:
    result = compared(tmp_path / "out")
    assert result.verdict == "pass", headline(result)
    assert {id_ for arm in result.arms for id_ in arm.seen} == set(FEATURES) == set(result.features)
    assert not result.not_covered, "what was not asked for is not listed"
    assert result.servers <= 3
    assert "assay invariance" in result.command
    assert os.listdir(tmp_path / "out" / "probes")


def test_a_seeded_fault_is_found_and_reduced(tmp_path: Path) -> None:
    result = compared(tmp_path / "out", "last-step-kv")
    assert result.verdict == "regression"
    (finding,) = result.findings
    assert finding.title == "conversation + prefix-cache changes the output"
    assert "--features=conversation,prefix-cache --together" in finding.reproduce
    (parting,) = result.partings
    assert (parting.place, parting.layer, parting.names, parting.positions) == ("cache", 0, ("k",), 1), parting
    assert parting.position is not None


def test_the_layer_of_a_tensor_that_was_not_loaded_again_is_named(tmp_path: Path) -> None:
    side = side_with("half-reloaded")
    result = compare_features(RunSpec.of(reference=side, candidate=side), tmp_path / "out", features=("weights-again",))
    (parting,) = result.partings
    assert (parting.place, parting.layer, parting.names) == ("input", 1, ("q", "k", "v")), parting
    assert f"; layer 1, before attention, head {parting.head}; in " in result.findings[0].where
