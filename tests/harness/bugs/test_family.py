"""The hypotheses against the same bug written another way, on small calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, cumulative
from assay.harness.attention.oracle import attend, oracle, requests
from assay.harness.attention.sample_calls import call_of
from assay.harness.bugs.bug import LEAK
from assay.harness.bugs.family import BY_ID, FAMILY
from assay.harness.bugs.quantisation import int8, smooth


def output(name: str, call: AttentionCall) -> Tensor:
    found = BY_ID[name].compute(call)
    assert found is not None
    return found


def test_names_are_unique_and_leaks_are_serious_and_first() -> None:
    assert len({h.id for h in FAMILY}) == len(FAMILY)
    leaks = [h for h in FAMILY if h.kind == LEAK]
    assert {h.severity for h in leaks} == {"serious"}
    assert FAMILY[: len(leaks)] == tuple(leaks)


def test_without_a_bug_the_core_is_the_oracle() -> None:
    call = call_of([(5, 3), (1, 9), (7, 0)], (4, 2), 8, torch.float32, "cpu")
    out = torch.cat([attend(r) for r in requests(call)], dim=1).transpose(0, 1)
    torch.testing.assert_close(out, oracle(call))


def test_top_left_is_the_first_keys_only() -> None:
    call = call_of([(5, 3)], (4, 2), 8, torch.float64, "cpu")
    square = replace(call, k=call.k[:5], v=call.v[:5], cu_seqlens_k=call.cu_seqlens_q)
    torch.testing.assert_close(output("mask-top-left", call), oracle(square))


def test_prefix_dropped_is_the_new_keys_only() -> None:
    call = call_of([(5, 3)], (4, 2), 8, torch.float64, "cpu")
    square = replace(call, k=call.k[3:], v=call.v[3:], cu_seqlens_k=call.cu_seqlens_q)
    torch.testing.assert_close(output("prefix-dropped", call), oracle(square))


def test_masks_by_the_keys_that_a_query_sees() -> None:
    call = call_of([(4, 6)], (1, 1), 4, torch.float64, "cpu")
    # With the same key everywhere each seen key weighs the same, so values of one-hot columns give back who was seen.
    same = replace(call, k=torch.ones_like(call.k), v=torch.eye(10, dtype=torch.float64)[:, None])

    def seen(name: str) -> list[int]:
        return [int(n) for n in (output(name, same)[:, 0] > 0).sum(-1)]

    assert seen("mask-one-key-too-many") == [8, 9, 10, 10]
    assert seen("mask-one-key-too-few") == [6, 7, 8, 9]
    assert seen("mask-missing") == [10] * 4
    assert seen("last-block-lost-16") == [0] * 4  # NaN is not above 0
    assert (output("last-block-lost-16", same).isnan()).all()
    long = replace(call_of([(4, 16)], (1, 1), 4, torch.float64, "cpu"))
    long = replace(long, k=torch.ones_like(long.k), v=torch.eye(20, dtype=torch.float64)[:, None])
    window = output("sliding-window-16", long)[:, 0] > 0
    assert window.sum(-1).tolist() == [16] * 4
    assert window[0].nonzero().flatten().tolist() == list(range(1, 17))
    assert (output("last-block-lost-16", long)[:, 0] > 0).sum(-1).tolist() == [16] * 4


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("scale-missing", 1.0),
        ("scale-twice", 1 / 16),
        ("scale-doubled", 0.5),
        ("scale-of-all-heads", 64**-0.5),
        ("exp2-without-log2e", 0.25 * 0.6931471805599453),
        ("exp-with-log2e", 0.25 * 1.4426950408889634),
    ],
)
def test_scales(name: str, scale: float) -> None:
    call = call_of([(5, 3)], (4, 2), 16, torch.float64, "cpu")
    torch.testing.assert_close(output(name, call), oracle(call.with_spec(scale=scale)))


def test_kv_heads() -> None:
    call = call_of([(5, 3)], (4, 2), 8, torch.float64, "cpu")
    swapped = replace(call, k=call.k[:, [1, 0]], v=call.v[:, [1, 0]])
    torch.testing.assert_close(output("kv-head-next-group", call), oracle(swapped))
    mixed = replace(call, k=call.k[:, [0, 1, 0, 1]], v=call.v[:, [0, 1, 0, 1]])
    torch.testing.assert_close(output("kv-heads-interleaved", call), oracle(mixed))


def test_leaks_take_the_neighbours_rows() -> None:
    call = call_of([(2, 3), (4, 2)], (2, 1), 8, torch.float64, "cpu")
    leaked = call.v.clone()
    leaked[5:10] = call.v[:5]
    expected = oracle(replace(call, v=leaked))
    found = output("leak-values-previous", call)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[:2], oracle(call)[:2])  # nothing comes before the first
    prefix = call.k.clone(), call.v.clone()
    for mine, theirs in zip(prefix, (call.k, call.v), strict=True):
        mine[:2] = theirs[5:7]
    expected = oracle(replace(call, k=prefix[0], v=prefix[1]))
    torch.testing.assert_close(output("leak-prefix-next", call)[:2], expected[:2])


def test_a_shared_prefix_leaks_nothing() -> None:
    call = call_of([(2, 3), (4, 3)], (2, 1), 8, torch.float64, "cpu")
    k, v = call.k.clone(), call.v.clone()
    k[5:8], v[5:8] = k[:3], v[:3]
    assert BY_ID["leak-prefix-next"].compute(replace(call, k=k, v=v)) is None


def test_a_boundary_off_by_one_sees_one_key_of_the_neighbour() -> None:
    call = call_of([(1, 3), (1, 2)], (2, 1), 8, torch.float64, "cpu")
    longer = replace(
        call,
        k=torch.cat([call.k[:5], call.k[4:]]),
        v=torch.cat([call.v[:5], call.v[4:]]),
        cu_seqlens_k=cumulative([5, 3]),
    )
    torch.testing.assert_close(output("leak-first-key-next", call)[:1], oracle(longer)[:1])


def test_prefix_shifts_and_the_newest_token() -> None:
    call = call_of([(1, 3)], (2, 1), 8, torch.float64, "cpu")

    def with_rows(k: list[int], v: list[int]) -> Tensor:
        return oracle(replace(call, k=call.k[k], v=call.v[v]))

    torch.testing.assert_close(output("prefix-one-token-late", call), with_rows([1, 2, 3, 3], [1, 2, 3, 3]))
    torch.testing.assert_close(output("prefix-one-token-early", call), with_rows([0, 0, 1, 3], [0, 0, 1, 3]))
    torch.testing.assert_close(output("prefix-values-shifted", call), with_rows([0, 1, 2, 3], [1, 2, 3, 3]))
    torch.testing.assert_close(output("newest-token-stale", call), with_rows([0, 1, 2, 2], [0, 1, 2, 2]))


def test_int8_has_a_scale_for_each_block_and_head() -> None:
    x = torch.randn(2, 150, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, :64] *= 100
    back = int8(x, 64)
    for head in range(2):
        for rows in (slice(0, 64), slice(64, 128), slice(128, 150)):
            step = float(x[head, rows].abs().max()) / 127
            assert float((back[head, rows] - x[head, rows]).abs().max()) <= step / 2 + 1e-12
    wrong = int8(x, 64, shift=1)
    ratio = float(x[0, 64:128].abs().max() / x[0, :64].abs().max())
    torch.testing.assert_close(wrong[0, :64], back[0, :64] * ratio)
    torch.testing.assert_close(wrong[:, 128:], back[:, 128:])  # nothing follows the last block


def test_a_smoothed_k_is_invisible_unless_it_differs_between_keys() -> None:
    call = call_of([(5, 70)], (2, 1), 8, torch.float64, "cpu")
    biased = replace(call, k=call.k + 3)
    batch = requests(biased)
    smoothed = torch.cat([attend(replace(r, k=smooth(batch, b))) for b, r in enumerate(batch)], dim=1)
    torch.testing.assert_close(smoothed.transpose(0, 1), oracle(biased))
    for name in ("k-smoothed-by-block", "k-smoothed-new-only"):
        assert float((output(name, biased) - oracle(biased)).abs().max()) > 0.01


def test_overflow_expects_infinity_where_fp16_ends() -> None:
    call = call_of([(2, 0)], (1, 1), 4, torch.float32, "cpu")
    huge = replace(call, q=call.q.sign() * 200, k=torch.stack([call.q[1].sign() * 200, call.q[0].sign() * -200]))
    found = output("scores-overflow-fp16", huge)  # query 1 meets key 0 at 4 * 200 * 200
    assert bool(found[1].isinf().all())
    large = replace(call, v=call.v.clone())
    large.v[1, 0, 2] = 7e4
    found = output("values-overflow-fp16", large)
    assert found.isinf().nonzero().tolist() == [[1, 0, 2]]


def test_what_cannot_show_says_none() -> None:
    call = call_of([(1, 0)], (1, 1), 8, torch.float32, "cpu")  # one key, one query, one head, one sequence
    shows = {"mask-one-key-too-few"} | {f"last-block-lost-{n}" for n in (16, 32, 64, 128)}
    assert {one.id for one in FAMILY if one.compute(call) is not None} == shows


def test_a_sequence_without_a_query_shows_nothing_and_has_no_output() -> None:
    call = call_of([(0, 5), (3, 40)], (4, 2), 8, torch.float32, "cpu")
    alone = replace(call, k=call.k[5:], v=call.v[5:], cu_seqlens_q=cumulative([3]), cu_seqlens_k=cumulative([43]))
    for one in FAMILY:
        # The mean of K, which smoothing subtracts, is that of all sequences.
        if one.kind == LEAK or one.id == "k-smoothed-new-only":
            continue
        found, expected = one.compute(call), one.compute(alone)
        assert (found is None) == (expected is None), one.id
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text, one=one: f"{one.id}: {text}")


def test_scores_may_be_scaled_by_zero() -> None:
    call = call_of([(5, 30), (3, 40)], (4, 2), 8, torch.float32, "cpu").with_spec(scale=0.0)
    for one in FAMILY:
        found = one.compute(call)
        assert found is None or found.shape == call.q.shape, one.id
