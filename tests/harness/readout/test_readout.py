"""Read-outs from end to end: kernels with one fault, right ones, and such as hardly answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.bugs.quantisation import _int8
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import Request, attend, requests
from assay.harness.localize import threads
from assay.harness.readout.finding import _exactness
from assay.harness.readout.probing import CallPlan
from assay.harness.readout.queries import Queries
from assay.harness.readout.readout import read_out
from assay.harness.readout.samples import Agreement, Sample

Kernel = Callable[[AttentionCall], Tensor]
FEW_CALLS = 200
"""What the docs say of a kernel that is right, or has a plain fault, with some to spare."""


def by_sequence(change: Callable[[Request], Request]) -> Kernel:
    """Attention in which each sequence is changed."""
    return lambda call: torch.cat([attend(change(one)).transpose(0, 1) for one in requests(call)]).to(call.q.dtype)


def nothing(call: AttentionCall) -> Tensor:
    return torch.zeros(*call.q.shape[:2], call.v.shape[2], dtype=call.q.dtype)


def window(one: Request) -> Request:
    position = torch.arange(one.len_q)[:, None] + one.prefix
    return replace(one, visible=one.visible & (torch.arange(one.len_k) > position - 16))


def edge_of_whole_pages(one: Request) -> Request:
    seen = torch.arange(one.len_k) <= torch.arange(one.len_q)[:, None] + -(-one.prefix // 16) * 16
    return replace(one, visible=seen)


def values_of_page_starts(one: Request) -> Request:
    key = torch.arange(one.len_k)
    return replace(one, v=one.v[:, key // 16 * 16 + key % 4])


def head_lost_in_decode(call: AttentionCall) -> Tensor:
    out = rounded_oracle(call)
    if call.phase == "decode":
        out[:, 1] = 0
    return out


def in_int8(call: AttentionCall, change: Callable[[Request], Request] = lambda one: one) -> Tensor:
    """Q and K are quantised in blocks of 64 tokens, K after its mean over the sequence is subtracted."""

    def quantised(one: Request) -> Request:
        return change(replace(one, q=_int8(one.q, 64), k=_int8(one.k - one.k.mean(1, keepdim=True), 64)))

    return by_sequence(quantised)(call)


def without_prefix(one: Request) -> Request:
    seen = one.visible.clone()
    seen[:, : one.prefix] = False
    return replace(one, visible=seen)


# Faults of each kind


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "sentence"), [
    (by_sequence(window), "sliding window of 16 keys: query i sees keys j > p - 16"),
    (by_sequence(edge_of_whole_pages),
     "query i does not see keys j > i + (prefix rounded up to 16) but also sees keys j <= i + (prefix rounded up to 16)"),
    (by_sequence(values_of_page_starts), "V of key j is read from key (j rounded down to 16) + (j mod 4)"),
    (head_lost_in_decode, "the output is not written: it is zero, only in decode and in q head 1"),
    (declares(noise="int8_qk")(lambda call: in_int8(call, without_prefix)), "query i does not see cached keys"),
], ids=["mask", "edge", "address", "output", "int8"])  # fmt: skip
def test_a_fault_is_read_off_in_one_sentence(kernel: Kernel, sentence: str) -> None:
    found = read_out(kernel)
    assert found.sentence == sentence
    assert (found.share, found.exact, found.complete, found.notes) == (1.0, True, True, ())
    assert found.fresh.wrong == found.fresh.explained > 0
    assert found.all.wrong > found.fresh.wrong
    assert found.calls < 2 * FEW_CALLS
    assert found.seconds > 0
    assert found.cpu_seconds > 0
    assert len(found.samples) < found.calls


# Right kernels


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kernel",
    [
        rounded_oracle,
        declares(noise="int8_qk")(lambda call: in_int8(call)),
        declares(noise="int8_qk")(lambda call: rounded_oracle(call)),
        declares(noise="int8_qk")(lambda call: 1.005 * rounded_oracle(call)),  # a scale that is rounded
    ],
    ids=["float32", "int8", "better than declared", "with noise"],
)
def test_a_right_kernel_computes_attention(kernel: Kernel) -> None:
    found = read_out(kernel)
    assert (found.sentence, found.operator.clauses, found.all, found.notes) == ("", (), Agreement(), ())
    assert found.exact
    assert found.complete
    assert 50 < found.calls < FEW_CALLS


# Kernels that hardly answer


def raising(error: BaseException) -> Kernel:
    def kernel(call: AttentionCall) -> Tensor:
        raise error

    return kernel


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(raising(ValueError("no")), "ValueError"), (lambda call: sys.exit(3), "SystemExit")],
    ids=["raises", "exits"],
)
def test_a_kernel_that_never_answers_is_not_explained(kernel: Kernel, why: str) -> None:
    found = read_out(kernel)
    assert (found.sentence, found.samples, found.all) == ("", (), Agreement())
    assert found.complete
    assert found.notes == (f"not answered: {why}, in {found.calls} calls",)
    assert 0 < found.calls < 10


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "sentence"), [(rounded_oracle, ""), (nothing, "the output is not written: it is zero")])
@pytest.mark.parametrize(("error", "noted"), [(ValueError("no"), True), (KernelRefused("no"), False)])
def test_what_is_not_answered_now_and_then_is_left_out(error: Exception, noted: bool, kernel: Kernel, sentence: str) -> None:
    def answers(call: AttentionCall) -> Tensor:
        if call.layer == 2:
            raise error
        return kernel(call)

    found = read_out(answers)
    assert (found.sentence, found.exact) == (sentence, True)
    assert {sample.plan.layer for sample in found.samples} >= {0, 1, 3}
    assert 2 not in {sample.plan.layer for sample in found.samples}
    assert any("ValueError" in note for note in found.notes) == noted == bool(found.notes)


# Conditions: of a fault that is found at once


def seven_q_heads(call: AttentionCall) -> Tensor:
    return nothing(call) if call.q.shape[1] == 7 * call.k.shape[1] else rounded_oracle(call)


def batch_of_six(call: AttentionCall) -> Tensor:
    return nothing(call) if len(call.lens_q) >= 6 else rounded_oracle(call)


# Budgets


def test_time_is_kept_to() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        return nothing(call)

    found = read_out(kernel, seconds=0.25)
    assert not found.complete
    assert max(found.cpu_seconds, found.seconds / threads._WAITS) > 0.25
    assert found.cpu_seconds < 2  # the call that was begun is not interrupted
    assert found.calls <= 3  # fewer on a busy machine


# What else the kernel does


# What counts as wrong


def samples(*errors: float) -> list[Sample]:
    """Samples whose outputs have these relative errors, one query and head each."""
    found = []
    for error in errors:
        plan = CallPlan(((1, 4),), (1, 1))
        queries = Queries(plan.make(), [0])
        found.append(Sample(plan, queries, queries.right * (1 + error), np.array([False]), error=1.0))
    return found


@pytest.mark.parametrize(("errors", "data", "device", "noise", "times"), [
    ([0.0, 0.0], "normal", "cpu", 1e-4, 3),
    ([1e-3] * 5, "normal", "cpu", 1e-4, 3),  # rounding does not explain it
    ([1e-3] * 5, "normal", "cuda", 5e-3, 6),  # fifty times the base at most
    ([2e-4] * 5, "normal", "cuda", 2.4e-3, 6),
    ([2e-4, 2e-4, 1, 1, 1, 1], "normal", "cuda", 2.4e-3, 6),  # most are wrong: the better ones say what the noise is
    ([1e-7] * 5, "normal", "cuda", 1e-4, 6),
    ([0.0] * 5, "levels", "cpu", 5e-3, 6),
    ([1e-3] * 5, "levels", "cpu", 1.2e-2, 6),
    ([1.0] * 5, "levels", "cpu", 0.25, 6),
    ([float("nan")] * 5, "levels", "cpu", 0.25, 6),
])  # fmt: skip
def test_what_counts_as_wrong(errors: list[float], data: str, device: str, noise: float, times: int) -> None:
    error, tolerance = _exactness(samples(*errors), 1e-4, data, device)
    assert error == pytest.approx(times * noise, rel=1e-3)
    assert (tolerance.weight, tolerance.log, tolerance.least) == pytest.approx(
        (noise / 2, 2 * noise, max(1e-7, noise * 1e-3)), rel=1e-3
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("factor", "does"), [(0.0, "the output is not written: it is zero"), (2.0, "the output is multiplied by 2")]
)
def test_what_shows_in_every_seventh_call_alone_is_read_from_outputs(factor: float, does: str) -> None:
    count = [0]

    def kernel(call: AttentionCall) -> Tensor:
        count[0] += 1
        out = rounded_oracle(call)
        return out * factor if count[0] % 7 == 0 else out

    found = read_out(kernel)
    assert found.sentence == f"{does}, only where the number of earlier calls mod 7 = 6"
    assert found.exact
