"""The op-level matrix in a report: it must have run, and its numbers count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from assay.harness.config import RunSpec
from assay.harness.evidence.kernel_result import CaseWhy, KernelResult
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.own_error import matrix_claim
from assay.harness.statement import Statement, state
from assay.harness.verdict import Finding

SPEC = RunSpec.of(reference="torch_native", candidate="sage_attn", suites=("layers",))
NOTHING: dict[str, Any] = {"calls": 0, "worst_own": None, "worst_bound": None}
REFUSED = CaseWhy(case="extend-1", why="no"), CaseWhy(case="decode-1", why="no")
FINDING = Finding(id="mask-top-left", title="t", severity="serious", where="extend", diagnosis="d", evidence=(), reproduce="r")


def record(**changed: Any) -> KernelResult:
    made = KernelResult(kernel="sage_attn", shapes="float32", calls=2, worst_own=0.5, worst_bound=1.0)
    return made.model_copy(update=changed)


def judged(made: KernelResult | None, spec: RunSpec = SPEC, *, kernel: bool = True) -> Judged:
    code = {"candidate": {"a.py": "hash"}} if kernel else {}
    run = SimpleNamespace(spec=spec, matrix=made, manifest=SimpleNamespace(code=code))
    return matrix_claim(cast(RunEvidence, run))


@pytest.mark.parametrize(
    ("changed", "verdict", "why"),
    [
        ({}, "pass", "op-calls-within"),
        ({"findings": (FINDING,)}, "regression", "op-calls-wrong"),
        ({"findings": (FINDING,), "failing": ("extend-1",), "worst_own": 9.0}, "regression", "op-calls-wrong"),
        ({"failing": ("extend-1",), "worst_own": 9.0}, "regression", "op-calls-unexplained"),
        ({"failing": ("extend-1",)}, "regression", "op-calls-unexplained"),
        ({"worst_own": 1.5}, "regression", "op-calls-unexplained"),
        ({"worst_own": float("nan")}, "regression", "op-calls-unexplained"),
        (NOTHING, "inconclusive", "op-calls-not-tested"),
        (NOTHING | {"refused": REFUSED}, "inconclusive", "op-calls-not-tested"),
        ({"not_run": "no GPU"}, "inconclusive", "op-calls-not-tested"),
        ({"missing": ("no decode call was computed",)}, "inconclusive", "op-calls-not-tested"),
    ],
)
def test_what_is_out_of_bounds_or_was_not_computed_does_not_pass(changed: dict[str, Any], verdict: str, why: str) -> None:
    suite = judged(record(**changed)).suite
    assert suite is not None
    assert (suite.verdict, [each.id for each in suite.why]) == (verdict, [why])


@pytest.mark.parametrize(
    ("made", "status", "found"),
    [
        (record(), "ok", state("matrix-computed", calls=2)),
        (None, "missing", state("matrix-absent")),
        (record(kernel="another"), "missing", state("matrix-of-another", kernel="another", candidate="sage_attn")),
        (record(**NOTHING, not_run="it hangs"), "missing", state("matrix-not-run", candidate="sage_attn", said="it hangs")),
    ],
)
def test_the_matrix_of_the_candidate_must_have_run(made: KernelResult | None, status: str, found: Statement) -> None:
    [check] = judged(made).checks
    assert (check.status, check.outcome) == (status, found)


def test_no_matrix_is_asked_of_an_engines_own_backend_or_without_layers() -> None:
    assert judged(None, kernel=False).checks == []
    assert judged(None, SPEC.changed(suites=("accuracy",))).checks == []


def test_a_kernel_that_was_not_run_passes_nothing() -> None:
    result = KernelResult(kernel="k", calls=0, not_run="it hangs")
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
