"""Kernels that return log-sum-exps: in bounds, wrong in a way that has a name, wrong in another, or not there."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.bugs.lse import BUGS
from assay.harness.attention.call import AttentionCall, Kernel, Mask, Outputs
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.matrix import cases
from assay.harness.attention.noise import FAMILIES
from assay.harness.attention.oracle import log_sum_exp, requests, scores
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import assert_correct, check
from assay.harness.errors import AssayError
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.faults import WrongLses
from assay.harness.localize.guard import Guard, attempt, run_calls
from assay.harness.localize.lse import LSE_WRONG, lse_errors

LENS = [[(40, 30), (1, 9)], [(1, 200), (1, 3)], [(7, 0)]]
CALLS = [
    call_of(lens, (4, 2), 64, dtype, "cpu").with_spec(phase="decode" if lens[0][0] == 1 else "extend")
    for lens in LENS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]
ASKED = {"plain": {}, "window": {"mask": Mask(window=5)}, "sinks": {"sinks": (4.0, 0.0, -1.0, 2.0)}, "softcap": {"softcap": 2.0}}


def right(call: AttentionCall) -> Tensor:
    return log_sum_exp(call).float()


def returning(lse: Callable[[AttentionCall], Tensor | None], *features: str, noise: str = "") -> Kernel:
    """A kernel whose outputs are right, and whose log-sum-exps are these."""
    return declares(features=("lse", *features), noise=noise)(lambda call: Outputs(rounded_oracle(call), lse(call)))


def findings(kernel: Kernel, calls: list[AttentionCall] = CALLS) -> list[str]:
    return [finding.id for finding in diagnose(run_calls(kernel, calls, repeats=0))]


@pytest.mark.parametrize("asked", ASKED)
def test_log_sum_exps_in_float32_are_in_bounds(asked: str) -> None:
    def in_float32(call: AttentionCall) -> Tensor:
        sums = []
        for request in requests(call):
            logits = scores(request).float()
            if call.spec.sinks:
                logits = torch.cat([logits, torch.tensor(call.spec.sinks)[:, None, None].expand(-1, logits.shape[1], 1)], -1)
            sums.append(logits.logsumexp(-1).T)
        return torch.cat(sums)

    calls = [call.with_spec(**ASKED[asked]) for call in CALLS]
    assert findings(returning(in_float32, *(() if asked == "plain" else (asked,))), calls) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("bug", BUGS, ids=[bug.id for bug in BUGS])
def test_each_bug_is_named(bug: Bug) -> None:
    asked = "sinks" if bug.id == "lse-without-sinks" else "plain"
    calls = [call.with_spec(**ASKED[asked]) for call in CALLS]

    def wrong(call: AttentionCall) -> Tensor:
        found = bug.compute(call)
        return right(call) if found is None else found.float()

    [found] = diagnose(run_calls(returning(wrong, "sinks"), calls, repeats=0))
    assert (found.id, found.severity, found.equivalent) == (bug.id, "serious", ())
    assert f"of {len(calls)} calls" in found.where


@pytest.mark.parametrize("error", [3e-3, -3e-3, math.inf, math.nan])
def test_one_wrong_log_sum_exp_of_one_call_is_found_and_has_no_name(error: float) -> None:
    def one_off(call: AttentionCall) -> Tensor:
        lse = right(call)
        if len(lse) == 41 and call.q.dtype == torch.float32:
            lse[17, 2] += error
        return lse

    [found] = diagnose(run_calls(returning(one_off), CALLS, repeats=0))
    assert (found.id, found.where) == (LSE_WRONG, "1 of 9 calls, head 2 of 4")


def test_a_kernel_that_declares_log_sum_exps_and_returns_none_fails() -> None:
    for lse, words in (
        (lambda call: None, "no log-sum-exps, for which the call asks"),
        (lambda call: right(call).T, "expected torch.float32 \\[41, 4\\] on cpu; they are transposed"),
        (lambda call: right(call).half(), "log-sum-exps torch.float16"),
    ):
        with pytest.raises(AssayError, match=words):
            run_calls(returning(lse), CALLS[:1], repeats=0)
        guard = Guard(returning(lse), returning(lse).assay)  # type: ignore[attr-defined]
        assert len(run_calls(guard, CALLS[:1]).refused) == 1
        assert len(guard.breaches) == 1
    silent = declares(features=())(lambda call: Outputs(rounded_oracle(call), right(call) + 1))
    assert findings(silent) == []


@pytest.mark.slow
def test_a_check_compares_them_in_every_call_and_a_test_too() -> None:
    some = cases(dtypes=[torch.float16, torch.float32], head_dims=[64])[::25]
    wrong = returning(lambda call: right(call) + 1e-2 * (call.q.dtype == torch.float32))
    result = check(wrong, cases=some)
    [found] = result.findings
    assert (result.verdict, found.id, result.failing) == ("regression", LSE_WRONG, ())
    single = sum(case.condition["dtype"] == "float32" for case in some)
    assert found.where == f"{single} of {len(some)} calls"
    assert "the log-sum-exp of a query is off by 0.01" in found.diagnosis
    passing = check(returning(right), cases=some)
    assert passing.findings == ()
    assert passing.coverage.lses == len(some)
    with pytest.raises(AssertionError, match=r"the log-sum-exp of a query is off by 0\.01; rounding explains"):
        assert_correct(wrong, CALLS[-1])
    assert_correct(wrong, CALLS[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", ["int8_qk", "fp8_kv", "tf32"])
def test_a_declared_quantisation_explains_what_it_costs_and_no_other_kernel_may_have_it(noise: str) -> None:
    for call in CALLS:
        noisy = honest_outputs(call, FAMILIES[noise], members=2, seed=77, lse=True)[1, ..., 0].float()
        assert not lse_errors(call, noisy, FAMILIES[noise], None).wrong
        if call.q.dtype == torch.float32:
            assert lse_errors(call, noisy, FAMILIES[""], None).wrong


@pytest.mark.parametrize(
    ("nothing", "found"), [(-math.inf, []), (-5e4 * math.log(2), []), (math.inf, [LSE_WRONG]), (0.0, [LSE_WRONG])]
)
def test_a_query_that_sees_no_key_counts_for_nothing_in_a_merge(nothing: float, found: list[str]) -> None:
    """FlashInfer has -5e4 to base 2 for minus infinity; FlashAttention 2 once had plus infinity."""
    calls = [call_of([(9, -4), (3, 20), (2, -2)], (4, 2), 64, dtype, "cpu") for dtype in (torch.float16, torch.float32)]

    def lse(call: AttentionCall) -> Tensor:
        given = right(call)
        return torch.where(given.isneginf(), nothing, given)

    assert all(int(right(call).isneginf().sum()) == 6 * 4 for call in calls)
    assert findings(returning(lse), calls) == found


def test_one_query_that_is_clearly_off_decides_for_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is simulated once for a dtype, though the errors of other queries are small."""

    def grows(call: AttentionCall) -> Tensor:
        return right(call) + 1e-5 * 4.0 ** torch.arange(call.rows)[:, None]

    fault, call = WrongLses(), call_of([(9, 30)], (4, 2), 64, torch.float32, "cpu")
    assert fault(attempt(Guard(returning(grows)), call)) == (True,)
    monkeypatch.setattr("assay.harness.localize.lse.bounds_of_queries", None)  # not called again
    assert fault(attempt(Guard(returning(grows)), call)) == (True,)
    assert fault(attempt(Guard(returning(right)), call)) == (False,)
