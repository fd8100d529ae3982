"""The layer suite's verdict."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.cause import ReplayResult
from assay.harness.evidence.error_sums import SUMS
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors, ShadowHeader
from assay.harness.judge.own_error import judge_layers
from assay.harness.verdict import Finding, Severity


def replay(*severities: Severity, with_prefix: int = 4) -> ReplayResult:
    findings = tuple(
        Finding(id="k", title="K", severity=s, where="extend", diagnosis="d", evidence=(), reproduce="")
        for s in severities
    )
    return ReplayResult(
        candidate="c", calls=8, recorded=9, with_prefix=with_prefix, worst=0.5, bounds=(), findings=findings, seconds=1.0
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
    assert judge_layers(make_spec({}), layer_diffs.sound(), cells(failed), made)[0] == verdict


@pytest.mark.parametrize(("bound", "verdict"), [(1e-9, "regression"), (100.0, "pass")])
def test_the_policys_bound_of_the_kernels_family(layer_diffs: ModuleType, bound: float, verdict: str) -> None:
    bounds: dict[str, Any] = {"bounds": {"int8_qk": bound}, "candidate": "sage_attn"}
    found, why = judge_layers(make_spec(bounds), layer_diffs.sound(), cells(), replay())
    assert found == verdict
    assert ("bounds.int8_qk" in why) is (verdict == "regression")
