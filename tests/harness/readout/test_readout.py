"""Read-outs from end to end: kernels with one fault, and such as hardly answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.bugs.quantisation import _int8
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import Request, attend, requests
from assay.harness.localize import threads
from assay.harness.readout.named import said
from assay.harness.readout.readout import read_out
from tests.harness.readout.reads import read, results, shapes

Kernel = Callable[[AttentionCall], Tensor]
FEW_CALLS = 200
"""What the docs say of a kernel with a plain fault, with some to spare."""


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
     "query i also sees keys j <= i + (prefix rounded up to 16)"),
    (by_sequence(values_of_page_starts), "V of key j is read from key (j rounded down to 16) + (j mod 4)"),
    (head_lost_in_decode, "the output is not written: it is zero, only in decode and in q head 1"),
    (declares(noise="int8_qk")(lambda call: in_int8(call, without_prefix)), "query i does not see cached keys"),
], ids=["mask", "edge", "address", "output", "int8"])  # fmt: skip
def test_a_fault_is_read_off_in_one_sentence(kernel: Kernel, sentence: str) -> None:
    found = read(kernel)
    assert found.sentence == sentence
    assert (found.exact, found.complete, found.notes) == (True, True, ())
    assert found.fresh.wrong == found.fresh.explained > 0
    assert found.all.wrong > found.fresh.wrong
    assert found.calls < FEW_CALLS
    assert found.seconds > 0
    assert found.cpu_seconds > 0


def left_most(call: AttentionCall) -> Tensor:
    """A query finds its sequence by a binary search with the wrong side."""
    every, rows = requests(call), torch.arange(len(call.q))
    of = (torch.searchsorted(call.cu_seqlens_q.long(), rows) - 1).clamp(min=0)
    starts = call.cu_seqlens_q.tolist()
    outs = []
    for row, b in zip(rows.tolist(), of.tolist(), strict=True):
        one = every[b]
        seen = torch.arange(one.len_k)[None] <= row - starts[b] + one.prefix
        wide = replace(one, q=call.q[row : row + 1].double().transpose(0, 1), visible=seen)
        outs.append(attend(wide).transpose(0, 1))
    return torch.cat(outs).to(call.q.dtype)


def heads_of_a_tile(call: AttentionCall) -> Tensor:
    heads = torch.arange(call.q.shape[1]) // 4 * 4 // call.heads.group
    spread = replace(call, k=call.k[:, heads], v=call.v[:, heads])
    return by_sequence(lambda one: one)(spread)


@pytest.mark.slow  # fast: test_a_fault_is_read_off_in_one_sentence
@pytest.mark.parametrize(("kernel", "sentence"), [
    (left_most, "query i sees the keys of the last sequence with cu_seqlens_q[b] < r instead of its own, as if it were one of its "
     "queries"),
    (heads_of_a_tile, "q head h reads K and V of the kv head of q head (h rounded down to 4)"),
], ids=["row", "head"])  # fmt: skip
def test_what_belongs_to_another_sequence_or_head_is_read_off(kernel: Kernel, sentence: str) -> None:
    found = read(kernel)
    assert (found.sentence, found.exact, found.predicts) == (sentence, True, True)


# Kernels that hardly answer


@pytest.mark.few(1)
@pytest.mark.parametrize(("error", "why"), [(ValueError("no"), "ValueError"), (SystemExit(3), "SystemExit")])
def test_a_kernel_that_no_longer_answers_is_read_from_its_outputs_alone(error: BaseException, why: str) -> None:
    given = results(head_lost_in_decode)

    def raises(call: AttentionCall) -> Tensor:
        raise error

    found = read_out(raises, given)
    assert (found.sentence, found.exact) == ("the output is not written: it is zero, only in decode and in q head 1", True)
    assert found.notes == (f"not answered: {why}, in {found.calls} calls",)


def test_what_follows_no_rule_is_not_said() -> None:
    def noisy(call: AttentionCall) -> Tensor:
        draw = torch.Generator().manual_seed(int(call.q.double().abs().sum() * 1000))
        return torch.randn(*call.q.shape[:2], call.v.shape[2], generator=draw)

    found = read(noisy)
    assert (found.sentence, found.all.explained) == ("", 0)
    assert found.all.wrong > 1000


def test_an_operator_that_does_not_give_calls_of_another_dtype_is_not_said() -> None:
    """It is read in the widest dtype that is wrong."""
    narrow, zero = by_sequence(window), by_sequence(lambda one: replace(one, v=one.v * 0))
    some = [replace(shape, dtype=dtype) for shape in shapes() for dtype in (torch.float32, torch.float16)]
    found = read_out(narrow, results(narrow, some))
    assert (found.sentence, said(found)) == (found.sentence, "sliding window of 16 keys: query i sees keys j > p - 16")
    two = [result for kernel, dtype in ((narrow, torch.float32), (zero, torch.float16))
           for result in results(kernel, [shape for shape in some if shape.dtype == dtype])]  # fmt: skip
    found = read_out(narrow, two)
    assert (found.sentence, found.exact, said(found)) == ("sliding window of 16 keys: query i sees keys j > p - 16", True, "")


# What calls ask for


def asks(kernel: Kernel) -> Kernel:
    return declares(features=("window", "softcap", "sinks"))(kernel)


def one_key_more(one: Request) -> Request:
    position = torch.arange(one.len_q)[:, None] + one.prefix
    key = torch.arange(one.len_k)
    return replace(one, visible=(key <= position) & (key > position - one.mask.window - 1))


@pytest.mark.slow  # fast: test_a_fault_is_read_off_in_one_sentence
@pytest.mark.parametrize(("kernel", "asked", "sentence"), [
    (by_sequence(one_key_more), ("window 16", "window 40"), "query i also sees key p - the window"),
    (lambda call: by_sequence(one_key_more)(call.with_spec(mask=replace(call.spec.mask, window=2**20))), ("window 16", "window 40"),
     "query i also sees keys j <= p - window"),
    (by_sequence(lambda one: replace(one, spec=replace(one.spec, sinks=()))), ("sinks near 4",),
     "a layer has sinks, and the weights of its keys add up to 1"),
    (by_sequence(lambda one: replace(one, spec=replace(one.spec, softcap=0.0))), ("softcap 1.5",),
     "a layer asks for a soft cap, and scores are not capped"),
], ids=["window", "no window", "sinks", "soft cap"])  # fmt: skip
def test_calls_that_ask_for_a_feature_are_read(kernel: Kernel, asked: tuple[str, ...], sentence: str) -> None:
    some = (replace(shape, asked=(asked[number % len(asked)],)) for number, shape in enumerate(shapes()))
    given = results(asks(kernel), some)
    found = read_out(asks(kernel), given)
    assert (found.sentence, found.exact) == (sentence, True)


# Budgets


def test_time_is_kept_to() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        return nothing(call)

    found = read_out(kernel, results(nothing), seconds=0.25)
    assert not found.complete
    assert max(found.cpu_seconds, found.seconds / threads._WAITS) > 0.25
    assert found.cpu_seconds < 2  # the call that was begun is not interrupted
    assert found.calls <= 3  # fewer on a busy machine
