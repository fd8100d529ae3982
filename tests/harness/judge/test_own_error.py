"""The layer diff's part of a report, from a run's folder."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, KernelResult
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.own_error import claim
from assay.harness.judge.report import LayersResult, SuiteResult
from assay.harness.statement import state
from assay.harness.verdict import Finding


@pytest.fixture(scope="module")
def evidence(recorded_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose recorded calls were examined, of an exact candidate."""
    folder: RunFolder = recorded_runs.layers(tmp_path_factory.mktemp("run") / "run")
    return folder


def judged(folder: RunFolder, changes: dict[str, Any]) -> tuple[SuiteResult, list[Finding], LayersResult]:
    """Suite, causes and profile of the layer diff with a changed examination of the recorded calls; the file is put back."""
    path = folder.path / "cause.json"
    kept = path.read_bytes()
    made = folder.read(CAUSE)
    assert made is not None
    folder.write(CAUSE, KernelResult.model_validate(made.model_dump() | changes))
    try:
        part = claim(RunEvidence.of(folder))
    finally:
        path.write_bytes(kept)
    layers = part.parts["layers"]
    assert part.suite is not None
    assert isinstance(layers, LayersResult)
    return part.suite, list(part.causes), layers


def test_an_examination_of_these_calls_is_believed(evidence: RunFolder) -> None:
    suite, causes, layers = judged(evidence, {})
    assert (suite.verdict, causes) == ("pass", []), suite.why
    assert [(row.layer, row.phase, row.cells) for row in layers.against_truth] == [
        (0, "extend", 160), (1, "extend", 160),
    ]  # fmt: skip
    assert not any(row.out_of_bounds for row in layers.depth)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kernel": "another"}, "it examined another, not assay.harness.attention.sdpa:torch_sdpa"),
        ({"pack": "0" * 64}, "it examined the calls of another pack"),
        ({"examined": ("0" * 64,), "calls": 1}, "it left out recorded calls, for example those of layer 0, extend"),
    ],
)
def test_an_examination_of_other_calls_is_not(evidence: RunFolder, changes: dict[str, Any], why: str) -> None:
    suite, _, _ = judged(evidence, changes | {"worst_own": 37.0, "worst_bound": 1.0})
    assert suite.verdict == "inconclusive"
    [stated] = suite.why
    assert stated.values["what"] == "examination of these calls"
    assert why in stated.values["said"]


def test_a_recorded_call_out_of_bounds_is_a_regression_without_a_finding(evidence: RunFolder) -> None:
    assert judged(evidence, {"worst_own": 37.0, "worst_bound": 1.0})[0].verdict == "regression"


def test_a_kernel_that_could_not_be_run_on_the_recorded_calls_does_not_pass(evidence: RunFolder) -> None:
    suite, _, _ = judged(evidence, {"not_run": "the kernel ended its process, which exited with status 0"})
    assert suite.verdict == "inconclusive"
    text = "the kernel ended its process, which exited with status 0"
    assert suite.why == (state("evidence-lacking", what="examined calls", said=text),)
