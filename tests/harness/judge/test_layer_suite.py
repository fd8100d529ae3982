"""The layer suite's verdict."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.shadow_sums import SUMS, Legend, ShadowError, ShadowSums
from assay.harness.judge.layer_suite import judge_layers
from assay.harness.offline.replay import ReplayResult
from assay.harness.verdict import Finding, Severity


def replay(*severities: Severity, with_prefix: int = 4) -> ReplayResult:
    findings = tuple(
        Finding(id="k", title="K", severity=s, where="extend", diagnosis="d", evidence=(), reproduce="")
        for s in severities
    )
    return ReplayResult(
        candidate="c", calls=8, recorded=9, with_prefix=with_prefix, worst=0.5, bounds=(), findings=findings, seconds=1.0
    )  # fmt: skip


def cells(failed: bool = False) -> ShadowSums:
    error = (ShadowError(layer=0, phase="extend", calls=2, text="it raised"),) if failed else ()
    legend = Legend(reference="r", candidate="c", phases=("extend",), errors=error)
    return ShadowSums(np.zeros((1, 6), np.int64), np.ones((1, len(SUMS))), np.ones(1), (legend,))


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
def test_verdict(inside: ModuleType, made: ReplayResult | None, failed: bool, verdict: str) -> None:
    assert judge_layers(make_spec({}), inside.sound(), cells(failed), made)[0] == verdict


@pytest.mark.parametrize(("bound", "verdict"), [(1e-9, "regression"), (100.0, "pass")])
def test_the_policys_bound_of_the_kernels_family(inside: ModuleType, bound: float, verdict: str) -> None:
    bounds: dict[str, Any] = {"bounds": {"int8_qk": bound}, "candidate": "sage_attn"}
    found, why = judge_layers(make_spec(bounds), inside.sound(), cells(), replay())
    assert found == verdict
    assert ("bounds.int8_qk" in why) is (verdict == "regression")
