"""Rows of K and V that are looked for at a wrong address: found from what was read, and computed as a plain loop does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import read
from assay.harness.readout.addresses import addresses
from assay.harness.readout.forms import Row, Tolerance, fits
from assay.harness.readout.operators import Clause, Operator
from assay.harness.readout.probing import CallPlan, Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample
from assay.harness.readout.sentences import sentence

LENS = [((9, 16), (12, 5)), ((1, 20), (1, 33), (1, 7)), ((20, 15),), ((6, 3), (5, 18), (7, 40))]
Where = Callable[[AttentionCall, int, int, int], int]
"""(call, number of the sequence, its first row in K, j) -> the packed row that key j is read from."""


def reading_from(where: Where, what: str) -> Callable[[AttentionCall], Tensor]:
    """A kernel that reads K, V or both of key j from another row; zeros where there is none."""

    def kernel(call: AttentionCall) -> Tensor:
        out = torch.zeros(*call.q.shape[:2], call.v.shape[2])
        group = call.q.shape[1] // call.k.shape[1]
        for number, (rows_q, rows_k) in enumerate(sequences(call)):
            length, prefix = rows_k.stop - rows_k.start, rows_k.stop - rows_k.start - (rows_q.stop - rows_q.start)
            moved = [where(call, number, rows_k.start, j) for j in range(length)]
            own = list(range(rows_k.start, rows_k.stop))
            k = at(call.k, moved if "k" in what else own).repeat_interleave(group, 1)
            v = at(call.v, moved if "v" in what else own).repeat_interleave(group, 1)
            for row in range(rows_q.start, rows_q.stop):
                seen = prefix + row - rows_q.start + 1
                weights = (call.scale * torch.einsum("hd,khd->hk", call.q[row], k[:seen])).softmax(-1)
                out[row] = torch.einsum("hk,khd->hd", weights, v[:seen])
        return out

    return kernel


def at(x: Tensor, rows: list[int]) -> Tensor:
    return torch.stack([x[row] if 0 <= row < len(x) else torch.zeros_like(x[0]) for row in rows])


def explained(kernel: Callable[[AttentionCall], Tensor], lens: tuple[tuple[int, int], ...]) -> Sample:
    plan = CallPlan(lens, (4, 2), 128)
    call = plan.make()
    reading = read(Prober(kernel), call, range(len(call.q)))
    assert reading is not None
    queries = Queries(call, reading.rows)
    places = range(len(queries.rows) * queries.heads)
    found = [tuple(fits(Row(reading, queries, *divmod(place, queries.heads), Tolerance()))) for place in places]
    right = np.array([any(fit.form == "right" for fit in some) for some in found])
    found = [() if ok else some for some, ok in zip(found, right, strict=True)]
    return Sample(plan, queries, queries.right, ~right, 0.0, fits=tuple(found))


def in_pool(call: AttentionCall, number: int, start: int, j: int) -> int:
    """The key in slot start + j of a pool in which each sequence begins with a new page of 8."""
    slot = start + j
    for (_, rows), begin in zip(sequences(call), pool_starts(call), strict=True):
        if begin <= slot < begin + rows.stop - rows.start:
            return int(rows.start + slot - begin)
    return -1


def pool_starts(call: AttentionCall) -> list[int]:
    found = [0]
    for length in call.lens_k:
        found.append(found[-1] + -(-length // 8) * 8)
    return found[:-1]


CASES: list[tuple[Where, str, str]] = [
    (lambda call, b, start, j: int(call.cu_seqlens_q[b]) + b * call.prefixes[0] + j, "kv",
     "K and V of key j are read from packed row cu_seqlens_q[b] + b x (prefix of the first sequence) + j"),
    (lambda call, b, start, j: j, "kv", "K and V of key j are read from packed row j"),
    (lambda call, b, start, j: b * max(call.lens_k) + j, "v",
     "V of key j is read from packed row b x (the largest total of the batch) + j"),
    (lambda call, b, start, j: start + j // 16 * 16 + j % 4, "kv",
     "K and V of key j are read from key (j rounded down to 16) + (j mod 4)"),
    (lambda call, b, start, j: start + j + (call.lens_k[b] - 1 - j) // 16 * 16, "kv",
     "K and V of key j are read from key j + ((total - 1 - j) rounded down to 16)"),
    (in_pool, "kv",
     "K and V of key j are read from the slot of its packed row, in a pool of pages of 8 whose empty slots are not counted"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "what", "words"), CASES, ids=[words for *_, words in CASES])
def test_the_address_is_found_and_computed(where: Where, what: str, words: str) -> None:
    kernel = reading_from(where, what)
    found = list(addresses([explained(kernel, lens) for lens in LENS]))
    said = {sentence(Operator((Clause(effect),))): effect for effect in found}
    assert words in said
    call = CallPlan(((4, 30), (9, 2), (3, 11)), (4, 2), seed=9).make()
    truth = kernel(call).double().numpy()
    queries = Queries(call, np.arange(len(call.q)))
    assert np.allclose(said[words].outputs(queries), truth, atol=1e-4)
    assert not np.allclose(queries.right, truth, atol=1e-2)


def test_a_right_kernel_has_no_wrong_address() -> None:
    right = reading_from(lambda call, b, start, j: start + j, "kv")
    assert not list(addresses([explained(right, lens) for lens in LENS]))


def test_rows_that_follow_no_expression_have_none() -> None:
    draw = np.random.default_rng(1).permutation(500)
    kernel = reading_from(lambda call, b, start, j: start + int(draw[j]) % call.lens_k[b], "kv")
    assert not list(addresses([explained(kernel, lens) for lens in LENS]))
