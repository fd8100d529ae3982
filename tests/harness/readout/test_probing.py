"""Calls that are made to be read, and a kernel that is asked for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import oracle
from assay.harness.localize.threads import budget_clock
from assay.harness.readout.probing import CallPlan, Prober

EXTEND, DECODE = CallPlan(((3, 4), (2, 0))), CallPlan(((1, 4), (1, 9)), layer=2)

# Plans


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


def test_the_time_in_which_a_kernel_compiles_is_not_counted() -> None:
    def compiling(call: AttentionCall) -> Tensor:
        if call.q.shape[1:] not in seen:
            seen.add(call.q.shape[1:])
            time.sleep(0.2)
        return rounded_oracle(call)

    for device, left in (("cuda", 10.2), ("cpu", 10.0)):
        seen: set[object] = set()
        prober = Prober(compiling, until=10.0 + time.monotonic(), device=device)
        begun = prober.until - 10.0
        for _ in range(2):
            prober(CallPlan(((3, 4),)).make())
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
