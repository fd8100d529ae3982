from __future__ import annotations

import io
from functools import cache, partial

import pytest
import torch
from rich.console import Console
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.matrix import cases
from assay.harness.checks import kernel_matrix
from assay.harness.checks.check import check as check_and_read
from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import Axis, KernelResult, Property, Tried
from assay.reports.check import _MAX_REFUSALS, _cause, _covered, _covered_briefly, _not_covered, check_document, message, sentence
from assay.reports.terminal import render

TOP_LEFT = fault("mask-top-left")
EXPERIMENTS = 60
pytestmark = pytest.mark.usefixtures("thin_matrix", "few_experiments")

check = partial(check_and_read, read_out=0)


@cache
def decode_calls() -> int:
    """How many decode calls the matrix has."""
    return len(kernel_matrix.matrix_of(Declaration(), phases=["decode"]))


@cache
def decoded(kernel: Kernel) -> KernelResult:
    """The result of a kernel on the decode calls of the matrix: a wrong one is not run on all of them."""
    return check_and_read(kernel, phases=["decode"], calls=0, read_out=1)


def wrong_at_128(call: AttentionCall) -> Tensor:
    return TOP_LEFT(call) if call.q.shape[2] == 128 else rounded_oracle(call)


def picky(call: AttentionCall) -> Tensor:
    if call.q.dtype == torch.float32:
        raise KernelRefused(f"[bold]no[/] float32 with {call.k.shape[0]} keys")
    return rounded_oracle(call)


def not_a_number(call: AttentionCall) -> Tensor:
    return torch.full_like(rounded_oracle(call), float("nan"))


def printed(result: KernelResult) -> str:
    out = io.StringIO()
    render(check_document(result), Console(file=out, width=100), everything=True)
    return out.getvalue()


def first_screen(result: KernelResult, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    render(check_document(result), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_the_first_screen_of_a_wrong_kernel_fits_a_terminal() -> None:
    result = decoded(wrong_at_128)
    lines = first_screen(result)
    assert lines[0].startswith(f"✕ REGRESSION   {result.kernel} ")
    assert len(lines) <= 22, "24 with the prompt and the command"
    labels = [line[:13].strip() for line in lines[2:] if line[:13].strip() and not line.startswith(" ")]
    assert labels == ["Observed", "Fails at", "Error", "Smallest", "Not covered", "Next"]
    assert lines[-2].startswith(f"Next         {result.again} --test test_wrong_at_128.py"), lines
    assert lines[-1].split() == ["assay", "explain", "mask-top-left"]


def test_the_next_step_is_not_the_command_that_was_just_given() -> None:
    written = decoded(wrong_at_128).model_copy(update={"again": "assay check mine:forward --test test_a.py", "test": "source"})
    assert any(line.startswith("Next         python -m pytest test_a.py") for line in first_screen(written))
    quick = decoded(rounded_oracle).model_copy(update={"quick": "float32", "again": "assay check --quick mine:forward"})
    (step,) = [line for line in first_screen(quick, 160) if line.startswith("Next")]
    assert step.split()[1:4] == ["assay", "check", "mine:forward"]
    assert "the whole matrix" in step


def test_a_result_is_printed_as_one_line() -> None:
    result = decoded(rounded_oracle)
    assert str(result) == repr(result)
    assert str(result).startswith("<KernelResult pass")


def test_a_pass_has_at_most_five_lines_and_no_verdict_begins_with_what_is_missing() -> None:
    right, refused = first_screen(decoded(rounded_oracle), 120), first_screen(decoded(picky))
    assert right[0].startswith("✓ PASS   ")
    assert len(right) <= 5
    assert refused[0].startswith("? INCONCLUSIVE   ")
    assert next(line for line in refused if line[:1] not in ("?", " ") and line).startswith("Missing      ")
    assert len(refused) <= 20


def test_a_quick_check_is_partial() -> None:
    result = check_and_read(rounded_oracle, quick=True)
    assert (result.verdict, result.quick, result.coverage.values["dtype"]) == ("pass", "float32, head_dim 64", ("float32",))
    assert set(result.coverage.reach) == {"extend", "decode"}
    assert first_screen(result)[0].startswith("✓ PARTIAL PASS   ")


def test_a_wrong_kernel_is_reported_with_conditions_bug_and_reproduction() -> None:
    result = decoded(wrong_at_128)
    for text in (message(result), printed(result)):
        for part in (
            f"ot covered: the rest of the matrix ({result.left_out} calls)",
            f'Computes "{BY_ID["mask-top-left"].title}"', "1+1, 1 q head on 1 kv head, head_dim 128",
        ):  # fmt: skip
            assert part in text, part
    assert result.exit_code == ExitCode.REGRESSION
    assert result.again in message(result)


def test_a_correct_kernel_is_one_sentence_and_what_was_covered() -> None:
    result = decoded(rounded_oracle)
    assert result.summary().startswith(
        f"assay.harness.attention.bugs.faults:rounded_oracle is correct on all {decode_calls()} calls"
    )
    assert "; worst error " in result.summary()
    said = " ".join(printed(result).split())
    assert f"Covered: {_covered_briefly(result)};" in said
    for axis, values in _covered(result.coverage):
        assert f"{axis}: values {values}" in said, axis
    assert "Findings" not in said
    assert result.exit_code == ExitCode.PASS


def test_what_is_not_covered_is_summarised() -> None:
    result = decoded(picky)
    lines = _not_covered(result)
    assert len(lines) == _MAX_REFUSALS + 1
    assert lines[-1].endswith("more refusals")
    assert "[bold]no[/] float32" in printed(result)
    assert f"{len(result.refused)} not covered" in sentence([result])


def test_one_line_for_several_kernels() -> None:
    right, wrong = decoded(rounded_oracle), decoded(wrong_at_128)
    assert sentence([right]).startswith(f"1 kernel, {decode_calls()} calls, worst 0.")
    both, failing = sentence([right, wrong, right]), len(wrong.failing)
    done = wrong.computed
    assert both.startswith(f"causal mask top-left; {failing} of {done} calls; 2 kernels, {2 * decode_calls() + done} calls, worst ")
    assert both.endswith(f", {decode_calls() - done} not covered")
    refuses_all = check(picky, cases=cases(("decode",), dtypes=[torch.float32])[::5], phases=["decode"])
    assert sentence([refuses_all]) == f"1 kernel, 0 calls, {len(refuses_all.refused)} not covered"
    assert refuses_all.summary() == f"No verdict on {refuses_all.kernel}: requirements of a pass were not tested"
    assert refuses_all.exit_code == ExitCode.NO_VERDICT
    assert "no decode call was computed" in printed(refuses_all)


def test_what_is_missing_has_a_line_each() -> None:
    result = decoded(picky)
    assert len(result.missing) >= 2
    for text in (message(result), printed(result)):
        assert text.count("Missing for a pass: ") == len(result.missing)
        for one in result.missing:
            assert one in text
    [dtype] = [one for one in result.missing if "dtype float32 was computed" in one]
    assert dtype.endswith(('dtypes=("bfloat16", "float16")', 'dtypes=("float16", "bfloat16")'))


def test_an_output_that_is_not_finite_is_said_in_words() -> None:
    result = check(not_a_number, cases=cases(("decode",), dtypes=[torch.bfloat16])[:5])
    assert result.summary().endswith("calls; an output is not finite")
    assert ": it is not finite." in result.findings[0].diagnosis


@pytest.mark.slow  # fast: test_one_line_for_several_kernels
def test_the_cause_comes_first_and_counts_the_calls_of_all_results_of_a_kernel() -> None:
    lost = fault("last-block-lost-64")
    lost.__qualname__ = "lost"
    extend = check(lost, cases=cases(("extend",), dtypes=[torch.float32])[::60])
    decode = check(lost, cases=cases(("decode",), dtypes=[torch.float32], head_dims=[64])[::18])
    failing, calls = len(extend.failing) + len(decode.failing), extend.computed + decode.computed
    assert _cause([extend, decode]) == f"last partial block of 64 lost; {failing} of {calls} calls"
    assert message(extend).startswith(f"last partial block of 64 lost; {len(extend.failing)} of {extend.computed} calls: ")
    assert _cause([decoded(rounded_oracle)]) == ""
    other = check(not_a_number, cases=cases(("decode",), dtypes=[torch.bfloat16])[:5])
    named = _cause([decode, other]).split("; ")
    assert named[0] == f"{decode.kernel}: last partial block of 64 lost"
    assert named[2].startswith(f"{other.kernel}: ")


def test_where_a_kernel_is_wrong_is_said_with_its_borders() -> None:
    rule = (Property(feature="prefix", kind=">=", values=(129.0,)),)
    axes = (
        Axis(name="cached prefix", wrong=(129, 130, 512), right=(0, 1, 64, 128)),
        Axis(name="dtype", wrong=("float32",), right=("bfloat16", "float16")),
        Axis(name="layer", wrong=(1, 7), right=(0, 2, 16)),
    )
    result = decoded(rounded_oracle).model_copy(
        update={"tried": Tried(rule=rule, context={"phase": "decode"}, wrong=15, right=17, calls=441), "axes": axes}
    )
    said = printed(result)
    assert "Within decode: wrong exactly where cached prefix >= 129." in said
    assert "wrong in 15 of 15 sequences that meet this, right in 17 of 17 others" in " ".join(said.split())
    for row in (
        "cached prefix: Wrong 129 to 512; Right 0 to 128",
        "dtype: Wrong float32; Right bfloat16, float16",
        "layer: Wrong 1, 7; Right 0, 2, 16",
    ):
        assert row in said
    assert "It is wrong outside of this too." not in said
    assert result.tried is not None
    more = result.model_copy(update={"tried": result.tried.model_copy(update={"outside": 3}), "axes": (), "by_numbers": True})
    assert "It is wrong outside of this too." in " ".join(printed(more).split())
    assert "The error depends on the numbers: the same call is wrong with some" in " ".join(printed(more).split())
