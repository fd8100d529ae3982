from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.faults import fault, rounded_oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.offline.timing import time_kernels
from assay.harness.offline.timing_result import KernelTiming
from assay.reports.kernel_timing_terminal import render_timing


def result_of(kernel: Kernel) -> KernelTiming:
    calls: list[AttentionCall] = [
        call_of([(8, 0)], (2, 1), 8, torch.float32, "cpu"),
        call_of([(8, 24), (3, 4)], (2, 1), 8, torch.float32, "cpu"),
    ]
    return time_kernels(kernel, rounded_oracle, calls, 5.0, 0.05, 0.1, "again", ("mine", "theirs"))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_of_a_wrong_kernel_is_not_reported_as_a_ratio(terminal: bool) -> None:
    shown = StringIO()
    render_timing(result_of(fault("mask-top-left")), Console(file=shown, width=240, force_terminal=terminal))
    text = shown.getvalue()
    for part in ("not reported: wrong output", "WRONG", "not known", "REGRESSION (exit code 1)", "2 x 3-8", "top-left"):
        assert part in text, text


def test_lines_are_not_wrapped_without_a_terminal() -> None:
    shown = StringIO()
    render_timing(result_of(rounded_oracle), Console(file=shown, width=40))
    lines = [line for line in shown.getvalue().splitlines() if "phase extend" in line]
    assert len(lines) == 2
    assert all("own error" in line and "ratio" in line for line in lines)


def test_what_is_not_finite_is_null() -> None:
    def broken(call: AttentionCall) -> torch.Tensor:
        return torch.full_like(call.q, float("nan"))

    result = result_of(broken)
    assert {shape.own_error for shape in result.shapes} == {None}
    assert not any(shape.right for shape in result.shapes)
    assert KernelTiming.model_validate_json(result.model_dump_json()) == result
