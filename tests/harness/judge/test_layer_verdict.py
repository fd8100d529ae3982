"""The verdict on layers: on all cells of the shadow, against the truth."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.harness.conditions import PHASES
from assay.harness.config import make_spec
from assay.harness.evidence.error_table import SUMS, ErrorTable, RoleErrors, joined
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors
from assay.harness.judge.layer_verdict import LayerEvidence, findings, judge_layers
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.policy import Policy
from assay.harness.statement import Statement, state
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.verdict import Finding, Severity

LAYERS, HEADS = 4, 4
SEEN = ("0", ">= 16")
FAILED = (FailedCalls(layer=0, phase="extend", calls=2, text="it raised"),)


def replay(*severities: Severity, **changes: Any) -> KernelResult:
    made = tuple(
        Finding(id="k", title="K", severity=s, where="extend", diagnosis="d", evidence=(), reproduce="") for s in severities
    )
    fields: dict[str, Any] = {
        "kernel": "c", "calls": 8, "recorded": 9, "with_prefix": 4, "worst_own": 0.5, "worst_bound": 1.0,
        "findings": made, "seconds": 1.0,
    }  # fmt: skip
    return KernelResult(**fields | changes)


@pytest.fixture
def shadowed(layer_diffs: ModuleType) -> Any:
    """Makes a shadow in which every cell is off by `own`, but for those that `wrong` chooses."""

    def make(wrong: Any = lambda *cell: None, own: float = 0.016, prefixes: Any = SEEN, **changes: Any) -> ShadowErrors:
        def error(*cell: Any) -> float | None:
            phase, prefix, position, place = cell[2:]
            if phase != "extend" or prefix not in prefixes or position not in ("0", "1-15") or place != "only":
                return None
            changed = wrong(*cell)
            return own if changed is None else changed

        made: ShadowErrors = layer_diffs.cells(LAYERS, HEADS, error, **changes)
        return made

    return make


def judge(errors: ShadowErrors, made: KernelResult | None = None, foreign: str = "", **policy: Any) -> SuiteResult:
    made = replay() if made is None else made
    return judge_layers(make_spec(policy).policy, LayerEvidence(errors, compare_with_noise(errors), made, foreign), synthetic=True)


def said_where(judged: SuiteResult) -> str:
    assert judged.why[0].id == "found-at"
    return str(judged.why[0].values["where"])


def claimed(judged: SuiteResult) -> Statement:
    claim = judged.why[0].values["claim"]
    assert isinstance(claim, Statement)
    return claim


def ids(errors: ShadowErrors) -> list[str]:
    return [one.id for one in findings(LayerEvidence(errors, compare_with_noise(errors), replay()), "again")]


def test_noise_passes(shadowed: Any) -> None:
    judged = judge(shadowed())
    assert (judged.verdict, judged.decided_by, judged.p_regression) == ("pass", "worst-own-error", None)
    [why] = judged.why
    assert why.id == "own-errors-within"
    numbers = {"cells": 64, "sampled": 640, "queries": 640, "passes": 62}
    assert {name: why.values[name] for name in numbers} == numbers
    assert 0 < why.values["worst"] < 1
    assert ids(shadowed()) == []


def test_a_layer_of_zeros_is_a_regression_though_every_recorded_call_is_right(shadowed: Any) -> None:
    errors = shadowed(lambda layer, *_: 1.0 if layer == 2 else None)
    judged = judge(errors, replay(worst_own=0.2))
    assert (judged.verdict, judged.decided_by, judged.p_regression) == ("regression", "worst-own-error", FALSE_FLAGS)
    assert said_where(judged) == "extend, layer 2 of 4, all 4 heads, cached prefix 0, >= 16"
    assert ids(errors) == ["own-error-out-of-bounds"]


@pytest.mark.parametrize("wrong", [0.09, float("inf")])
def test_one_cell_of_one_head_is_enough(shadowed: Any, wrong: float) -> None:
    errors = shadowed(
        lambda layer, head, phase, prefix, position, _: wrong if (layer, head, prefix, position) == (1, 3, ">= 16", "0") else None
    )
    judged = judge(errors)
    assert judged.verdict == "regression"
    assert said_where(judged) == "extend, layer 1 of 4, head 3 of 4, cached prefix >= 16"
    numbers = claimed(judged).values
    assert (numbers["test"], numbers["observed"], numbers["query"]) == ("worst-own-error", wrong, None)
    assert numbers["excess"] == numbers["observed"] / numbers["bound"] > 1


def test_one_wrong_query_is_a_regression_though_no_cell_is_out_of_bounds(shadowed: Any) -> None:
    errors = shadowed()
    condition = errors.cells.index[0, 2:]
    index = np.array([[2, 3, *condition], [2, -1, *condition]])
    right, wrong = (0.02, 0.08, 1.0, 17.0, 4.0), (1.0, 0.08, 1.0, 701.0, 512.0)

    def with_queries(candidate: Any, reference: Any) -> ShadowErrors:
        roles = (replace(RoleErrors.none(2), worst=np.array([first, right])) for first in (candidate, reference))
        return replace(errors, cells=joined([errors.cells, ErrorTable(index, np.zeros((2, 5)), *roles)]))

    fine = with_queries(right, right)
    assert judge(fine).verdict == "pass"
    assert judge(fine).why[0].values["query"] == 0.25
    bad = with_queries(wrong, right)
    judged = judge(bad)
    assert (judged.verdict, judged.decided_by) == ("regression", "worst-query")
    position, prefix, layer, head = claimed(judged).values["query"]
    assert (position, prefix, layer, head) == (701, 512, 2, 3)
    assert ids(bad) == ["query-out-of-bounds"]
    assert judge(with_queries(right, wrong)).verdict == "inconclusive"


def test_a_uniform_gain_of_a_thousandth_is_a_regression_that_no_bound_on_an_error_sees(shadowed: Any) -> None:
    judged = judge(shadowed(gain=1e-3))
    assert (judged.verdict, judged.decided_by) == ("regression", "worst-gain")
    assert claimed(judged).values["observed"] == pytest.approx(1e-3)
    assert ids(shadowed(gain=1e-3)) == ["gain"]
    assert judge(shadowed(gain=1e-5)).verdict == "pass"


def test_cells_of_layers_that_the_replay_speaks_of_are_no_further_finding(shadowed: Any) -> None:
    errors = shadowed(lambda layer, *_: 1.0 if layer in (1, 2) else None)
    named = replay("serious", worst_own=9.0, outside=((1, "extend"),))
    (found,) = findings(LayerEvidence(errors, compare_with_noise(errors), named), "again")
    assert (found.id, found.where) == ("own-error-out-of-bounds", "extend, layer 2 of 4, all 4 heads, cached prefix 0, >= 16")


def test_a_reference_that_is_not_right_proves_nothing_about_the_candidate(shadowed: Any) -> None:
    errors = shadowed(lambda layer, *_: 1.0 if layer == 2 else None, reference=0.5)
    judged = judge(errors)
    assert judged.verdict == "inconclusive"
    assert [why.id for why in judged.why] == ["reference-not-right"]
    assert claimed(judged).values["observed"] == 0.5
    assert ids(errors)[0] == "reference-wrong"


@pytest.mark.parametrize(
    ("reference", "own", "worst", "verdict", "decided_by"),
    [
        (5e-6, 0.016, 0.2, "inconclusive", ""),
        (5e-6, 0.4, 0.2, "inconclusive", ""),
        (5e-6, 9.0, 0.2, "regression", "worst-own-error"),
        (5e-6, 0.016, 20.0, "inconclusive", ""),
        (5e-6, 0.016, 200.0, "regression", "worst-recorded-call"),
        (float("inf"), float("inf"), float("inf"), "inconclusive", ""),
    ],
)
def test_a_candidate_that_is_off_by_ten_times_more_than_a_wrong_reference_is_a_regression(
    shadowed: Any, reference: float, own: float, worst: float, verdict: str, decided_by: str
) -> None:
    """As K's scale for V beside fa3 with an FP8 cache: 1,600 times its bound, where the reference is off by 2.3 times its own."""
    errors = shadowed(lambda layer, *_: own if layer == 2 else None, reference=reference)
    judged = judge(errors, replay(worst_own=worst))
    assert (judged.verdict, judged.decided_by) == (verdict, decided_by)
    assert ("reference-off" in {why.id for why in judged.why}) == (decided_by == "worst-own-error")
    assert ids(errors)[0] == "reference-wrong"


def test_an_error_below_what_the_declared_quantisation_costs_is_no_pass(shadowed: Any) -> None:
    quiet = shadowed(own=1e-6)
    judged = judge(quiet)
    assert judged.verdict == "inconclusive"
    found = claimed(judged)
    assert (found.id, found.values["noise"], found.values["own"]) == ("error-below-noise", "int8_qk", pytest.approx(1e-6))
    assert found.values["least"] > found.values["own"]
    assert ids(quiet) == ["noise-missing"]
    assert judge(shadowed(own=0.013)).verdict == "pass", "a somewhat finer implementation"


def test_queries_that_were_not_sampled_are_held_against_the_reference(shadowed: Any) -> None:
    right, wrong = shadowed(), shadowed(lambda layer, *_: 0.5 if layer == 3 else None)
    judged = judge(replace(wrong, cells=replace(right.cells, apart=wrong.cells.apart)))
    assert (judged.verdict, judged.decided_by) == ("regression", "worst-difference")


@pytest.mark.parametrize(
    ("made", "failed", "verdict"),
    [
        (replay(), False, "pass"),
        (replay("info"), False, "pass"),
        (replay("serious"), False, "regression"),
        (replay("warning"), False, "regression"),
        (replay(worst_own=37.0), False, "regression"),
        (replay(worst_own=float("nan")), False, "regression"),
        (replay(), True, "inconclusive"),
    ],
)
def test_recorded_calls_add_to_the_verdict(shadowed: Any, made: KernelResult, failed: bool, verdict: str) -> None:
    assert judge(shadowed(errors=FAILED if failed else ()), made).verdict == verdict


@pytest.mark.parametrize(("worst", "decided_by"), [(0.5, ""), (37.0, "worst-recorded-call")])
def test_a_finding_within_bounds_is_decided_by_no_metric(shadowed: Any, worst: float, decided_by: str) -> None:
    assert judge(shadowed(), replay("serious", worst_own=worst)).decided_by == decided_by


def test_what_is_known_of_the_reference_and_of_tf32_excuses_the_candidate(shadowed: Any) -> None:
    right, wrong = shadowed(), shadowed(lambda layer, *_: 0.5 if layer == 3 else None)
    known = right.headers[0].model_copy(update={"known": tuple((3, phase, "window") for phase in PHASES)})
    apart = replace(wrong, cells=replace(right.cells, apart=wrong.cells.apart), headers=(known,))
    assert judge(apart).verdict == "pass"
    scaled = shadowed(gain=1.2e-3)
    assert judge(scaled).decided_by == "worst-gain"
    header = scaled.headers[0].model_copy(update={"dtype": "float32", "accumulation": "tf32"})
    assert judge(replace(scaled, headers=(header,))).verdict == "pass"


def test_calls_that_were_not_examined_or_are_not_these_are_no_pass(shadowed: Any) -> None:
    errors = shadowed()
    against = compare_with_noise(errors)
    assert judge_layers(Policy(), LayerEvidence(errors, against, None), synthetic=True).verdict == "inconclusive"
    judged = judge(errors, replay("serious", worst_own=37.0), foreign="it examined another")
    assert judged.verdict == "inconclusive"
    assert judged.why == (state("evidence-lacking", what="examination of these calls", said="it examined another"),)


def test_no_cached_prefix_and_nothing_compared_are_no_pass(shadowed: Any) -> None:
    without = judge(shadowed(prefixes=("0",)))
    assert (without.verdict, without.why[0].values["what"]) == ("inconclusive", "cached prefix")
    errors = shadowed()
    nothing = replace(errors, cells=ErrorTable.of(errors.cells.index, errors.cells.apart))
    assert judge(nothing).why == (state("evidence-lacking", what="truth", said=""),)


@pytest.mark.parametrize(("bound", "verdict"), [(1e-9, "regression"), (100.0, "pass")])
def test_the_policys_bound_of_the_kernels_family(shadowed: Any, bound: float, verdict: str) -> None:
    judged = judge(shadowed(), bounds={"int8_qk": bound}, candidate="no.such:kernel")
    assert judged.verdict == verdict, "the family is in the evidence: no kernel is imported"
    assert ("bounds.int8_qk" in str(judged.why[0].values.get("line"))) is (verdict == "regression")
    assert judged.decided_by == ("largest-own-error" if verdict == "regression" else "worst-own-error")


@pytest.mark.parametrize("seed", range(8))
def test_honest_implementations_are_not_flagged(shadowed: Any, seed: int) -> None:
    errors = shadowed()
    rng, candidate = np.random.default_rng(seed), errors.cells.candidate
    drawn = candidate.own.copy()
    drawn[:, SUMS.index("difference")] = 10 * 0.016 * rng.lognormal(0, 0.1, len(drawn))
    drawn[:, SUMS.index("along")] = 2 * 1e-4 * rng.normal(size=len(drawn))
    assert judge(replace(errors, cells=replace(errors.cells, candidate=replace(candidate, own=drawn)))).verdict == "pass"
