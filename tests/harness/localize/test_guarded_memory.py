"""What a kernel writes and reads around its tensors is seen, and described."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import matrix_of
from assay.harness.localize.guard import Guard, attempt, run_calls
from assay.harness.localize.guarded_memory import _guards_of, over_reads

CALL = call_of([(5, 3), (4, 20)], (4, 2), 64, torch.float16, "cpu", seed=3)


def heads_of_all_q(call: AttentionCall) -> Tensor:
    """Reads the kv head of each q head's own number by address, as a kernel does that forgets to divide by the group."""
    heads = call.q.shape[1]
    rows, kv_heads, dim = call.k.shape
    wrong = {name: torch.as_strided(getattr(call, name), (rows, heads, dim), (kv_heads * dim, dim, 1)) for name in ("k", "v")}
    return rounded_oracle(AttentionCall(**{**vars(call), **wrong}))


def beyond_the_end(tensor: Tensor, elements: int) -> Tensor:
    return torch.as_strided(tensor, (elements,), (1,), tensor.storage_offset() + tensor.numel())


def test_the_inputs_are_what_they_were() -> None:
    seen: list[AttentionCall] = []

    def kernel(call: AttentionCall) -> Tensor:
        seen.append(call)
        return rounded_oracle(call)

    out = Guard(kernel)(CALL).out
    assert torch.equal(out, rounded_oracle(CALL))
    assert all(torch.equal(getattr(seen[0], name), getattr(CALL, name)) for name in ("q", "k", "v"))
    assert all(one.tensor.data_ptr() % 64 == 0 and int(one.whole.isnan().sum()) == len(one.fill) for one in _guards_of(CALL))


@pytest.mark.parametrize("layout", ["packed", "sliced", "each its own"])
def test_a_write_to_an_input_is_named_and_leaves_the_call_as_it_was(layout: str) -> None:
    def kernel(call: AttentionCall) -> Tensor:
        call.v.zero_()
        return rounded_oracle(call)

    given = CALL.with_spec(layout=layout)
    kernel_ = Guard(kernel)
    kernel_(given)
    assert given.v.any()
    assert (kernel_.changed, kernel_.written) == (("v",), [])
    assert attempt(kernel_, given).mutated == attempt(kernel, given).mutated == ("v",)


def test_a_write_behind_an_input_is_seen() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        beyond_the_end(call.k, 7).fill_(1.0)
        return rounded_oracle(call)

    guarded = Guard(kernel)
    guarded(CALL)
    assert guarded.written == [(CALL, "writes up to 7 elements beyond the end of k")]


def test_a_write_around_the_output_is_a_finding_with_its_call() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        out = torch.empty_like(call.q)
        out.copy_(rounded_oracle(call))
        torch.as_strided(out, (32,), (1,), out.storage_offset() - 32).fill_(2.0)
        return out

    cases = matrix_of(Declaration(), phases=["decode"], dtypes=["float16"])[:4]
    result = check(kernel, cases=cases, read_out=0)
    (finding,) = result.findings
    assert finding.diagnosis == "the kernel writes up to 32 elements before the start of its output"
    assert "layer 0 decode" in finding.evidence[0]
    assert result.exit_code == 1


def test_a_read_beyond_the_inputs_is_described() -> None:
    kernel = Guard(heads_of_all_q)
    run = run_calls(kernel, [CALL], repeats=0)
    (result,) = run.results
    assert result.nonfinite_share > 0, "the rows behind an input are NaN"
    found = over_reads(kernel.ask, run.results)
    assert found is not None
    assert found[1] == "reads outside of its inputs: q heads 2 and 3 read beyond the end of K and V"


def test_a_wrong_kernel_that_stays_within_its_inputs_reads_nothing_outside() -> None:
    kernel = Guard(lambda call: oracle(call).to(call.q.dtype) * 2)
    assert over_reads(kernel.ask, run_calls(kernel, [CALL], repeats=0).results) is None


@pytest.mark.parametrize("period", range(2, 12))
def test_a_kernel_that_is_wrong_now_and_then_is_not_accused_of_reading_outside(period: int) -> None:
    """Nor is its changing state: what it answers by chance is one finding."""
    runs = itertools.count(1)

    def now_and_then(call: AttentionCall) -> Tensor:
        return oracle(call).to(call.q.dtype) * (0 if next(runs) % period == 0 else 1)

    kernel = Guard(now_and_then)
    run = run_calls(kernel, [CALL] * period, repeats=0)
    assert over_reads(kernel.ask, run.results) is None


def test_what_nobody_owns_shows_though_its_weight_is_0() -> None:
    def whole_tiles(call: AttentionCall) -> Tensor:
        wide = torch.as_strided(call.v, (len(call.v) + 8, *call.v.shape[1:]), call.v.stride(), call.v.storage_offset())
        return rounded_oracle(call) + (0 * wide[len(call.v) :]).sum().to(call.q.dtype)

    kernel = Guard(whole_tiles)
    run = run_calls(kernel, [CALL], repeats=0)
    assert run.results[0].fails
    assert over_reads(kernel.ask, run.results) is not None
