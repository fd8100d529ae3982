"""The layer suite's verdict."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.cause import ReplayResult
from assay.harness.evidence.error_sums import SUMS
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors, ShadowHeader
from assay.harness.judge.own_error import judge_layers
from assay.harness.judge.report import NOT_FINITE
from assay.harness.verdict import Finding, Severity


def replay(*severities: Severity, with_prefix: int = 4) -> ReplayResult:
    findings = tuple(
        Finding(id="k", title="K", severity=s, where="extend", diagnosis="d", evidence=(), reproduce="")
        for s in severities
    )
    return ReplayResult(
        candidate="c", noise="int8_qk", calls=8, recorded=9, with_prefix=with_prefix, worst=0.5, bounds=(), findings=findings,
        seconds=1.0,
    )  # fmt: skip


def cells(failed: bool = False) -> ShadowErrors:
    error = (FailedCalls(layer=0, phase="extend", calls=2, text="it raised"),) if failed else ()
    legend = ShadowHeader(reference="r", candidate="c", phases=("extend",), failed=error)
    return ShadowErrors(np.zeros((1, 6), np.int64), np.ones((1, len(SUMS))), np.ones(1), (legend,))


@pytest.mark.parametrize(
    ("made", "failed", "verdict"),
    [
        (replay(), False, "pass"),
        (replay("info"), False, "pass"),
        (replay("serious"), False, "regression"),
        (replay("warning"), False, "regression"),
        (replay(), True, "inconclusive"),
        (replay(with_prefix=0), False, "inconclusive"),
        (None, False, "inconclusive"),
    ],
)
def test_verdict(layer_diffs: ModuleType, made: ReplayResult | None, failed: bool, verdict: str) -> None:
    assert judge_layers(make_spec({}), layer_diffs.sound(), cells(failed), made).verdict == verdict


@pytest.mark.parametrize(("bound", "verdict"), [(1e-9, "regression"), (100.0, "pass")])
def test_the_policys_bound_of_the_kernels_family(layer_diffs: ModuleType, bound: float, verdict: str) -> None:
    spec = make_spec({"bounds": {"int8_qk": bound}, "candidate": "no.such:kernel"})
    judged = judge_layers(spec, layer_diffs.sound(), cells(), replay())
    assert judged.verdict == verdict, "the family is in the evidence: no kernel is imported"
    assert ("bounds.int8_qk" in judged.why) is (verdict == "regression")
    assert judged.decided_by == ("largest-own-error" if verdict == "regression" else "worst-own-error")


def test_an_own_error_that_is_not_finite_is_above_the_policys_bound(layer_diffs: ModuleType) -> None:
    sound = layer_diffs.sound()
    broken = sound.model_copy(
        update={"depth": (sound.depth[0].model_copy(update={"own": NOT_FINITE}), *sound.depth[1:])}
    )
    judged = judge_layers(make_spec({"bounds": {"int8_qk": 100.0}}), broken, cells(), replay())
    assert (judged.verdict, "is not finite, above bounds.int8_qk" in judged.why) == ("regression", True)


@pytest.mark.parametrize(("worst", "decided_by"), [(0.3, ""), (26.0, "worst-own-error")])
def test_a_finding_within_bounds_is_decided_by_no_metric(
    layer_diffs: ModuleType, worst: float, decided_by: str
) -> None:
    made = replay("serious").model_copy(update={"worst": worst})
    assert judge_layers(make_spec({}), layer_diffs.sound(), cells(), made).decided_by == decided_by
