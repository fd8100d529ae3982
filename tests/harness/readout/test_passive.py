"""Recorded calls: the operator is read from q, k, v and outputs alone. Every output comes from real arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.sample_calls import call_of
from assay.harness.readout.named import _name_of, said
from assay.harness.readout.passive import read_recorded, recorded
from assay.harness.readout.readout import ReadOut

LENS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((7, 0),), ((40, 0),), ((30, 25),), ((17, 16),), ((12, 33), (7, 0)), ((9, 0), (20, 0)), ((33, 31),), ((3, 200),), ((90, 120),),
    ((1, 20),), ((1, 40), (1, 5)), ((1, 33), (1, 12), (1, 90)), ((1, 200),), ((5, 20), (9, 0), (6, 41)), ((25, 10),), ((4, 6),),
)  # fmt: skip
"""Prompts, prompts behind cached prefixes, and decodes, of which some are longer than head_dim."""
FEW = LENS[::3]
"""Of each kind some: enough for what shows in every call."""


def calls(dtype: torch.dtype, lens: Sequence[tuple[tuple[int, int], ...]] = LENS) -> Iterator[AttentionCall]:
    for number, one in enumerate(lens):
        for layer in (0, 1):
            call = call_of(list(one), (4, 2), 64, dtype, "cpu", seed=100 * number + layer)
            yield call.with_spec(layer=layer, phase="decode" if all(new == 1 for new, _ in one) else "extend")


def read(kernel: Kernel, dtype: torch.dtype = torch.float32, lens: Sequence[tuple[tuple[int, int], ...]] = LENS) -> ReadOut:
    return read_recorded([recorded(call, kernel(call), 0.0) for call in calls(dtype, lens)])[0]


def every_third_key_tripled(call: AttentionCall) -> Tensor:
    """No hypothesis of the list: keys 2, 5, 8, ... count three times, only in kv head 1."""
    found = torch.zeros_like(call.q)
    q_edges, k_edges = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
        for head in range(call.q.shape[1]):
            kv = head // (call.q.shape[1] // call.k.shape[1])
            scores = call.scale * call.q[q0:q1, head].double() @ call.k[k0:k1, kv].double().T
            j = torch.arange(k1 - k0)
            scores = scores.masked_fill(j[None, :] > torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), -torch.inf)
            if kv == 1:
                scores = scores + torch.log(1.0 + 2.0 * (j % 3 == 2))
            found[q0:q1, head] = (scores.softmax(-1) @ call.v[k0:k1, kv].double()).to(call.q.dtype)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "dtype"),
    [
        ("mask-top-left", torch.float32),
        ("prefix-dropped", torch.bfloat16),
        ("sliding-window-16", torch.bfloat16),
        ("leak-keys-previous", torch.float32),
        ("scale-doubled", torch.bfloat16),
    ],
)
def test_the_operator_is_read_from_outputs_and_gives_those_of_calls_too_long_to_solve(id: str, dtype: torch.dtype) -> None:
    found = read(fault(id), dtype, (*LENS[::2], LENS[11]))
    operator, long = found.operator, [s for s in found.samples if s.plan.keys > 64 and s.bad.any()]
    assert found.exact, found.sentence
    assert long
    known = _name_of(operator, found.samples)
    assert known is not None
    assert known.id == id
    solved, tried = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", found.notes[0]))
    assert solved > tried / 2


@pytest.mark.slow
def test_a_fault_that_nobody_listed_is_read_from_solved_weights() -> None:
    found = read(every_third_key_tripled, lens=LENS[::2])
    assert found.exact
    text = said(found)
    assert all(part in text for part in ("weights", "j mod 3 = 2", "multiplied by 3", "only in kv head 1")), text
    assert _name_of(found.operator, found.samples) is None
    assert found.fresh.wrong > found.all.wrong / 3, "rules are tried on what they were not mined from"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_right_kernel_nothing_is_said(dtype: torch.dtype) -> None:
    found = read(rounded_oracle, dtype, FEW)
    assert (found.sentence, found.all.wrong, found.notes) == ("", 0, ())


def test_noise_has_no_operator() -> None:
    def noisy(call: AttentionCall) -> Tensor:
        draw = torch.Generator().manual_seed(int(call.q.numel()))
        return rounded_oracle(call) * (1 + 0.3 * torch.randn(call.q.shape, generator=draw))

    found = read(noisy, lens=FEW[::2])
    assert found.all.wrong
    assert said(found) == ""
    assert found.notes[0].startswith("the weights of 0 of"), "what is no sum of values is not solved"


def test_what_is_known_when_the_time_is_over_is_returned() -> None:
    found = read_recorded([recorded(call, fault("mask-top-left")(call), 0.0) for call in calls(torch.float32)], 0.0)[0]
    assert not found.complete
    assert said(found) == ""
