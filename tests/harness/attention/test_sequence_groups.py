from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from assay.harness.attention import oracle as oracle_module
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import FAMILIES
from assay.harness.attention.oracle import attend, oracle, requests, sequences
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sequence_groups import sequence_groups

LENS = [(1, 40 + 7 * n) for n in range(12)] + [(3, 0), (200, 0), (190, 40), (1, 500), (5, 9)]
CALL = call_of(LENS, (4, 2), 64, torch.float16, "cpu")
ROOM = 2**20


def alone(call: AttentionCall, at: int) -> AttentionCall:
    """One sequence of a call."""
    rows_q, rows_k = sequences(call)[at]
    ends_q, ends_k = (torch.tensor([0, rows.stop - rows.start], dtype=torch.int32) for rows in (rows_q, rows_k))
    return replace(call, q=call.q[rows_q], k=call.k[rows_k], v=call.v[rows_k], cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("room", [ROOM, 2**14])
def test_padded_sequences_get_the_answers_that_each_gets_alone(causal: bool, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_module, "NUMBERS_AT_ONCE", room)
    call = CALL.with_spec(mask=Mask(causal=causal))
    expected = torch.cat([attend(one) for one in requests(call)], dim=1).transpose(0, 1)
    torch.testing.assert_close(oracle(call), expected)
    rows = torch.tensor([0, 5, 11, 13, 14, 100, 300, 406, 407])
    torch.testing.assert_close(oracle(call, rows), expected[rows])


def test_similar_sequences_share_a_group_and_others_are_not_padded_to_them() -> None:
    groups = sequence_groups(CALL, None, ROOM)
    assert len(groups) < len(LENS) / 2
    assert sum(group.sequences for group in groups) == len(LENS)
    for group in groups:
        assert group.k.shape[1] <= max(128, 2 * int(group.lens_k.min()))
        assert group.q.shape[2] <= max(8, 2 * int(group.lens_q.min()))
    assert sorted(place for group in groups for place in group.places.tolist()) == list(range(CALL.q.shape[0]))


def test_only_sequences_with_a_query_that_is_asked_for_are_computed() -> None:
    (group,) = sequence_groups(CALL, torch.tensor([3, 4]), ROOM)
    assert (group.sequences, group.places.tolist()) == (2, [0, 1])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["", "int8_qk", "int8_kv", "fp8_kv"])
def test_padding_changes_no_noise(name: str) -> None:
    """Common values of K, which smoothing removes, would be those of the padding if it counted as keys."""
    call = replace(CALL, k=CALL.k + torch.linspace(-6, 6, 64).half())
    many = honest_outputs(call, FAMILIES[name], members=32) - oracle(call)
    for at in (0, 6, 11, 12, 16):
        one = alone(call, at)
        rows = sequences(call)[at][0]
        expected = (honest_outputs(one, FAMILIES[name], members=32) - oracle(one)).abs().mean()
        assert float(many[:, rows].abs().mean()) == pytest.approx(float(expected), rel=0.15)
