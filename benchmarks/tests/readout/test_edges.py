"""Edges of masks as sums of lengths, positions and their remainders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import read
from assay.harness.readout.edges import Amount, Sum, edge, edges
from assay.harness.readout.forms import Row, Tolerance, fits
from assay.harness.readout.operators import Clause, Operator
from assay.harness.readout.probing import CallPlan, Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample
from assay.harness.readout.sentences import sentence

LENS = [((40, 21),), ((9, 16), (23, 5)), ((1, 70), (1, 33)), ((33, 0),), ((7, 130),)]
Sees = Callable[[int, int, int, int], bool]
"""(i, prefix, new, j) -> whether query i sees key j."""


def with_mask(mask: Sees) -> Callable[[AttentionCall], Tensor]:
    """A kernel with this mask in every call."""

    def kernel(call: AttentionCall) -> Tensor:
        out = torch.zeros(*call.q.shape[:2], call.v.shape[2])
        group = call.q.shape[1] // call.k.shape[1]
        for rows_q, rows_k in sequences(call):
            q, k, v = (
                call.q[rows_q],
                call.k[rows_k].repeat_interleave(group, 1),
                call.v[rows_k].repeat_interleave(group, 1),
            )
            prefix = len(k) - len(q)
            for i in range(len(q)):
                seen = [j for j in range(len(k)) if mask(i, prefix, len(q), j)]
                if seen:
                    weights = (call.scale * torch.einsum("hd,khd->kh", q[i], k[seen])).softmax(0)
                    out[rows_q.start + i] = torch.einsum("kh,khd->hd", weights, v[seen])
        return out

    return kernel


def explained(kernel: Callable[[AttentionCall], Tensor], lens: tuple[tuple[int, int], ...]) -> Sample:
    plan = CallPlan(lens)
    call = plan.make()
    prober = Prober(kernel)
    reading = read(prober, call, range(len(call.q)))
    assert reading is not None
    queries = Queries(call, reading.rows)
    rows = [
        Row(reading, queries, *divmod(place, queries.heads), Tolerance())
        for place in range(len(queries.rows) * queries.heads)
    ]
    found = [tuple(fits(row)) for row in rows]
    right = np.array([any(fit.form == "right" for fit in some) for some in found])
    found = [() if ok else some for some, ok in zip(found, right, strict=True)]
    return Sample(plan, queries, queries.right, ~right, 0.0, fits=tuple(found))


def up(x: int, size: int) -> int:
    return -(-x // size) * size


CASES: list[tuple[Sees, str]] = [
    (lambda i, prefix, new, j: j <= prefix + i + -new % 16, "query i sees keys j <= p + (-new mod 16)"),
    (lambda i, prefix, new, j: j <= i + up(prefix, 16), "query i sees keys j <= i + (prefix rounded up to 16)"),
    (lambda i, prefix, new, j: j <= prefix + i - prefix % 8, "query i sees keys j <= p - (prefix mod 8)"),
    (
        lambda i, prefix, new, j: (prefix + i) // 16 * 16 - 32 <= j <= prefix + i,
        "query i sees no keys j < (p rounded down to 16) - 32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "words"), CASES, ids=[words for _, words in CASES])
def test_the_edge_of_a_mask_is_found(mask: Sees, words: str) -> None:
    kernel = with_mask(mask)
    readings = [explained(kernel, lens) for lens in LENS]
    found = list(edges(readings))
    assert words in [sentence(Operator((Clause(edge),))) for edge in found]
    call = CallPlan(((21, 37), (1, 60)), seed=9).make()
    queries = Queries(call, np.arange(len(call.q)))
    truth = kernel(call).double().numpy()
    best = next(edge for edge in found if sentence(Operator((Clause(edge),))) == words)
    assert np.allclose(best.outputs(queries), truth, atol=1e-4)


def test_a_right_kernel_has_no_edge() -> None:
    readings = [explained(with_mask(lambda i, prefix, new, j: j <= prefix + i), lens) for lens in LENS]
    assert not list(edges(readings))


def test_keys_that_are_no_run_have_no_edge() -> None:
    readings = [
        explained(with_mask(lambda i, prefix, new, j: j <= prefix + i and (j != 3 or prefix + i < 6)), lens)
        for lens in LENS
    ]
    assert not list(edges(readings))


def test_an_edge_that_some_rows_contradict_at_the_end_of_their_sequence_is_none() -> None:
    def mask(i: int, prefix: int, new: int, j: int) -> bool:
        return not prefix or j <= i + up(prefix, 16)

    assert not list(edges([explained(with_mask(mask), lens) for lens in LENS]))


def test_an_edge_beyond_the_sequence_is_cut_off() -> None:
    call = CallPlan(((4, 3),)).make()
    queries = Queries(call, np.arange(4))
    beyond = edge("last", Sum(((1, Amount("total")),), 5)).outputs(queries)
    assert np.allclose(beyond, Queries(call.with_spec(mask=Mask(causal=False)), np.arange(4)).right)


def test_a_query_that_sees_no_key_has_an_output_of_zero() -> None:
    queries = Queries(CallPlan(((4, 3),)).make(), np.arange(4))
    assert not edge("last", Sum(((1, Amount("prefix")), (-1, Amount("total"))))).outputs(queries).any()


def behind(call: AttentionCall) -> Tensor:
    """In decode, keys are counted on to the next multiple of 16: rows of the next sequence, and zeros behind the last one."""
    out = torch.zeros(*call.q.shape[:2], call.v.shape[2])
    group = call.q.shape[1] // call.k.shape[1]
    for rows_q, rows_k in sequences(call):
        stop = rows_k.start + up(rows_k.stop - rows_k.start, 16)
        k, v = (
            torch.cat([x[rows_k.start : stop], torch.zeros(max(0, stop - len(x)), *x.shape[1:])]).repeat_interleave(
                group, 1
            )
            for x in (call.k, call.v)
        )
        weights = (call.scale * torch.einsum("qhd,khd->hqk", call.q[rows_q], k)).softmax(-1)
        out[rows_q] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def test_an_edge_may_lie_behind_the_sequence() -> None:
    readings = [explained(behind, lens) for lens in (((1, 21), (1, 6)), ((1, 9), (1, 40), (1, 3)), ((1, 50),))]
    call = CallPlan(((1, 12), (1, 33)), seed=4).make()
    truth, queries = behind(call).double().numpy(), Queries(call, np.arange(2))
    found = [edge for edge in edges(readings) if np.allclose(edge.outputs(queries), truth, atol=1e-4)]
    assert any("which goes on behind its sequence" in sentence(Operator((Clause(edge),))) for edge in found)


def denominator_too_long(call: AttentionCall) -> Tensor:
    """The denominator counts all keys of the block of 16 in which a query lies."""
    out = torch.zeros(*call.q.shape[:2], call.v.shape[2])
    group = call.q.shape[1] // call.k.shape[1]
    for rows_q, rows_k in sequences(call):
        k, v = (x[rows_k].repeat_interleave(group, 1) for x in (call.k, call.v))
        prefix = len(k) - (rows_q.stop - rows_q.start)
        for row in range(rows_q.start, rows_q.stop):
            p = prefix + row - rows_q.start
            e = (call.scale * torch.einsum("hd,khd->kh", call.q[row], k)).exp()
            out[row] = torch.einsum("kh,khd->hd", e[: p + 1], v[: p + 1]) / e[: up(p + 1, 16)].sum(0)[:, None]
    return out


def test_the_denominator_may_have_an_edge_of_its_own() -> None:
    readings = [explained(denominator_too_long, lens) for lens in LENS]
    found = {sentence(Operator((Clause(edge),))): edge for edge in edges(readings)}
    words = "the softmax denominator of query i counts keys j <= ((p + 1) rounded up to 16) - 1"
    assert words in found
    call = CallPlan(((21, 37),), seed=9).make()
    assert np.allclose(
        found[words].outputs(Queries(call, np.arange(21))), denominator_too_long(call).double(), atol=1e-4
    )
