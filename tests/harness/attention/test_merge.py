"""Merging partial results by their log-sum-exps: the oracle, kernels in bounds and out of them, and a real kernel."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness import cli
from assay.harness.attention.call import AttentionCall, KernelRefused, Mask, Outputs
from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.merge import MergeCall, MergeKernel, _as_attention, _as_merge, merge_cases, merged, merging
from assay.harness.attention.oracle import log_sum_exp, oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.errors import ExitCode
from assay.harness.offline.check import check

pytestmark = pytest.mark.usefixtures("shared_hypotheses")
CASES = merge_cases()


def in_float32(call: MergeCall) -> Outputs:
    """Merges as a kernel does: one part after the other, in float32."""
    top = call.lses.amax(0)
    safe = torch.where(top.isinf(), 0.0, top)
    total, out = torch.zeros_like(top), torch.zeros_like(call.outs[0], dtype=torch.float32)
    for part, lse in zip(call.outs, call.lses, strict=True):
        weight = (lse - safe).exp()
        total, out = total + weight, out + weight[..., None] * part.float()
    return Outputs((out / total[..., None]).to(call.outs.dtype), total.log() + safe)


def test_merged_parts_of_attention_are_attention() -> None:
    call = call_of([(3, 60), (1, 200)], (4, 2), 16, torch.float64, "cpu")
    outs, lses = [], []
    for part in range(4):  # each part hides the keys of the others from all queries
        hidden = torch.cat([torch.arange(length) % 4 != part for length in call.lens_k])
        logits, values = [], []
        for b, (q0, k0) in enumerate(zip(call.cu_seqlens_q.tolist()[:-1], call.cu_seqlens_k.tolist()[:-1], strict=True)):
            new, keys = call.lens_q[b], call.lens_k[b]
            seen = Mask().visible(torch.arange(new), new, keys) & ~hidden[k0 : k0 + keys]
            k, v = (t[k0 : k0 + keys].repeat_interleave(2, 1).transpose(0, 1) for t in (call.k, call.v))
            scores = (call.scale * call.q[q0 : q0 + new].transpose(0, 1) @ k.transpose(1, 2)).masked_fill(~seen, -math.inf)
            values.append((scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1))
            logits.append(scores.logsumexp(-1).T)
        outs.append(torch.cat(values))
        lses.append(torch.cat(logits))
    parts = MergeCall(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(merged(parts).out, oracle(call))
    torch.testing.assert_close(merged(parts).lse, log_sum_exp(call))


@pytest.mark.parametrize("lses", sorted({case.condition["log-sum-exps"] for case in CASES}))
def test_a_merge_is_the_attention_that_stands_for_it(lses: str) -> None:
    for case in [case for case in CASES if case.condition["log-sum-exps"] == lses][::4]:
        call = case.make()
        merge = _as_merge(call.clone())
        assert len(merge.outs) == int(case.condition["parts"])
        if len(merge.outs[0]) > 1:
            assert (merge.lses == -math.inf).any() == ("-inf" in lses or "without" in lses)
        again = _as_attention(merge, call.spec.padded_rows)
        assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in call.tensors.items())
        expected = merged(merge)
        torch.testing.assert_close(oracle(call), expected.out[: call.rows])
        torch.testing.assert_close(log_sum_exp(call), expected.lse[: call.rows])  # type: ignore[index]


def result_of(kernel: MergeKernel) -> tuple[list[str], set[str]]:
    result = check(merging(kernel), cases=CASES[::9], read_out=0)
    where = {case.condition["log-sum-exps"] for case in result.failing}
    return [finding.id for finding in result.findings], where


def by_the_total(call: MergeCall) -> Outputs:
    """Divides by the exponential of the total log-sum-exp, which is rounded, as merges of ring attention do."""
    lse = call.lses.logsumexp(0)
    weights = (call.lses - torch.where(lse.isinf(), 0.0, lse)).exp()
    return Outputs((weights[..., None] * call.outs.float()).sum(0).to(call.outs.dtype), lse)


def in_base_2(call: MergeCall) -> Outputs:
    """Raises 2 to powers, as FlashInfer does."""
    powers = call.lses * math.log2(math.e)
    top = powers.amax(0)
    safe = torch.where(top.isinf(), 0.0, top)
    weights = (powers - safe).exp2()
    total = weights.sum(0)
    out = (weights[..., None] * call.outs.float()).sum(0) / total[..., None]
    return Outputs(out.to(call.outs.dtype), (total.log2() + safe) * math.log(2))


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", [in_float32, by_the_total, in_base_2])
def test_a_right_merge_is_within_its_bounds(kernel: MergeKernel) -> None:
    assert check(merging(kernel), cases=CASES, read_out=0).verdict == "pass"


def reading(change: Callable[[Tensor], Tensor]) -> MergeKernel:
    """A merge that weighs by changed log-sum-exps, and returns the right total."""

    def merge(call: MergeCall) -> Outputs:
        return Outputs(in_float32(MergeCall(call.outs, change(call.lses))).out, in_float32(call).lse)

    return merge


def weighing(weights_of: Callable[[Tensor], Tensor]) -> MergeKernel:
    """A merge with other weights of its parts, and the right total."""

    def merge(call: MergeCall) -> Outputs:
        weights = weights_of(call.lses)
        out = (weights[..., None] * call.outs.float()).sum(0) / weights.sum(0)[..., None]
        return Outputs(out.to(call.outs.dtype), in_float32(call).lse)

    return merge


def total_in_base_2(call: MergeCall) -> Outputs:
    right = in_float32(call)
    return Outputs(right.out, right.lse / math.log(2))  # type: ignore[operator]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kernel", "id", "where", "only"),
    [
        pytest.param(reading(lambda lses: lses / math.log(2)), "exp-with-log2e", {"normal", "some -inf"}, False, id="e"),
        pytest.param(weighing(torch.exp), "", {"near 200", "far apart"}, True, id="overflows"),
        pytest.param(reading(lambda lses: lses.clamp(min=0.0)), "", {"some -inf"}, False, id="empty parts weigh 1"),
        pytest.param(total_in_base_2, "lse-base-2", set(), True, id="base 2"),
        pytest.param(weighing(lambda lses: (lses - lses[0]).exp()), "", {"first part -inf"}, False, id="first part has keys"),
    ],
)  # fmt: skip
def test_a_merge_that_is_wrong_is_found(kernel: MergeKernel, id: str, where: set[str], only: bool) -> None:
    found, seen = result_of(kernel)
    assert found
    assert found[0] == (id or found[0])
    assert where <= seen
    assert not only or seen == where


def test_only_merges_are_merged() -> None:
    with pytest.raises(KernelRefused, match="this is no merge"):
        _as_merge(call_of([(1, 9), (1, 3)], (4, 4), 16, torch.float16, "cpu"))


@pytest.mark.slow
def test_sglangs_kernel_of_two_parts_passes() -> None:
    pytest.importorskip("sglang")
    interpret_without_gpu()
    from sglang.kernels.ops.attention.merge_state import merge_state_triton

    def two(call: MergeCall) -> Outputs:
        if len(call.outs) != 2:
            raise KernelRefused("two parts alone")
        (a, b), (lse_a, lse_b) = call.outs, call.lses
        return Outputs(*merge_state_triton(a, lse_a, b, lse_b))

    some = [case for case in CASES if case.condition["dtype"] != "bfloat16" and case.condition["tokens"] in ("1", "7")][::2]
    result = check(merging(two), cases=[case for case in some if not case.beyond], read_out=0, repeats=1)
    assert result.findings == ()
    assert len(result.computed) > 2


def of_four(prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor) -> Tensor:
    return prefix_out


def of_attention(call: AttentionCall) -> Tensor:
    return call.q


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str, kernel: str = "in_float32") -> int:
    monkeypatch.setattr(sys, "argv", ["assay", "check", f"tests.harness.attention.test_merge:{kernel}", *arguments])
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_the_command_checks_a_merge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--op", "merge", "--case", "2_parts", "--calls", "0") == ExitCode.PASS
    assert "correct on all 16 calls" in capsys.readouterr().out
    assert call(monkeypatch, "--op", "merge", "--dtype", "float16") == ExitCode.USAGE
    assert "--dtype chooses calls of attention" in " ".join(capsys.readouterr().err.split())
    assert call(monkeypatch, "--op", "merges") == ExitCode.USAGE


def test_what_takes_no_merge_is_told_the_signature_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signature = "one argument with .outs [parts, tokens, heads, head_dim] and .lses [parts, tokens, heads]"
    expected = {"of_four": ExitCode.USAGE, "of_nothing": ExitCode.USAGE, "of_attention": ExitCode.NO_VERDICT}
    for kernel, code in expected.items():
        assert call(monkeypatch, "--op", "merge", "--case", "2_parts", "--calls", "0", kernel=kernel) == code
        said = " ".join("".join(capsys.readouterr()).split())
        assert signature in said
        assert "AttentionCall" not in said
        assert ("takes no merge" in said) == (kernel != "of_nothing")
