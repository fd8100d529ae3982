from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.sample_calls import call_of
from assay.harness.bugs.faults import fault, rounded_oracle
from assay.harness.offline.timing import time_kernels
from assay.harness.offline.timing_result import KernelTiming
from assay.harness.verdict import Verdict
from assay.reports.kernel_timing import timing_document
from assay.reports.terminal import render


def result_of(kernel: Kernel) -> KernelTiming:
    calls: list[AttentionCall] = [
        call_of([(8, 0)], (2, 1), 8, torch.float32, "cpu"),
        call_of([(8, 24), (3, 4)], (2, 1), 8, torch.float32, "cpu"),
    ]
    return time_kernels(kernel, rounded_oracle, calls, 5.0, 0.05, 0.1, "again", ("mine", "theirs"))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_of_a_wrong_kernel_is_not_reported_as_a_ratio(terminal: bool) -> None:
    shown, result = StringIO(), result_of(fault("mask-top-left"))
    right, wrong = result.shapes
    right = right.model_copy(update={"verdict": "pass"})  # whatever the clock said
    document = timing_document(result.model_copy(update={"shapes": (right, wrong)}))
    render(document, Console(file=shown, width=240, force_terminal=terminal))
    text = shown.getvalue()
    assert document.conclusion == "REGRESSION (exit code 1): the candidate is wrong on 1 of 2 shapes."
    for part in ("not reported: wrong output", "WRONG", "2 x 3-8", "top-left"):
        assert part in text, text
    assert "of the limit" not in text  # none is known of a CPU


def test_lines_are_not_wrapped_without_a_terminal() -> None:
    shown = StringIO()
    render(timing_document(result_of(rounded_oracle)), Console(file=shown, width=40))
    lines = [line for line in shown.getvalue().splitlines() if "  extend: new" in line]
    assert len(lines) == 2
    assert all("own error" in line and "ratio" in line for line in lines)


def test_what_is_not_finite_is_null() -> None:
    def broken(call: AttentionCall) -> torch.Tensor:
        return torch.full_like(call.q, float("nan"))

    result = result_of(broken)
    assert {shape.own_error for shape in result.shapes} == {None}
    assert not any(shape.right for shape in result.shapes)
    assert KernelTiming.model_validate_json(result.model_dump_json()) == result


def test_the_verdict_says_which_shapes_decided() -> None:
    [right, wrong] = result_of(fault("mask-top-left")).shapes
    assert (right.right, wrong.right) == (True, False)

    def said(*verdicts: Verdict, refused: tuple[str, ...] = ()) -> str:
        shapes = tuple(right.model_copy(update={"verdict": verdict}) for verdict in verdicts)
        update = {"shapes": shapes, "refused": refused, "verdict": "pass", "bound": 1.1}
        return timing_document(result_of(rounded_oracle).model_copy(update=update)).conclusion

    assert said("pass", "pass").endswith(": the candidate is right, and its ratio below the bound of 1.1, on all 2 shapes.")
    both = said("regression", "inconclusive", refused=("r",))
    assert "above the bound of 1.1 on 1 of 2 shapes; its ratio is shown neither" in both
    assert both.endswith("; further shapes that were refused: 1.")


def test_the_share_of_a_known_limit_is_shown() -> None:
    result, shown = result_of(rounded_oracle), StringIO()
    shapes = tuple(shape.model_copy(update={"reference_share": 0.4}) for shape in result.shapes)
    render(timing_document(result.model_copy(update={"shapes": shapes})), Console(file=shown, width=240))
    assert "of the limit 40 % and not known" in shown.getvalue()
