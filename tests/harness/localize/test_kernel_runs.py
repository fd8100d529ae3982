from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.family import FAMILY
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import family
from assay.harness.attention.sample_calls import call_of
from assay.harness.errors import AssayError
from assay.harness.localize import bounds
from assay.harness.localize.causes import explaining
from assay.harness.localize.diagnose import CALL_REFUSED, INPUT_WRITTEN, NONDETERMINISM, STATE_KEPT, diagnose
from assay.harness.localize.guard import run_and_repeat, run_calls
from assay.harness.localize.kernel_runs import KernelRun, measure, worst_of
from assay.harness.verdict import Finding

CALLS = [call_of(lens, (4, 2), 16, torch.bfloat16, "cpu", seed=i) for i, lens in enumerate([[(5, 3)], [(7, 0)], [(2, 20)]])]


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def test_the_same_call_twice() -> None:
    generator = torch.Generator().manual_seed(0)

    def shaky(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        return out + torch.randn(out.shape, generator=generator).to(out.dtype)

    finding = only(diagnose(run_and_repeat(shaky, CALLS)))
    assert (finding.id, finding.severity) == (NONDETERMINISM, "serious")
    assert any("No known bug explains" in line for line in finding.evidence), "what it does by chance is one finding"


def test_a_kernel_that_errs_by_chance_keeps_no_state() -> None:
    runs = iter([1, 0, 0, 0, 0, 0, 1])  # the first call differs late, the second from its repeat

    def lucky(call: AttentionCall) -> Tensor:
        return rounded_oracle(call) * (1 - next(runs, 0))

    finding = only(diagnose(run_and_repeat(lucky, CALLS)))
    assert finding.id == NONDETERMINISM


def test_nondeterminism_below_noise_is_information() -> None:
    runs = 0

    def rounding(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        return rounded_oracle(call) * (1 + 0.0025 * (runs % 2))  # some numbers change in their last bit

    finding = only(diagnose(run_and_repeat(rounding, CALLS)))
    assert (finding.id, finding.severity) == (NONDETERMINISM, "info")


def test_the_same_call_early_and_late() -> None:
    runs = 0

    def tired(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        return rounded_oracle(call) * (1 if runs <= len(CALLS) else 2)

    finding = only(diagnose(run_and_repeat(tired, CALLS)))
    assert (finding.id, finding.severity) == (STATE_KEPT, "serious")
    assert "3 calls" in finding.where


def test_a_written_input_is_found_and_spoils_nothing_else() -> None:
    def writes(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        call.k.sub_(call.k.mean(0, keepdim=True))
        return out

    finding = only(diagnose(run_and_repeat(writes, CALLS)))
    assert (finding.id, finding.severity) == (INPUT_WRITTEN, "serious")
    assert finding.diagnosis.endswith("input k")


def test_refused_and_delegated_calls_are_reported() -> None:
    @declares(phases=("extend",))
    def picky(call: AttentionCall) -> Tensor:
        if not any(call.prefixes):
            raise KernelRefused("a prefix is needed")
        return rounded_oracle(call)

    decode = CALLS[0].with_spec(phase="decode")
    seen = run_and_repeat(picky, [*CALLS, decode])
    assert seen.delegated == (decode,)
    finding = only(diagnose(seen))
    assert (finding.id, finding.diagnosis) == (CALL_REFUSED, "a prefix is needed")
    with pytest.raises(AssayError, match="none of 1 calls"):
        run_and_repeat(picky, [decode])
    with pytest.raises(AssayError, match="none of 0 calls"):
        run_and_repeat(picky, [])


def test_each_output_is_compared_with_the_truth_of_its_own_call() -> None:
    """Truths are computed ahead; refused calls and an early end must not shift them."""
    calls = [call_of([(3, seed % 5)], (2, 1), 16, torch.float32, "cpu", seed=seed) for seed in range(40)]

    def kernel(call: AttentionCall) -> Tensor:
        if call.lens_k == [5]:
            raise KernelRefused("two cached tokens")
        return rounded_oracle(call)

    run = run_calls(kernel, calls, enough=lambda results: len(results) == 25, repeats=0)
    kept = [call for call in calls if call.lens_k != [5]][:25]
    assert [id(result.call) for result in run.results] == [id(call) for call in kept]
    assert all(torch.equal(o.own, measure(o.call, rounded_oracle(o.call)).own) for o in run.results)
    assert not any(o.fails for o in run.results)


LONG = call_of([(1536, 0)], (2, 1), 16, torch.bfloat16, "cpu", seed=3)


def zeroed(out: Tensor, rows: list[int], heads: slice = slice(None)) -> Tensor:
    out = out.clone()
    out[rows, heads] = 0
    return out


@pytest.mark.slow  # fast: test_a_wrong_query_of_a_quantised_kernel_is_out_of_bounds
@pytest.mark.parametrize(("rows", "heads"), [([525, 976, 1535], slice(None)), ([976], slice(1, 2))])
def test_single_wrong_queries_do_not_drown_in_their_cells(rows: list[int], heads: slice) -> None:
    right = rounded_oracle(LONG)
    assert not measure(LONG, right).fails
    result = measure(LONG, zeroed(right, rows, heads))
    assert not bool((result.own > result.bounds).any())  # the cells average over hundreds of queries
    assert result.fails
    assert {one.row for one in result.wrong_queries} == set(rows)
    assert result.worst > 5
    assert result.worst_cell[0] == pytest.approx(1.0, abs=0.01)
    finding = only(diagnose(KernelRun((result,))))
    assert any(f"query {result.wrong_queries[0].row} of sequence 0" in line for line in finding.evidence)


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", ["int8_qk", "int8_kv", "fp8_kv", "int8_qk_fp8_pv", "fp16_accumulation"])
def test_a_wrong_query_of_a_quantised_kernel_is_out_of_bounds(noise: str) -> None:
    call = call_of([(1024, 0)], (4, 2), 32, torch.bfloat16, "cpu", seed=4)
    honest = honest_outputs(call, family(noise), members=2, seed=5)[0].to(call.q.dtype)
    assert not measure(call, honest, noise).fails
    for wrong in (0 * honest[301], honest[77], 2 * honest[301]):
        out = honest.clone()
        out[301, 1] = wrong[1]
        result = measure(call, out, noise)
        assert result.fails
        if not bool((result.own > result.bounds).any()):
            assert {one.row for one in result.wrong_queries} == {301}


def test_a_hypothesis_must_explain_the_wrong_queries() -> None:
    result = measure(LONG, zeroed(rounded_oracle(LONG), [976]))
    assert all(explaining(hypothesis, result) is None for hypothesis in FAMILY)


def test_bounds_are_simulated_only_where_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[object] = []
    monkeypatch.setattr(bounds, "simulate", lambda *a, real=bounds.simulate: (simulated.append(a), real(*a))[1])
    calls = [call_of([(1, 20 + n)], (4, 2), 64, torch.float16, "cpu", n) for n in range(40)]
    many = [measure(call, rounded_oracle(call)) for call in calls]
    assert not any(one.fails for one in many)
    assert not simulated
    assert any(worst_of(many) is one for one in many)
    assert 0 < len(simulated) <= 13, "a few, to say which call is the worst"
    wrong = measure(CALLS[0], rounded_oracle(CALLS[0]) * 1.5)
    before = wrong.most
    assert wrong.fails
    assert worst_of([*many, wrong]) is wrong
    assert wrong.worst <= wrong.most < before, "what is known of a call limits its worst error"


@pytest.mark.parametrize(("grows", "kinds"), [(0.0, []), (1.0, [NONDETERMINISM])])
def test_an_output_in_a_buffer_that_the_next_call_overwrites_is_kept(grows: float, kinds: list[str]) -> None:
    buffer, runs = torch.zeros(64, 4, 16, dtype=torch.bfloat16), 0

    def reuses(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        return buffer[: call.q.shape[0]].copy_(rounded_oracle(call) * (1 + grows * max(0, runs - 1 - len(CALLS))))

    assert [f.id for f in diagnose(run_and_repeat(reuses, CALLS))] == kinds
