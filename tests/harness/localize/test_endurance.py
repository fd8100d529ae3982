"""What shows only when a kernel runs again: in the buffers of another call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.guard import Guard, endure, run_calls


def endured(kernel: object, *lens: list[tuple[int, int]]) -> str:
    """How a kernel became wrong; empty if it did not."""
    guard = Guard(kernel)  # type: ignore[arg-type]
    calls = [call_of(one, (4, 2), 64, torch.float32, "cpu", seed) for seed, one in enumerate(lens)]
    return (endured_on(guard, calls) or (None, ""))[1]


def endured_on(guard: Guard, calls: list[AttentionCall], runs: int = 10) -> tuple[AttentionCall, str] | None:
    run = run_calls(guard, calls, repeats=0)
    assert not any(one.fails for one in run.results)
    return endure(guard, run.results, guard.runs + runs, 60)


def plans_by_address(call: AttentionCall, plans: dict[object, list[int]]) -> Tensor:
    """Keeps the starts of sequences by the address where they lie."""
    key = (call.cu_seqlens_k.data_ptr(), call.q.shape, call.k.shape)
    starts = plans.setdefault(key, call.cu_seqlens_k.tolist())
    return rounded_oracle(replace(call, cu_seqlens_k=torch.tensor(starts, dtype=torch.int32)))


@pytest.mark.parametrize(
    "lens", [[[(1, 20), (1, 40)], [(1, 40), (1, 20)]], [[(5, 20), (9, 0)], [(5, 19), (9, 1)]]], ids=["decode", "extend"]
)
def test_a_plan_that_is_kept_by_address_is_another_calls(lens: list[list[tuple[int, int]]]) -> None:
    kept: list[AttentionCall] = []  # so that no address is used twice by chance
    plans: dict[object, list[int]] = {}

    def kernel(call: AttentionCall) -> Tensor:
        kept.append(call)
        return plans_by_address(call, plans)

    result = endured(kernel, *lens)
    assert "in the buffers of a call with other lengths, on a call that it computed correctly before" in result
    assert endured(rounded_oracle, *lens) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_calls_of_each_dtype_run_many_times(dtype: torch.dtype) -> None:
    """Partitions that are done are counted, and the count is never reset: a short call has a single partition."""
    launches = 0

    def kernel(call: AttentionCall) -> Tensor:
        nonlocal launches
        launches += call.q.dtype == dtype and max(call.lens_k) > 256
        return rounded_oracle(call) * (1.0 if launches <= 30 else 0.5)

    calls = [
        call_of([(1, cached)], (4, 2), 64, kind, "cpu", cached) for kind in (torch.float16, torch.bfloat16) for cached in (20, 300)
    ]
    wrong = endured_on(Guard(kernel), calls, 200)
    assert wrong is not None
    assert "on a call that it computed correctly before" in wrong[1]
    assert wrong[0].q.dtype == dtype
