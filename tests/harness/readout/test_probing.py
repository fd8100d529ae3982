"""Calls that are made to be read, and a kernel that is asked for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, islice

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs import int8
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.faults import rounded_oracle
from assay.harness.attention.kernels import declares
from assay.harness.attention.oracle import oracle, sequences
from assay.harness.readout.probing import (
    BudgetSpentError,
    Plan,
    Prober,
    budget_clock,
    drawn_plans,
    fixed_plans,
    repeated_plans,
    same,
)

EXTEND, DECODE = Plan(((3, 4), (2, 0))), Plan(((1, 4), (1, 9)), layer=2)

# Plans


@pytest.mark.parametrize(
    ("lens", "phase"),
    [(((1, 4),), "decode"), (((1, 4), (1, 1)), "decode"), (((1, 0),), "extend"), (((1, 4), (2, 4)), "extend")],
)
def test_one_new_token_behind_others_is_decode(lens: tuple[tuple[int, int], ...], phase: str) -> None:
    plan = Plan(lens)
    assert plan.phase == plan.make().phase == phase


def test_a_plan_makes_its_call() -> None:
    plan = Plan(((3, 4), (2, 0)), (6, 3), 16, torch.float16, False, 5, "normal", 1, value_dim=8)
    call = plan.make()
    assert (call.q.shape, call.k.shape, call.v.shape) == ((5, 6, 16), (9, 3, 16), (9, 3, 8))
    assert {call.q.dtype, call.k.dtype, call.v.dtype} == {torch.float16}
    assert (call.lens_q, call.lens_k, call.causal, call.layer, call.scale) == ([3, 2], [7, 2], False, 5, 0.25)
    assert plan.keys == 9
    assert plan.size == 9 * 3 * (64 + 5)
    assert torch.equal(call.k, plan.make().k)
    assert not torch.equal(call.k, replace(plan, seed=2).make().k)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_levels_are_exact_in_int8_with_k_smoothed_or_not(block: int) -> None:
    for plan in fixed_plans("levels", torch.float32, long=False):
        call = plan.make()
        for rows_q, rows_k in sequences(call):
            q, k = call.q[rows_q].double().transpose(0, 1), call.k[rows_k].double().transpose(0, 1)
            assert torch.equal(int8(q, block), q)
            assert torch.equal(int8(k, block), k)
            assert k.abs().max() == 1
            if k.shape[1] > 1:
                assert not k.mean(1).any()


def test_other_data_is_not_exact_in_int8() -> None:
    k = EXTEND.make().k.double().transpose(0, 1)
    assert not torch.equal(int8(k, 64), k)


@pytest.mark.parametrize(("data", "name", "least"), [("values", "v", 1e4), ("scores", "k", 1e3)])
def test_data_of_all_sizes_has_small_and_large_rows(data: str, name: str, least: float) -> None:
    rows = getattr(replace(EXTEND, lens=((200, 0),), data=data).make(), name).abs().amax(-1)
    assert rows.max() > least
    assert rows.min() < 10


def test_repeated_plans_come_in_runs_of_one_output_shape() -> None:
    runs = [(phase, shape, len(list(some))) for (phase, shape), some in groupby(
        (plan.phase, tuple(plan.make().q.shape)) for plan in repeated_plans("normal", torch.float32)
    )]  # fmt: skip
    assert min(length for _, _, length in runs) >= 2
    for phase in ("extend", "decode"):
        assert max(length for of, _, length in runs if of == phase) >= 5


def test_the_first_repeated_plans_are_batches_of_both_phases() -> None:
    plans = repeated_plans("normal", torch.float32)[:10]
    assert {plan.phase for plan in plans} == {"extend", "decode"}
    assert all(len(plan.lens) > 1 for plan in plans)


def test_fixed_plans_cover_both_phases_masks_dims_and_long_calls() -> None:
    plans, short = (fixed_plans("normal", torch.float32, long) for long in (True, False))
    for some in (plans, short):
        assert {plan.phase for plan in some} == {"extend", "decode"}
        assert {plan.causal for plan in some} == {True, False}
        assert {plan.head_dim for plan in some} == {32, 64, 80, 96, 128}
        assert {plan.value_dim for plan in some} == {0, 32}
        assert len(set(some)) == len(some)
    assert max(plan.keys for plan in plans) > 4096
    assert max(plan.keys for plan in short) < 512


def test_drawn_plans_are_valid_and_follow_their_seed() -> None:
    plans = list(islice(drawn_plans("normal", torch.float32, 5), 200))
    assert plans == list(islice(drawn_plans("normal", torch.float32, 5), 200))
    others = islice(drawn_plans("normal", torch.float32, 6), 200)
    assert [plan.lens for plan in plans] != [plan.lens for plan in others]
    assert all(new >= 1 and prefix >= 0 for plan in plans for new, prefix in plan.lens)
    assert len({plan.seed for plan in plans}) == 200
    assert 30 < sum(plan.phase == "decode" for plan in plans) < 90
    assert {len(plan.lens) for plan in plans} == {1, 2, 3, 4}


# Asking


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_answer_is_a_float64_copy(dtype: torch.dtype) -> None:
    kept: list[Tensor] = []

    def kernel(call: AttentionCall) -> Tensor:
        kept.append(rounded_oracle(call))
        return kept[-1]

    call = replace(EXTEND, dtype=dtype).make()
    out = Prober(kernel)(call)
    assert out is not None
    assert out.dtype == torch.float64
    kept[0].zero_()
    torch.testing.assert_close(out, oracle(call), atol=1e-6, rtol=1e-5)


def test_a_budget_of_calls_is_kept() -> None:
    asked: list[AttentionCall] = []
    prober = Prober(lambda call: asked.append(call) or rounded_oracle(call), calls_left=2)
    for _ in range(2):
        prober(EXTEND.make())
    with pytest.raises(BudgetSpentError):
        prober(EXTEND.make())
    assert len(asked) == prober.asked == 2


def test_a_budget_of_time_is_kept() -> None:
    with pytest.raises(BudgetSpentError):
        Prober(rounded_oracle, until=0.0)(EXTEND.make())


def test_calls_are_counted_by_layer_and_phase() -> None:
    prober = Prober(rounded_oracle)
    for plan in (EXTEND, DECODE, EXTEND, replace(EXTEND, layer=2)):
        prober(plan.make())
    assert prober.of_kind == {(0, "extend"): 2, (2, "decode"): 1, (2, "extend"): 1}


def test_the_history_holds_the_first_call_and_the_one_before() -> None:
    prober = Prober(rounded_oracle)
    assert (prober.history.initial, prober.history.layer, prober.history.output) == ((0, 0), -1, None)
    first, second = EXTEND.make(), DECODE.make()
    prober(first)
    assert (prober.history.initial, prober.history.previous) == ((3, 7), (3, 7))
    out = prober(second)
    history = prober.history
    assert (history.initial, history.previous, history.layer, history.phase) == ((3, 7), (1, 5), 2, "decode")
    assert history.output is out
    assert history.k is second.k
    assert history.v is second.v


def test_a_call_that_was_not_answered_leaves_the_history_as_it_was() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        if call.phase == "decode":
            raise ValueError
        return rounded_oracle(call)

    prober = Prober(kernel)
    prober(EXTEND.make())
    before = prober.history
    assert prober(DECODE.make()) is None
    assert prober.history is before
    assert prober.asked == 2


def test_inputs_that_are_written_to_are_named_and_the_askers_are_safe() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        call.v.zero_()
        call.cu_seqlens_k[-1] = 0
        return out

    prober, call = Prober(kernel), EXTEND.make()
    prober(call)
    prober(call)
    assert prober.written == {"v": 2, "cu_seqlens_k": 2}
    assert call.v.any()
    assert call.lens_k == [7, 2]


def test_nan_in_an_input_is_not_a_change() -> None:
    call = EXTEND.make()
    call.v[0] = float("nan")
    prober = Prober(rounded_oracle)
    out = prober(call)
    assert out is not None
    assert out.isnan().any()  # NaN is an answer
    prober(call)
    assert not prober.written
    assert not prober.overwritten


def test_an_output_that_the_next_call_overwrites_is_noticed() -> None:
    buffer = torch.empty(64, 4, 64)

    def kernel(call: AttentionCall) -> Tensor:
        return buffer[: call.q.shape[0]].copy_(rounded_oracle(call))

    prober = Prober(kernel)
    first = prober(EXTEND.make())
    assert first is not None
    before = first.clone()
    assert not prober.overwritten
    prober(DECODE.make())
    assert prober.overwritten == {"extend": 1}
    prober(DECODE.make())
    assert prober.overwritten == {"extend": 1}  # the same call leaves the same values
    assert torch.equal(first, before)


def raising(error: BaseException) -> Callable[[AttentionCall], Tensor]:
    def kernel(call: AttentionCall) -> Tensor:
        raise error

    return kernel


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (raising(ValueError("no")), "ValueError"),
        (raising(KernelRefused("no")), "refused"),
        (lambda call: sys.exit(3), "SystemExit"),
        (lambda call: rounded_oracle(call)[1:], "[4, 4, 64]"),
        (lambda call: oracle(call), "float64"),
        (lambda call: None, "None"),
    ],
    ids=["raises", "refuses", "exits", "wrong shape", "wrong dtype", "nothing"],
)
def test_a_kernel_that_does_not_answer_is_noted(kernel: Callable[[AttentionCall], Tensor], why: str) -> None:
    prober = Prober(kernel)
    assert prober(EXTEND.make()) is None
    assert prober(EXTEND.make()) is None
    ((reason, count),) = prober.raised.items()
    assert why in reason
    assert count == 2
    assert prober.asked == 2


def test_an_interruption_ends_the_asking() -> None:
    with pytest.raises(KeyboardInterrupt):
        Prober(raising(KeyboardInterrupt()))(EXTEND.make())


def test_a_kernel_is_not_asked_for_what_it_does_not_declare() -> None:
    prober = Prober(declares(phases=("extend",), head_dims=(64,))(lambda call: rounded_oracle(call)))
    assert prober(DECODE.make()) is None
    assert prober(replace(EXTEND, head_dim=128).make()) is None
    assert prober.asked == 0
    assert not prober.raised
    assert prober(EXTEND.make()) is not None


def test_nan_is_the_same_as_nan() -> None:
    nan = float("nan")
    assert same(torch.tensor([1.0, nan]), torch.tensor([1.0, nan]))
    assert not same(torch.tensor([1.0, nan]), torch.tensor([nan, 1.0]))


def test_the_time_in_which_a_kernel_compiles_is_not_counted() -> None:
    def compiling(call: AttentionCall) -> Tensor:
        if call.q.shape[1:] not in seen:
            seen.add(call.q.shape[1:])
            time.sleep(0.2)
        return rounded_oracle(call)

    for compiles, left in ((True, 10.2), (False, 10.0)):
        seen: set[object] = set()
        prober = Prober(compiling, until=10.0 + time.monotonic())
        prober.compiles, begun = compiles, prober.until - 10.0
        for _ in range(2):
            prober(Plan(((3, 4),)).make())
        assert prober.until - begun == pytest.approx(left, abs=0.1)


def test_a_budget_is_cpu_time_so_that_a_busy_machine_reads_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, cpu = [100.0], [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: cpu[0])
    clock, on_a_gpu = budget_clock("cpu"), budget_clock("cuda:0")
    wall[0], cpu[0] = 104.0, 12.0
    assert (clock(), on_a_gpu()) == (2.0, 4.0)
    wall[0] = 150.0
    assert clock() == 10.0  # what waits ends too
