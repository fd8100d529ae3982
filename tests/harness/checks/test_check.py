"""`check` on kernels with a known truth: what passes, what does not, and what is reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.matrix import OTHER_HEAD_DIMS, Case, cases
from assay.harness.attention.noise import FAMILIES
from assay.harness.attention.sage import sage_attn, sage_attn_as_shipped
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.checks.check import assert_correct
from assay.harness.checks.check import check as check_and_read
from assay.harness.checks.kernel_matrix import named
from assay.harness.checks.observed import Reader
from assay.harness.errors import ExitCode, UsageError
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.localize.diagnose import STATE_KEPT
from assay.harness.localize.features import words
from assay.harness.localize.pooled import QUANTISATION_NOT_RUN
from assay.harness.verdict import CONTRACT_BROKEN, UNEXPLAINED
from assay.reports.check import message

ORACLE = "assay.harness.attention.bugs.faults:rounded_oracle"
TOP_LEFT = fault("mask-top-left")
check = partial(check_and_read, read_out=0, calls=0)
"""What is read off a kernel is tested in test_observed.py, and what many more calls show where `calls` are given."""


class Nothing(Reader):
    """Has the conditions of a wrong kernel tried, and reads nothing."""

    def wants(self, *_: object) -> bool:
        return False


SOME = 11
"""Every eleventh call shows a fault that depends on one axis of the design; an odd step, since values of an axis take turns."""


def decode_cases(dtype: torch.dtype) -> list[Case]:
    """Every fifth call of the design in decode, all beyond it, and those in another autograd mode."""
    return [
        case
        for n, case in enumerate(cases(("decode",), dtypes=[dtype]))
        if case.beyond or n % 5 == 0 or case.condition["autograd"] != "as called"
    ]


pytestmark = pytest.mark.usefixtures("shared_hypotheses", "thin_matrix")


def only_where(holds: Callable[[AttentionCall], bool], wrong: Kernel = TOP_LEFT) -> Kernel:
    return lambda call: wrong(call) if holds(call) else rounded_oracle(call)


def kinds(result: KernelResult) -> list[str]:
    return [finding.id for finding in result.findings]


@pytest.mark.parametrize("step", [2 * SOME + 1, pytest.param(1, marks=pytest.mark.slow)])
def test_a_correct_kernel_passes(step: int) -> None:
    result = check(ORACLE, calls=None, cases=cases()[::step])
    assert (result.exit_code, result.missing, result.failing, result.findings) == (ExitCode.PASS, (), (), ())
    assert result.computed == len(cases()[::step])
    assert 0 < result.worst < 1


def test_each_call_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(TOP_LEFT, cases=cases(["decode"], dtypes=["float32"])[:12])
    frame = KernelResult.model_validate_json(result.model_dump_json()).to_frame()
    assert len(frame) == result.computed > 1
    assert (frame.error / frame.bound).max() == pytest.approx(result.worst)
    assert list(frame.case[frame.wrong]) == list(result.failing)
    assert set(frame.phase) == {"decode"}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        result.to_frame()


def zero(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.q)


@pytest.mark.interpreter
def test_the_shipped_kernel_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.localize.shrink._MAX_RUNS", 20)  # an interpreted kernel would use all of it
    alone = [c for c in cases(("extend",)) if c.condition["batch"] == "one"]
    few = [alone[1], next(c for c in alone if c.condition["prefix"] == "0" and c.condition["new"] in ("1", "7", "64"))]
    result = check(sage_attn_as_shipped, cases=few)
    assert kinds(result) == ["mask-top-left"]
    assert check(sage_attn, cases=few).exit_code == ExitCode.PASS


@pytest.mark.slow  # fast: test_a_condition_is_tried_from_recorded_shapes_where_the_kernel_can_be_asked
@pytest.mark.parametrize(
    ("holds", "where"),
    [
        pytest.param(lambda call: call.q.shape[2] >= 128, "head_dim >= 128", id="head_dim"),
        pytest.param(lambda call: call.q.dtype == torch.bfloat16, "dtype is bfloat16", id="dtype"),
        pytest.param(
            lambda call: any(call.prefixes) and not all(call.prefixes),
            "some of the batch's sequences have a cached prefix",
            id="mixed batches",
        ),
        pytest.param(lambda call: call.k.shape[1] == 1, "there is one kv head", id="heads"),
    ],
)
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        pytest.param(TOP_LEFT, "mask-top-left", id="known"),
        pytest.param(lambda call: rounded_oracle(call).flip(-1), UNEXPLAINED, id="unknown"),
    ],
)
def test_a_bug_under_one_condition_is_reported_with_it(
    holds: Callable[[AttentionCall], bool], where: str, wrong: Kernel, kind: str
) -> None:
    result = check(only_where(holds, wrong), cases=cases(("extend",))[::SOME], read_out=Nothing())
    assert result.exit_code == ExitCode.REGRESSION
    assert result.tried is not None
    (said,) = re.findall(r"rong exactly where .*", message(result))
    assert said.startswith(f"rong exactly where {words(result.tried.rule)}")
    assert where in said  # also as a rival that no call separates from the rule
    assert kinds(result) == [kind]


@pytest.mark.slow  # fast: test_a_head_dim_that_nobody_claimed_is_not_covered_and_no_fault
def test_what_raises_is_wrong_and_the_rest_is_still_reported() -> None:
    def raises(call: AttentionCall) -> Tensor:
        if call.q.shape[2] == 128:
            raise IndexError("block 3 out of range")
        return TOP_LEFT(call)

    result = check(raises, phases=["decode"], dtypes=["float16"], read_out=Nothing())
    assert result.exit_code == ExitCode.REGRESSION
    assert kinds(result) == ["mask-top-left", CONTRACT_BROKEN]
    assert "IndexError: block 3 out of range" in message(result)
    assert re.search(r"[0-9]+ of [0-9]+ calls, only where head_dim is 128: the kernel raised IndexError", message(result)), message(
        result
    )
    assert all("-d128-" in one.case for one in result.broken)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [ValueError, KernelRefused], ids=["raises", "refuses"])
def test_a_head_dim_that_nobody_claimed_is_not_covered_and_no_fault(how: type[Exception]) -> None:
    def plain(call: AttentionCall) -> Tensor:
        if call.q.shape[2] not in (64, 128):
            raise how("head_dim must be 64 or 128")
        return rounded_oracle(call)

    half = {"phases": ["decode"], "dtypes": ["float16"]}
    result = check(plain, **half)
    assert (result.verdict, result.findings, result.broken, result.missing) == ("pass", (), (), ())
    assert {dim for dim in OTHER_HEAD_DIMS for one in result.refused if f"-d{dim}-" in one.case} == {*OTHER_HEAD_DIMS}
    assert "head_dim must be 64 or 128" in message(result)
    asked = check(plain, **half, head_dims=[64, 80])
    assert asked.verdict == ("regression" if how is ValueError else "inconclusive")
    assert check(declares(head_dims=(64, 80))(plain), **half).verdict == asked.verdict


@pytest.mark.slow  # fast: test_a_condition_is_found_and_holds_on_calls_that_were_drawn_for_it
@pytest.mark.parametrize(
    ("holds", "where"),
    [
        (lambda call: call.layer > 0, "layer >= 1"),
        (lambda call: call.q.shape[1] == 7 * call.k.shape[1], "q heads per kv head is 7"),
        (lambda call: call.spec.layout != "packed", "layout is each its own, heads first or sliced"),
        (lambda call: call.k.stride(0) < call.k.stride(1), "kv heads >= 2 and layout is heads first"),
        (lambda call: torch.is_inference_mode_enabled(), "autograd mode is inference_mode"),
        (lambda call: not torch.is_grad_enabled(), "autograd mode is inference_mode or no_grad"),
    ],
    ids=["layer", "ratio", "not packed", "heads first", "inference", "no-grad"],
)
def test_special_calls_show_what_depends_on_them_and_say_so(holds: Callable[[AttentionCall], bool], where: str) -> None:
    some = decode_cases(torch.float32)
    result = check(only_where(holds, zero), cases=some, phases=["decode"], read_out=Nothing())
    assert result.verdict == "regression"
    assert result.tried is not None
    assert words(result.tried.rule, result.tried.context) == where


def test_another_dtype_than_that_of_q_is_wrong() -> None:
    some = cases(("decode",))[::SOME]
    result = check(lambda call: rounded_oracle(call).double(), cases=some)
    assert result.exit_code == ExitCode.REGRESSION
    assert len(result.broken) == len(some)
    assert "returned: torch.float64" in message(result)


def refuse(why: str) -> Tensor:
    raise KernelRefused(why)


def test_a_refused_dtype_is_not_covered_and_no_pass() -> None:
    def halves(call: AttentionCall) -> Tensor:
        return refuse("no float32") if call.q.dtype == torch.float32 else rounded_oracle(call)

    result = check(halves, cases=cases(("decode",), dtypes=[torch.float16, torch.float32])[::SOME])
    assert result.exit_code == ExitCode.NO_VERDICT
    assert any("float32 was computed; declare what it supports" in one for one in result.missing)
    assert {one.why for one in result.refused} == {"no float32"}
    assert all("-float32" in one.case for one in result.refused)
    assert check(halves, phases=["decode"], dtypes=["float32"]).exit_code == ExitCode.NO_VERDICT


def test_what_a_declaration_excludes_is_not_run_and_not_needed() -> None:
    @declares(dtypes=("float16", "bfloat16"), head_dims=(64,))
    def halves(call: AttentionCall) -> Tensor:
        assert call.q.dtype != torch.float32
        assert call.q.shape[2] == 64
        return rounded_oracle(call)

    result = check(halves, phases=["decode"])
    assert (result.exit_code, result.refused) == (ExitCode.PASS, ())
    assert [result.coverage.values[axis] for axis in ("dtype", "head_dim")] == [("bfloat16", "float16"), ("64",)]
    assert "Not covered: float32, by declaration" in message(result)
    assert "Not covered: head_dim 128, by declaration" in message(result)
    with pytest.raises(UsageError, match="does not exclude"):
        check(halves, dtypes=["float32"])


@pytest.mark.slow  # fast: test_what_was_not_computed_is_no_pass
def test_a_kernel_that_refuses_a_few_calls_passes() -> None:
    def numbers(call: AttentionCall) -> tuple[float, list[int]]:
        return call.q.double().sum().item(), call.lens_k

    some = cases(("decode",), dtypes=[torch.float16])
    refused = [numbers(case.make()) for case in some[10:60:16]]

    def forgetful(call: AttentionCall) -> Tensor:
        return refuse("out of slots") if numbers(call) in refused else rounded_oracle(call)

    result = check(forgetful, cases=some, phases=["decode"])
    assert (result.verdict, len(result.refused)) == ("pass", len(refused))


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", ["int8_qk", "fp8_kv"])
def test_a_declared_quantisation_that_did_not_run_is_a_finding(noise: str) -> None:
    @declares(noise=noise)
    def silent(call: AttentionCall) -> Tensor:
        return torch_sdpa(call)

    some = cases(("extend",), dtypes=[torch.float16, torch.float32], head_dims=(64,))[:: 4 * SOME]
    result = check(silent, cases=some)
    assert result.exit_code == ExitCode.REGRESSION
    assert kinds(result) == [QUANTISATION_NOT_RUN]
    assert result.failing == ()
    assert "the kernel that declares it probably did not run" in message(result)


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        (lambda call: refuse("not today"), "no extend call was computed"),
        (lambda call: refuse("no prefix") if any(call.prefixes) else rounded_oracle(call), "with a cached prefix"),
        (lambda call: rounded_oracle(call) if all(call.prefixes) else refuse("no"), "without a cached prefix"),
        (lambda call: refuse("no") if call.phase == "decode" else rounded_oracle(call), "no decode call"),
        (lambda call: rounded_oracle(call) if call.q.shape[2] == 64 else refuse("no"), "a pass needs 90 %"),
    ],
    ids=["nothing", "no prefix", "prefix only", "no decode", "few"],
)
def test_what_was_not_computed_is_no_pass(kernel: Kernel, missing: str) -> None:
    result = check(kernel, cases=cases()[:: 3 * SOME])
    assert result.exit_code == ExitCode.NO_VERDICT
    assert any(missing in one for one in result.missing)
    assert message(result).startswith("No verdict")


def test_only_phases_that_are_declared_are_needed() -> None:
    extend_only, some = declares(phases=("extend",))(lambda call: rounded_oracle(call)), cases()[:: 3 * SOME]
    assert check(extend_only, cases=some).exit_code == ExitCode.PASS
    asked = check(extend_only, phases=["extend", "decode"], cases=some)
    assert asked.exit_code == ExitCode.NO_VERDICT
    assert asked.missing == ("no decode call was computed (the kernel declares extend only)",)


@pytest.mark.slow  # fast: test_a_fault_is_named_and_pinned_to_its_layer_and_head
def test_a_finding_names_no_layer_that_is_right() -> None:
    def scaled_by_layer(call: AttentionCall) -> Tensor:
        return rounded_oracle(call.with_spec(scale=call.scale / (call.layer + 1)))

    result = check(scaled_by_layer, cases=decode_cases(torch.float32), phases=["decode"])
    assert result.verdict == "regression"
    assert not [finding.where for finding in result.findings if "layer 0" in finding.where]


def test_an_assertion_fails_where_an_input_is_written() -> None:
    def in_place(call: AttentionCall) -> Tensor:
        call.q.mul_(call.scale)
        return rounded_oracle(call.with_spec(scale=1.0))

    call = call_of([(5, 3)], (2, 1), 64, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="writes to its inputs: q; work on copies"):
        assert_correct(in_place, call)


@pytest.mark.few(1)
@pytest.mark.parametrize("buffers", [1, 2])
def test_outputs_in_one_buffer_are_wrong(buffers: int) -> None:
    pools: dict[torch.dtype, list[Tensor]] = {}

    def static(call: AttentionCall) -> Tensor:
        pool = pools.setdefault(call.q.dtype, [torch.empty(1_000_000, dtype=call.q.dtype) for _ in range(buffers)])
        pool.append(pool.pop(0))
        return pool[0][: call.q.numel()].view(call.q.shape).copy_(rounded_oracle(call))

    result = check(static, phases=["decode"], dtypes=["float16"])
    assert (result.verdict, result.failing, kinds(result)) == ("regression", (), [CONTRACT_BROKEN])
    assert "returns the memory of an earlier output" in result.findings[0].diagnosis
    assert result.findings[0].where.endswith("calls")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_kernel_that_becomes_wrong_after_many_runs_is_wrong(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["assay.harness.checks.check"].CALLS, "small", 300)
    runs = 0

    def tires(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        if runs <= 200:
            return rounded_oracle(call)
        if how == "raises":
            raise RuntimeError("out of slots")
        return torch.zeros_like(call.q)

    given = {"phases": ["decode"], "dtypes": ["float16"]}
    assert check(tires, calls=150, **given).verdict == "pass"
    runs = 0
    result = check(tires, calls=None, **given)
    assert (result.verdict, kinds(result), result.coverage.runs) == ("regression", [STATE_KEPT], 201)
    assert "in its run 201" in result.findings[0].diagnosis


@pytest.mark.slow  # fast: test_a_declared_quantisation_that_did_not_run_is_a_finding
def test_noise_is_excused_only_where_it_is_declared() -> None:
    def coarse(call: AttentionCall) -> Tensor:
        return honest_outputs(call, FAMILIES["int8_kv"], members=1)[0].to(call.q.dtype)

    some = cases(("decode",), dtypes=[torch.float32], head_dims=[64])[:: 2 * SOME]
    assert check(coarse, cases=some, phases=["decode"]).exit_code == ExitCode.REGRESSION
    assert check(coarse, cases=some, phases=["decode"], noise="int8_kv").exit_code == ExitCode.PASS


def test_the_command_and_the_test_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["assay.harness.checks.check"].CALLS, "small", 10)
    few = {"seed": 3, "phases": ["decode"], "dtypes": ["bfloat16"], "head_dims": [64], "calls": None}
    assert check(ORACLE, **few).again == f"assay check {ORACLE} --phase decode --dtype bfloat16 --head-dim 64 --seed 3"
    assert check(TOP_LEFT, cases=cases(("decode",), dtypes=[torch.float32], head_dims=[64])[::SOME], phases=["decode"]).test == ""
    assert named(rounded_oracle) == (ORACLE, rounded_oracle)
    assert named(TOP_LEFT)[0] == "fault.<locals>.kernel"
    assert named(partial(rounded_oracle))[0] == "partial"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"kernel": "no.such:kernel"}, "no.such"),
        ({"phases": ["prefill"]}, "prefill"),
        ({"dtypes": ["int8"]}, "int8"),
        ({"size": "huge"}, "huge"),
        ({"noise": "int4"}, "int4"),
        ({"cases": []}, "no case"),
    ],
)
def test_a_usage_error_says_what_is_wrong(given: dict[str, object], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        check(**{"kernel": ORACLE, **given})  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_smallest_call_is_named_everywhere_and_the_test_has_the_words_of_the_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "averaging.py").write_text(
        "from dataclasses import replace\nfrom assay import oracle\n\ndef forward(call):\n"
        "    return oracle(replace(call, q=call.q * 0.5)).to(call.q.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = check("averaging:forward", phases=["decode"], dtypes=["float32"], head_dims=[64], calls=0, read_out=20)
    finding = result.findings[0]
    assert f"smallest failing call: {result.smallest}" in finding.evidence
    assert finding.operator
    assert finding.operator.replace('"', "'") in result.test, "what was read, in the docstring"
    assert "torch.tensor(" not in result.test, "its data come from a seed"


@pytest.mark.slow  # fast: test_the_test_is_a_file_that_fails_and_a_right_kernel_has_none
def test_data_that_are_not_normal_come_from_a_seed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clamping.py").write_text(
        "from dataclasses import replace\nfrom assay import oracle\n\ndef forward(call):\n"
        "    return oracle(replace(call, v=call.v.clamp(-448, 448))).to(call.q.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = check("clamping:forward", phases=["decode"], dtypes=["float16"], head_dims=[64], read_out=0)
    assert "CALL = replace(CALL, v=300 * CALL.v)" in result.test
    assert len(result.test) < 1000


def test_a_declaration_that_excludes_nearly_all_that_was_asked_for_is_no_pass() -> None:
    half = declares(dtypes=("float16",))(lambda call: rounded_oracle(call))
    asked = cases(("decode",), dtypes=[torch.float32], head_dims=[64])[:19]
    asked += cases(("decode",), dtypes=[torch.float16], head_dims=[64])[:1]
    result = check(half, cases=asked, phases=["decode"])
    assert result.exit_code == ExitCode.NO_VERDICT
    assert "its declaration excludes 19 of 20 requested calls" in result.missing


def test_an_unknown_option_is_refused_as_an_unknown_argument_is() -> None:
    with pytest.raises(TypeError, match="unexpected option 'dtype'; expected one of phases, dtypes"):
        check_and_read(rounded_oracle, dtype="float32")
