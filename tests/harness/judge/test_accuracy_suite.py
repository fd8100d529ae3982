from __future__ import annotations

from pathlib import Path

from assay.harness.config import RunSpec
from assay.harness.judge.accuracy_suite import _check_all_answered, accuracy_tested
from assay.harness.judge.evidence import RunEvidence
from assay.harness.run.plan import prepare
from assay.harness.run.run_folder import open_folder


def test_all_answered() -> None:
    assert _check_all_answered(8, 8, ()).status == "ok"
    assert _check_all_answered(8, 7, ()).status == "missing"
    assert _check_all_answered(0, 0, ()).status == "missing"
    other = _check_all_answered(8, 7, ("mmlu-3",))
    assert (other.status, other.found) == ("missing", "7 of 8; answers to another prompt: 1, the first to mmlu-3")
    assert "--out" in other.settles


def test_only_accuracy_that_was_not_asked_for_is_noticed(tmp_path: Path) -> None:
    for suites, noticed in ((("accuracy", "greedy"), []), (("greedy",), ["not checked"])):
        spec = RunSpec.of(reference="torch_native", candidate="sage_attn", questions=8, greedy_prompts=8, suites=suites)
        run = RunEvidence.of(open_folder(prepare(spec), tmp_path / "-".join(suites)))
        assert [check.status for check in accuracy_tested(run).checks] == noticed
