"""Pictures of kernels that really ran: what they show of each kind of error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.picturing import picture_of, unread_picture
from assay.harness.localize.reading import WeightReading, read
from assay.harness.picture import MAX_KEYS, MAX_QUERIES, Picture

Kernel = Callable[[AttentionCall], Tensor]
Lens = list[tuple[int, int]]


def call(lens: Lens, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32) -> AttentionCall:
    return call_of(lens, heads, 32, dtype, "cpu")


def bug(name: str) -> Kernel:
    def kernel(call: AttentionCall) -> Tensor:
        out = BY_ID[name].compute(call)
        return oracle(call) if out is None else out

    return kernel


def reading(kernel: Kernel, asked: AttentionCall) -> WeightReading:
    found = read(lambda one: kernel(one).to(asked.q.dtype).double(), asked, range(asked.q.shape[0]))
    assert found is not None
    return found


def with_one_more(asked: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
    """The output of the only sequence of a call, with one more key before the others."""
    edges = torch.tensor([0, len(asked.k) + 1], dtype=torch.int32)
    return oracle(replace(asked, k=torch.cat([k, asked.k]), v=torch.cat([v, asked.v]), cu_seqlens_k=edges))


def drawn(kernel: Kernel, lens: Lens, **more: int) -> Picture:
    return picture_of(reading(kernel, call(lens)), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lens", [[(5, 0)], [(3, 4), (2, 0)], [(1, 6), (1, 2)]])
def test_a_right_kernel_has_nothing_but_what_is_expected(lens: Lens, dtype: torch.dtype) -> None:
    picture = picture_of(reading(oracle, call(lens, dtype=dtype)))
    assert set("".join(picture.cells)) <= set("#.")
    assert set(picture.rows) == {"read"}
    assert picture.wrong_heads == picture.foreign_kv_heads == ()
    assert picture.shown == ""


def test_a_top_left_mask_leaves_out_a_band_of_keys() -> None:
    picture = drawn(bug("mask-top-left"), [(4, 2)])
    assert picture.cells == ("#oo...", "##oo..", "###oo.", "####oo")
    assert picture.query_positions == (2, 3, 4, 5)
    assert picture.key_indices == (0, 1, 2, 3, 4, 5)
    assert picture.call == "layer 0 extend, new+prefix 4+2"
    for should, does in zip(picture.expected, picture.read, strict=True):
        assert sum(should) == pytest.approx(1, abs=1e-3)
        assert sum(does) == pytest.approx(1, abs=1e-3)


def test_a_key_too_many_is_wrongly_seen() -> None:
    assert drawn(bug("mask-one-key-too-many"), [(3, 1)]).cells == ("##!.", "###!", "####")


def test_keys_of_another_sequence_come_from_elsewhere() -> None:
    picture = drawn(bug("leak-all-keys-previous"), [(2, 1), (2, 0)])
    assert picture.cells == ("##...", "###..", "xxx#.", "xxx##")
    assert picture.query_sequences == (0, 0, 1, 1)
    assert picture.key_sequences == (0, 0, 0, 1, 1)
    assert picture.key_indices == (0, 1, 2, 0, 1)
    assert picture.query_positions == (1, 2, 0, 1)


def test_a_weight_is_wrong_only_beyond_what_other_keys_explain() -> None:
    def first_counts_twice(asked: AttentionCall) -> Tensor:
        return with_one_more(asked, asked.k[:1], asked.v[:1])

    assert drawn(first_counts_twice, [(1, 5)]).cells == ("~#####",)
    # Twice of every weight follows from no other key.
    assert drawn(lambda asked: 2 * oracle(asked), [(1, 5)]).cells == ("~~~~~~",)


def test_rows_without_weights_say_what_they_are() -> None:
    def kernel(asked: AttentionCall) -> Tensor:
        out = oracle(asked)
        out[0] = 0.0
        out[1] = 0.25
        out[2] += 0.5
        out[3] = out[3].abs()
        return out

    picture = drawn(kernel, [(5, 1)])
    assert picture.rows == ("zero", "constant", "shifted", "nonlinear", "read")
    assert picture.read[0] == picture.read[1] == picture.read[3] == ()
    assert picture.cells[:3] == ("", "", "####..")
    assert len(picture.expected[0]) == 6


def test_weights_that_are_not_the_whole_output_claim_nothing_about_heads_or_keys() -> None:
    """A kernel that leaves half of the dims unwritten has right weights where its dims are read, and "reads" no other kv head."""

    def half(asked: AttentionCall) -> Tensor:
        out = oracle(asked)
        out[..., ::2] = out[..., ::2].abs() + asked.v[:, :1, ::2].abs().sum()
        return out

    picture = drawn(half, [(4, 1)])
    assert set(picture.rows) == {"nonlinear"}
    assert picture.wrong_heads == picture.foreign_kv_heads == ()
    assert set(picture.cells) == {""}


def test_a_large_call_is_shown_where_it_begins_to_differ() -> None:
    def kernel(asked: AttentionCall) -> Tensor:
        out = oracle(asked)
        out[100:] = bug("sliding-window-32")(asked)[100:]
        return out

    picture = drawn(kernel, [(130, 10)])
    assert picture.shown == "queries 92-123 of 130, keys 58-121 of 140"
    assert (len(picture.rows), len(picture.key_indices)) == (MAX_QUERIES, MAX_KEYS)
    assert picture.query_positions[0] == 102
    assert "o" not in "".join(picture.cells[:8])
    assert all("o#" in row for row in picture.cells[8:])
    assert len(picture.model_dump_json()) < 40_000


def test_keys_from_elsewhere_are_shown_beside_the_own() -> None:
    def swapped(asked: AttentionCall) -> Tensor:
        """The last sequence reads the keys of the first."""
        k, v = (torch.cat([own[:160], own[:80]]) for own in (asked.k, asked.v))
        return oracle(replace(asked, k=k, v=v))

    picture = drawn(swapped, [(2, 78)] * 3)
    assert picture.shown == "packed queries 0-5 of 6, packed keys 64-95, 144-175 of 240"
    assert [picture.key_sequences[at] for at in (0, *picture.key_breaks)] == [0, 1, 1, 2]
    assert ["".join(sorted(set(row))) for row in picture.cells] == ["#.", "#.", "#.", "#.", ".ox", ".ox"]


def test_an_unread_call_says_which_outputs_are_not_finite_or_wrong() -> None:
    asked = call([(12, 8)])
    out = oracle(asked)
    out[2, 1], out[3, 1], out[4, 1], out[5, 1], out[6, 1] = float("nan"), float("inf"), 0.0, 3.0, -out[6, 1]
    wrong = np.zeros(out.shape[:2], bool)
    wrong[2:7, 1] = wrong[2, 3] = True
    picture = unread_picture(asked, out, wrong)
    assert picture.rows == ("right",) * 2 + ("nan", "infinite", "zero", "constant", "wrong") + ("right",) * 5
    assert (picture.head, picture.wrong_heads) == (1, (1, 3))
    assert set(picture.cells) == {""}
    assert picture.expected == drawn(oracle, [(12, 8)], head=1).expected
