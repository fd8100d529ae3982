from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK
from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sage import sage_attn_as_shipped
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED, causes
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import run_and_repeat
from assay.harness.verdict import UNEXPLAINED, Finding

Lens = list[list[tuple[int, int]]]
MATRIX: Lens = [[(24, 0)], [(20, 1)], [(20, 77)], [(9, 64)], [(40, 30), (26, 60)], [(70, 0), (5, 3)]]
FEW = [[(24, 0)], [(20, 1)], [(9, 64)]]
"""Enough for a kernel that is interpreted."""

pytestmark = pytest.mark.usefixtures("shared_hypotheses")


def calls(layers: int, head_dim: int = 32, dtype: torch.dtype = torch.bfloat16, matrix: Lens = MATRIX) -> list[AttentionCall]:
    return [
        call_of(lens, (4, 2), head_dim, dtype, "cpu", seed=100 * layer + i).with_spec(layer=layer)
        for layer in range(layers)
        for i, lens in enumerate(matrix)
    ]


def shared(*kernels: Kernel) -> Kernel:
    """Layer i runs kernel i."""
    return lambda call: kernels[call.layer](call)


@pytest.mark.slow
@pytest.mark.interpreter
def test_the_seed_case_is_named() -> None:
    [finding] = diagnose(run_and_repeat(sage_attn_as_shipped, calls(1, 64, matrix=FEW)), "assay replay pack")
    assert (finding.id, finding.severity) == ("mask-top-left", "serious")
    assert finding.where == "extend, cached prefix > 0, layer 0, all 4 heads"
    assert finding.does == "applies a top-left causal mask once a prefix is cached"
    assert re.fullmatch(
        r'Computes "causal mask top-left" in extend with a cached prefix \(layer 0, all 4 heads\): '
        r"matches that formula to 0\.\d+ %; correct attention differs by \d+ %\. Correct without a cached prefix\.",
        finding.diagnosis,
    )
    assert finding.sentence == finding.diagnosis
    assert finding.reproduce == "assay replay pack"


@pytest.mark.parametrize(
    ("when", "words"),
    [
        (lambda new, prefix: prefix % 64 == 0, "only where cached prefix % 64 == 0"),
        (lambda new, prefix: prefix >= 16, "only where cached prefix >= 30"),
        (lambda new, prefix: prefix == 0, "only where no cached prefix"),
    ],
)
def test_a_bug_under_a_condition_only(when: Callable[[int, int], bool], words: str) -> None:
    [finding] = diagnose(run_and_repeat(fault("scale-missing", when=when), calls(2)))
    assert finding.id == "scale-missing"
    assert finding.where == f"extend, {words}, all 2 layers, all 4 heads"


def test_two_bugs_in_two_layers_are_two_findings_and_the_leak_is_first() -> None:
    kernel = shared(fault("mask-missing"), rounded_oracle, fault("leak-keys-values-previous"))
    first, second = diagnose(run_and_repeat(kernel, calls(3)))
    assert first.id == "leak-keys-values-previous"
    assert "(leak across requests)" in first.diagnosis
    assert first.severity == "serious"
    assert "layer 2 of 3" in first.where
    assert second.id == "mask-missing"
    assert "layer 0 of 3" in second.where


def test_what_no_hypothesis_explains_says_so_with_the_smallest_call() -> None:
    def odd(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        out[:, 1] = out[:, 1].flip(-1)
        return out

    [finding] = diagnose(run_and_repeat(odd, calls(2)))
    assert finding.id == UNEXPLAINED
    assert finding.does == "computes something other than attention"
    assert re.fullmatch(
        r"No known bug explains the output in extend \(all 2 layers, head 1 of 4\): correct attention differs by 1\d+ %\.",
        finding.diagnosis,
    )
    assert finding.where == "extend, all 2 layers, head 1 of 4"
    assert any("smallest failing call: layer 0 extend, new+prefix 20+1," in e for e in finding.evidence)


def test_what_is_not_a_number_is_out_of_bounds_and_reported() -> None:
    def lost(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        out[-1, 3] = float("nan")
        return out

    [finding] = diagnose(run_and_repeat(lost, calls(1)))
    assert finding.id == UNEXPLAINED
    assert "head 3 of 4" in finding.where
    assert any("not finite" in e for e in finding.evidence)


def test_indistinguishable_hypotheses_are_listed() -> None:
    def lost(lens: list[tuple[int, int]]) -> Finding:
        call = call_of(lens, (4, 2), 32, torch.float32, "cpu")
        [finding] = diagnose(run_and_repeat(fault("last-block-lost-16"), [call]))
        return finding

    # Of 39 tokens a block of 16 loses 7, and so does one of 32; of 55 they lose 7 and 23.
    both, alone = lost([(9, 30)]), lost([(25, 30)])
    assert (both.id, both.equivalent) == ("last-block-lost-16", ("last-block-lost-32",))
    assert f'on these calls it cannot be distinguished from "{BY_ID["last-block-lost-32"].title}"' in both.diagnosis
    assert (alone.id, alone.equivalent) == ("last-block-lost-16", ())
    assert "cannot be distinguished" not in alone.diagnosis


def test_of_two_that_fit_the_leak_is_named_even_if_the_other_is_nearer() -> None:
    call = call_of([(1, 1), (1, 1)], (2, 1), 32, torch.bfloat16, "cpu")
    v = call.v.clone()
    v[:2] = v[3]  # the previous request's values are the own newest one, which a shifted prefix would read as well,
    v[0, :, 0] *= 0.99  # up to less than noise
    shifted = fault("prefix-values-shifted")
    [cause] = causes(run_and_repeat(lambda call: shifted(call) * 1.008, [replace(call, v=v)]))
    kinds = [h.kind for h in cause.hypotheses]
    assert kinds[0] == LEAK
    assert "cached-prefix" in kinds


@pytest.mark.few(1)
@pytest.mark.parametrize("factor", [1.02, 0.955])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scaled_output_is_named_in_every_dtype(dtype: torch.dtype, factor: float) -> None:
    def scaled(call: AttentionCall) -> Tensor:
        return (oracle(call) * factor).to(call.q.dtype)

    [finding] = diagnose(run_and_repeat(scaled, calls(2, dtype=dtype)))
    assert finding.id == OUTPUT_SCALED
    assert finding.where == "extend, all 2 layers, all 4 heads"
    assert finding.evidence[0] == f"output scaled: every output is {factor:g} times what it should be"


def test_zeros_are_not_written_rather_than_scaled() -> None:
    def nothing_beyond_30_keys(call: AttentionCall) -> Tensor:
        out = oracle(call).to(call.q.dtype)
        return torch.zeros_like(out) if len(call.k) > 30 else out

    found = diagnose(run_and_repeat(nothing_beyond_30_keys, calls(1, matrix=[[(9, 0)], [(9, 80)], [(40, 80)]])))
    assert [one.id for one in found] == [OUTPUT_NOT_WRITTEN]
    assert found[0].does == "does not write its output once a prefix is cached"
    assert not any("scale" in text or "times" in text for text in (found[0].diagnosis, found[0].title, *found[0].evidence))
