from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK
from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.oracle import oracle, sequences
from assay.harness.attention.sage import sage_attn_as_shipped
from assay.harness.attention.sample_calls import call_of
from assay.harness.evidence.kernel_result import Property, Tried
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED, Cause, causes
from assay.harness.localize.diagnose import _heads, diagnose
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
    assert finding.where == "extend, with a cached prefix, all 4 heads"
    assert finding.does == "applies a top-left causal mask once a prefix is cached"
    assert re.fullmatch(
        r'Computes "causal mask top-left" in extend with a cached prefix \(all 4 heads\): '
        r"matches that formula to 0\.\d+ %; correct attention differs by \d+ %\. Correct without a cached prefix\.",
        finding.diagnosis,
    )
    assert finding.sentence == finding.diagnosis
    assert finding.reproduce == "assay replay pack"


def test_a_bug_is_not_named_for_one_call_if_it_would_show_on_correct_ones() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        return fault("mask-top-left")(call) if list(call.lens_q) == [9] else rounded_oracle(call)

    [cause] = causes(run_and_repeat(kernel, calls(1)))
    assert len(cause.failing) == 1
    assert not cause.hypotheses


ALL = "all 2 layers, all 4 heads"
PLAIN = f"extend, {ALL}"


@pytest.mark.parametrize(
    ("when", "where", "does", "counts"),
    [
        (lambda new, prefix: prefix % 64 == 0, PLAIN, "in some calls", "2 of 12 in extend with a cached prefix, 4 of 4 in"),
        (lambda new, prefix: prefix >= 16, PLAIN, "in some calls", "8 of 12 in extend with a cached prefix, 0 of 4 in"),
        (lambda new, prefix: prefix == 0, f"extend, without a cached prefix, {ALL}", "where no prefix is cached", ""),
    ],
)  # fmt: skip
def test_of_calls_where_nothing_was_tried_only_counts_and_the_plain_extent_are_said(
    when: Callable[[int, int], bool], where: str, does: str, counts: str
) -> None:
    """No condition is mined from the values that the calls happen to have: "cached prefix >= 30", where 17 was not called."""
    run = run_and_repeat(fault("scale-missing", when=when), calls(2))
    [finding] = diagnose(run)
    assert (finding.id, finding.where) == ("scale-missing", where)
    assert finding.does.endswith(does)
    assert counts in " ".join(finding.evidence)
    assert not any(mined in " ".join((finding.diagnosis, *finding.evidence)) for mined in ("prefixes:", ">=", "%  ", "equivalent"))
    [tried] = diagnose(run, tried=Tried(rule=(Property(feature="prefix", kind=">=", values=(17,)),), wrong=15, right=15, calls=300))
    assert tried.where == "extend, where cached prefix >= 17, all 2 layers, all 4 heads"
    assert tried.does.endswith("where cached prefix >= 17")
    assert "in some calls" not in tried.does


def test_no_extent_is_said_where_experiments_found_no_condition_and_their_calls_are_in_no_count() -> None:
    run = run_and_repeat(fault("scale-missing", when=lambda new, prefix: prefix == 0), calls(1))
    more = run_and_repeat(fault("scale-missing"), calls(1))
    [finding] = diagnose(replace(run, drawn=more.results))
    assert finding.where == "extend, all 4 heads"
    assert "Correct" not in finding.diagnosis
    assert any("2 of 6 calls of these layers" in line for line in finding.evidence)
    assert any("those of experiments included" in line for line in finding.evidence)


def test_a_hypothesis_that_is_wrong_within_a_wrong_sequence_is_not_said() -> None:
    def first_rows(call: AttentionCall) -> Tensor:
        out, wrong = rounded_oracle(call), fault("scale-missing")(call)
        out[16:] = wrong[16:]  # the positions from 16 on have cells of their own
        return out

    [finding] = diagnose(run_and_repeat(first_rows, calls(1, matrix=[[(70, 0)]])))
    assert finding.id == UNEXPLAINED


def test_an_unexplained_error_has_the_nearest_entry_of_the_catalogue_if_one_is_near() -> None:
    almost = fault("mask-top-left")

    def nearly(call: AttentionCall) -> Tensor:
        return (0.99 * almost(call).float() + 0.01 * call.v[0].float().sum()).to(call.q.dtype)

    [finding] = diagnose(run_and_repeat(nearly, calls(1)))
    assert finding.id == UNEXPLAINED
    assert any(
        line.startswith('nearest in the catalogue: "causal mask top-left", whose output differs by') for line in finding.evidence
    )
    [far] = diagnose(run_and_repeat(lambda call: rounded_oracle(call).flip(-1), calls(1)))
    assert not any("nearest" in line for line in far.evidence)


def test_two_bugs_in_two_layers_are_two_findings_and_the_leak_is_first() -> None:
    kernel = shared(fault("mask-missing"), rounded_oracle, fault("leak-keys-values-previous"))
    first, second = diagnose(run_and_repeat(kernel, calls(3)))
    assert first.id == "leak-keys-values-previous"
    assert "(leak across requests)" in first.diagnosis
    assert first.severity == "serious"
    assert "layer 2 of 3" in first.where
    assert second.id == "mask-missing"
    assert "layer 0 of 3" in second.where


def test_a_bug_that_would_show_on_correct_calls_of_its_layer_does_not_explain_that_layer_alone() -> None:
    by_chance = fault("scale-missing", when=lambda new, prefix: prefix % 64 == 0)
    [finding] = diagnose(run_and_repeat(shared(by_chance, lambda call: rounded_oracle(call).flip(-1)), calls(2)))
    assert (finding.id, finding.does) == (UNEXPLAINED, "computes something other than attention")
    assert "all 2 layers" in finding.where


def test_a_bug_that_fits_the_few_calls_that_experiments_drew_in_a_layer_does_not_explain_that_layer_alone() -> None:
    """Where there is one key but the own, to see the first alone and no own key are the same."""

    def first_key(call: AttentionCall) -> Tensor:
        return torch.cat([call.v[k][:1].expand(q.stop - q.start, -1, -1) for q, k in sequences(call)]).repeat_interleave(2, 1)

    in_layers = [call_of([(2, 0)], (4, 2), 32, torch.float32, "cpu", seed=n).with_spec(layer=n % 3) for n in range(30)]
    long = [call_of([(9, 30)], (4, 2), 32, torch.float32, "cpu", seed=n) for n in range(9)]
    run = run_and_repeat(first_key, [call_of([(20, 7)], (4, 2), 32, torch.float32, "cpu", seed=1)])
    [finding] = diagnose(replace(run, drawn=run_and_repeat(first_key, in_layers + long).results))
    assert (finding.id, "all 3 layers" in finding.where) == (UNEXPLAINED, True)


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
    assert finding.evidence[0] == f"output scaled: every output is {factor:g} times the correct value"


def test_zeros_are_not_written_rather_than_scaled() -> None:
    def nothing_beyond_30_keys(call: AttentionCall) -> Tensor:
        out = oracle(call).to(call.q.dtype)
        return torch.zeros_like(out) if len(call.k) > 30 else out

    found = diagnose(run_and_repeat(nothing_beyond_30_keys, calls(1, matrix=[[(9, 0)], [(9, 80)], [(40, 80)]])))
    assert [one.id for one in found] == [OUTPUT_NOT_WRITTEN]
    assert found[0].does == "does not write its output once a prefix is cached"
    assert not any("scale" in text or "times" in text for text in (found[0].diagnosis, found[0].title, *found[0].evidence))


def test_a_plain_extent_holds_on_every_sequence_of_experiments_too() -> None:
    """Also on those of calls that were too large to be kept."""
    run = run_and_repeat(fault("scale-missing", when=lambda new, prefix: prefix == 0), calls(1))
    points = [({"phase": "extend", "prefix": prefix, "layer": layer}, not prefix) for prefix in (0, 700) for layer in (0, 3)]
    [agreed] = diagnose(replace(run, points=points))
    assert agreed.where == "extend, without a cached prefix, all 4 heads"
    [refuted] = diagnose(replace(run, points=[*points, ({"phase": "extend", "prefix": 701, "layer": 0}, True)]))
    assert refuted.where == "extend, all 4 heads"
    assert "Correct" not in refuted.diagnosis


def test_a_condition_that_names_a_phase_says_it_once() -> None:
    run = run_and_repeat(fault("scale-missing"), calls(1))
    rule = (Property(feature="phase", kind="in", values=("extend",)),)
    [finding] = diagnose(run, tried=Tried(rule=rule, wrong=15, right=15, calls=300))
    assert finding.where == "where extend, all 4 heads"
    assert 'scale missing" where extend (all 4 heads)' in finding.diagnosis


@pytest.mark.parametrize(("spared", "said"), [(0, "all heads"), (7, ""), (8, "some heads")])
def test_a_head_is_called_right_only_if_many_wrong_calls_agree(spared: int, said: str) -> None:
    """Where the numbers decide, a head is right in some wrong calls by chance."""

    def wrong(heads: list[bool]) -> SimpleNamespace:
        call = SimpleNamespace(spec=SimpleNamespace(first_head=0), q=torch.zeros(1, len(heads), 1), k=torch.zeros(1, 1, 1))
        return SimpleNamespace(call=call, failing=torch.tensor([heads]))

    failing = [wrong([True, True]), *(wrong([True, False, True]) for _ in range(spared))]
    failing += [wrong([True, True, True])] * (not spared)
    assert _heads(cast(Cause, SimpleNamespace(failing=failing, heads=(0, 1)))) == said
