from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.matrix import cases
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check
from assay.harness.errors import AssayError
from assay.harness.localize.guard import MAX_REPEATED, Guard, compute, run_calls, runs_of

CALL = call_of([(5, 3)], (4, 2), 16, torch.bfloat16, "cpu")


def raises(call: AttentionCall) -> Tensor:
    raise IndexError("block 3\nof 2")


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (raises, r"raised IndexError: block 3 \(test_guard.py, line \d+, in raises\)$"),
        (lambda call: rounded_oracle(call).float(), "returned: torch.float32"),
        (lambda call: rounded_oracle(call)[1:], r"returned: torch.bfloat16 \[4, 4, 16\]"),
        (lambda call: None, "returned: NoneType"),
    ],
)
def test_breaches_of_the_contract_are_remembered(kernel: Kernel, how: str) -> None:
    guard = Guard(kernel)
    with pytest.raises(KernelRefused, match=how):
        guard(CALL)
    assert len(guard.breaches) == 1


def test_a_breach_names_the_kernels_own_line() -> None:
    def multiplies(call: AttentionCall) -> Tensor:
        return torch.nn.functional.linear(call.q, call.k)

    with pytest.raises(KernelRefused, match=r"\(test_guard.py, line \d+, in multiplies\)$"):
        Guard(multiplies)(CALL)
    with pytest.raises(KernelRefused, match=r"raised TypeError: .* \(when it was called\)$"):
        Guard(lambda: CALL.q)(CALL)  # type: ignore[arg-type, misc]


def test_what_triton_wraps_is_located_in_the_kernel() -> None:
    def tile() -> None:
        raise ValueError("arange's range must be a power of 2")

    def attention(call: AttentionCall) -> Tensor:
        try:
            tile()
        except ValueError as error:
            raise RuntimeError("at 12:8:\n    tl.arange(0, 80)\n    ^\narange's range must be a power of 2") from error
        return call.q

    with pytest.raises(KernelRefused, match=r"RuntimeError: arange's range must be a power of 2 \(.*, in tile\)$"):
        Guard(attention)(CALL)


def test_a_refusal_is_a_kernels_right() -> None:
    def refuses(call: AttentionCall) -> Tensor:
        raise KernelRefused("no bfloat16")

    guard = Guard(refuses)
    seen = run_calls(guard, [CALL])
    assert guard.breaches == {}
    assert [(call, why) for call, why in seen.refused] == [(CALL, "no bfloat16")]
    assert seen.results == ()


def test_a_kernel_that_fails_when_repeated_is_reported() -> None:
    runs = 0

    def tired(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        if runs > 1:
            raise RuntimeError("out of memory")
        return rounded_oracle(call)

    guard = Guard(tired)
    seen = run_calls(guard, [CALL])
    assert len(seen.results) == 1
    [(failed, why)] = seen.failed_repeats
    assert failed is CALL
    assert why.startswith("raised RuntimeError: out of memory (test_guard.py, line ")


@pytest.mark.parametrize("count", [1, MAX_REPEATED, MAX_REPEATED + 1, 3 * MAX_REPEATED])
def test_some_are_run_again_from_all_over(count: int) -> None:
    given: list[int] = []

    def kernel(call: AttentionCall) -> Tensor:
        given.append(call.layer)
        return rounded_oracle(call)

    guard = Guard(kernel)
    run_calls(guard, [CALL.with_spec(layer=number) for number in range(count)])
    again = given[count::2]
    assert guard.runs == runs_of(count)
    assert again[0] == 0
    assert count / 2 - 1 <= len(again) * (count / min(count, MAX_REPEATED)) <= count * 2
    assert len(again) <= MAX_REPEATED
    assert again[-1] >= count - 1 - count // MAX_REPEATED


def test_a_workspace_that_grows_in_inference_mode_is_not_written_outside_of_it() -> None:
    workspace = [torch.empty(0)]

    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        if workspace[0].numel() < out.numel():
            workspace[0] = torch.empty(out.numel(), dtype=out.dtype)
        workspace[0][: out.numel()].copy_(out.flatten())
        return workspace[0][: out.numel()].view_as(out).clone()

    longer = call_of([(9, 3)], (4, 2), 16, torch.bfloat16, "cpu").with_spec(grad_mode="inference_mode")
    seen = run_calls(Guard(kernel), [longer, CALL])
    assert [result.call for result in seen.results] == [longer, CALL]
    assert not seen.refused
    assert not seen.failed_repeats


def test_a_kernel_that_calls_exit_does_not_end_the_check() -> None:
    def leaves(call: AttentionCall) -> Tensor:
        sys.exit(0)

    guard = Guard(leaves)
    assert not run_calls(guard, [CALL]).results
    [breach] = guard.breaches
    assert breach.startswith("raised SystemExit: 0")
    with pytest.raises(AssayError, match=r"raised SystemExit: 0 \(test_guard\.py, line \d+, in leaves\)"):
        compute(leaves, CALL)


def test_a_wrapper_of_assay_is_not_the_kernel() -> None:
    def helper(call: AttentionCall) -> Tensor:
        raise ValueError("no such tile")

    @torch.no_grad()
    def attention(call: AttentionCall) -> Tensor:
        return helper(call)

    result = check(attention, cases=cases(("decode",))[:3], read_out=0)
    (finding,) = result.findings
    assert re.fullmatch(r"the kernel raised ValueError: no such tile \(test_guard.py, line \d+, in helper\)", finding.diagnosis)
    assert "in attention" in result.traceback
    assert "in helper" in result.traceback
    assert "guard.py" not in result.traceback.replace("test_guard.py", ""), "assay's own lines are left out"
