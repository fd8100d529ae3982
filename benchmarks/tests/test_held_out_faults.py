"""Each held-out kernel is wrong somewhere in a pool of calls, and right wherever its truth says so."""

from __future__ import annotations

import pytest
import torch
from held_out import Truths, parts_of
from torch import Tensor
from truths_first import FIRST
from truths_second import SECOND
from truths_third import THIRD

from assay.harness.attention.oracle import oracle, sequences

VISIBLE, RIGHT = 1e-2, 1e-4
"""Relative errors of a row (one query, all heads) that count as wrong and as right."""
SETS = (FIRST, SECOND, THIRD)
each = pytest.mark.parametrize(
    ("held_out", "id"), [pytest.param(of, id, id=f"{of.name}-{id}") for of in SETS for id in of.right_where]
)


def row_errors(out: Tensor, truth: Tensor) -> Tensor:
    """Relative error of each row, float64 [total_q]."""
    errors: Tensor = (out.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
    return errors


def test_kernels_have_names_of_their_own_and_a_sentence() -> None:
    for of in SETS:
        assert {fault.id for fault in of.faults} == set(of.right_where)
        assert len(of.faults) == len({fault.truth for fault in of.faults}) == of.number
        assert all(fault.truth.endswith(".") for fault in of.faults)
    assert len({fault.id for of in SETS for fault in of.faults}) == 100, "the sets are mixed"


@each
def test_a_kernel_is_wrong_in_the_pool_and_right_where_its_truth_says_so(held_out: Truths, id: str) -> None:
    wrong_calls, right = 0, 0
    for calls, truths in held_out.pool:
        kernel = held_out.fault(id).make()
        for at, (call, truth) in enumerate(zip(calls, truths, strict=True)):
            before = call.clone()
            out = kernel(call)
            assert out.shape == truth.shape
            assert out.dtype == call.q.dtype
            assert out.isfinite().all()
            assert all(torch.equal(getattr(call, t), getattr(before, t)) for t in "qkv"), "an input was written to"
            errors = row_errors(out, truth)
            for part, (rows, _) in zip(parts_of(call), sequences(call), strict=True):
                if held_out.right_where[id](part, calls[: at + 1]):
                    assert errors[rows].max() < RIGHT, (call.phase, part.number, call.lens_q, call.lens_k)
                    right += 1
            wrong_calls += bool(errors.max() > VISIBLE)
    assert right > 0
    assert wrong_calls >= 3, "wrong in less than a few per cent of the calls"


@each
def test_a_made_kernel_has_no_memory_and_repeats_itself(held_out: Truths, id: str) -> None:
    for session in (1, 2, 5):
        calls, _ = held_out.pool[session % len(held_out.pool)]
        first, second = (
            [kernel(calls[number]) for number in held_out.order]
            for kernel in (held_out.fault(id).make(), held_out.fault(id).make())
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each
def test_a_kernel_honours_causal(held_out: Truths, id: str) -> None:
    """Without a causal mask bugs of the mask are gone, and the others still follow the flag."""
    call = held_out.whole
    out = held_out.fault(id).make()(call)
    assert out.isfinite().all()
    errors = row_errors(out, oracle(call))
    if id in held_out.causal_only:
        assert errors.max() < RIGHT
    elif id not in held_out.blind:
        # A kernel that ignored the flag would hide most keys from the first new token of the first sequence.
        assert errors.median() < 1
