"""The hypotheses on small calls and on odd ones. Each is compared with the same bug written another way in `test_code`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.bugs.quantisation import _int8, _smooth
from assay.harness.attention.call import AttentionCall, cumulative
from assay.harness.attention.oracle import attend, oracle, requests
from assay.harness.attention.sample_calls import call_of


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


def test_a_shared_prefix_leaks_nothing() -> None:
    call = call_of([(2, 3), (4, 3)], (2, 1), 8, torch.float64, "cpu")
    k, v = call.k.clone(), call.v.clone()
    k[5:8], v[5:8] = k[:3], v[:3]
    assert BY_ID["leak-prefix-next"].compute(replace(call, k=k, v=v)) is None


def test_int8_has_a_scale_for_each_block_and_head() -> None:
    x = torch.randn(2, 150, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, :64] *= 100
    back = _int8(x, 64)
    for head in range(2):
        for rows in (slice(0, 64), slice(64, 128), slice(128, 150)):
            step = float(x[head, rows].abs().max()) / 127
            assert float((back[head, rows] - x[head, rows]).abs().max()) <= step / 2 + 1e-12
    wrong = _int8(x, 64, shift=1)
    ratio = float(x[0, 64:128].abs().max() / x[0, :64].abs().max())
    torch.testing.assert_close(wrong[0, :64], back[0, :64] * ratio)
    torch.testing.assert_close(wrong[:, 128:], back[:, 128:])  # nothing follows the last block


def test_a_smoothed_k_is_invisible_unless_it_differs_between_keys() -> None:
    call = call_of([(5, 70)], (2, 1), 8, torch.float64, "cpu")
    biased = replace(call, k=call.k + 3)
    batch = requests(biased)
    smoothed = torch.cat([attend(replace(r, k=_smooth(batch, b))) for b, r in enumerate(batch)], dim=1)
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
