"""A reference whose window is off by one key, as SGLang's triton is in decode: what it shows about a candidate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.inside.reduction import LayerSums
from assay.harness.engines.inside.truth_sums import _BLOCK, MAX_ROWS, TruthSums, sampled_rows
from assay.harness.evidence.error_table import QUERY, condition_numbers, joined
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader
from assay.harness.judge.own_error import _known_differences
from assay.harness.judge.truth_bounds import AgainstNoise, compare_with_noise

HEADS, WINDOW, LENS = 4, 8, [(1, 30), (1, 12), (1, 3)]


def windowed(window: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> AttentionCall:
    call = call_of(LENS, (HEADS, 2), 32, dtype, "cpu", seed=seed)
    return call.with_spec(phase="decode", mask=Mask(window=window))


def attend(window: int) -> Tensor:
    return rounded_oracle(windowed(window))


def compared(candidate: Tensor, reference: Tensor) -> tuple[AgainstNoise, ShadowErrors]:
    conditions = condition_numbers("decode", [new for new, _ in LENS], [prefix for _, prefix in LENS])
    heads, sums = LayerSums(HEADS, torch.device("cpu")), TruthSums(HEADS, "", "")
    heads.measure(candidate, reference, torch.from_numpy(conditions))
    sums.add(windowed(WINDOW), (candidate, reference), np.arange(len(LENS)), conditions, 0)
    known = tuple((2, "decode", how) for how in sums.known)
    header = ShadowHeader.model_validate(
        {"reference": "r", "candidate": "c", "phases": ("decode",), "dtype": "bfloat16", "known": known}
    )
    shadow = ShadowErrors(joined([heads.cells(2, 0), sums.cells(2, 0)]), (header,))
    return compare_with_noise(shadow), shadow


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_reference_that_is_off_by_a_key_says_nothing_against_a_right_candidate(window: int) -> None:
    against, shadow = compared(attend(WINDOW), attend(window))
    for measured in (against.cells, against.gains, against.queries, against.reference, against.reference_queries):
        assert len(measured.index)
        assert not measured.flagged.any()
    assert not len(against.apart.index)
    assert shadow.known == {(2, "decode", "window")}
    [said] = _known_differences(shadow)
    assert said.startswith("difference from the reference, decode, layers 2: the reference's window is off by one key there")


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_candidate_that_is_off_in_the_same_way_is_wrong(window: int) -> None:
    against, _ = compared(attend(window), attend(window))
    assert against.cells.flagged.any()
    assert against.queries.flagged.any()
    assert not against.reference.flagged.any()


@pytest.mark.parametrize("window", [0, WINDOW - 2, WINDOW + 2])
def test_a_reference_that_is_off_by_more_is_wrong(window: int) -> None:
    against, _ = compared(attend(WINDOW), attend(window))
    assert against.reference.flagged.any()
    assert against.reference_queries.flagged.any()


@pytest.mark.slow
def test_noise_is_not_taken_for_another_window() -> None:
    """The key at the end of the window has hardly any weight, so that both windows differ by less than roundings."""
    for seed in range(200):
        call = windowed(WINDOW, torch.float32, seed)
        for last, length in zip(call.cu_seqlens_k[1:].tolist(), call.lens_k, strict=True):
            for at in (WINDOW, WINDOW + 1):
                if length > at:
                    call.k[last - at] = -40 * call.q[call.lens_k.index(length)].mean(0)
        sums, out = TruthSums(HEADS, "", ""), rounded_oracle(call)
        noisy = out + out.abs() * torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * 1e-3
        sums.add(call, (out, noisy), np.arange(len(LENS)), np.zeros(len(LENS), np.int64), seed)
        assert not sums.known


def test_a_query_is_named_by_its_place_in_the_request_where_the_call_has_the_last_keys_alone() -> None:
    call, wrong = windowed(WINDOW), attend(WINDOW)
    wrong[0] += 1
    sums, conditions = TruthSums(HEADS, "", ""), np.zeros(len(LENS), np.int64)
    sums.add(call, (wrong, attend(WINDOW)), np.arange(len(LENS)), conditions, 0, prefixes=[130, 12, 3])
    worst = sums.cells(0, 0).candidate.worst[:, [QUERY.index(name) for name in ("position", "prefix")]]
    assert {tuple(row) for row in worst} == {(130.0, 130.0)}


@pytest.mark.parametrize(
    ("new", "prefix"),
    [([3, 1, 60], [0, 5, 2]), ([3000], [7]), ([1000, 700, 5], [33, 0, 500]), ([200] * 16, [17] * 16), ([1] * 300, [9] * 300)],
)
def test_a_sample_of_a_call_has_every_condition_and_every_end(new: list[int], prefix: list[int]) -> None:
    rows, again = (sampled_rows(new, prefix, np.random.default_rng(seed)) for seed in (0, 0))
    assert np.array_equal(rows, np.unique(again))
    phase = "decode" if max(new) == 1 else "extend"
    conditions = condition_numbers(phase, new, prefix)
    assert set(conditions[rows]) == set(conditions)
    ends = np.cumsum(new)
    assert {0, *ends[:-1], *(ends - 1)} <= set(rows.tolist())
    assert min(sum(new), MAX_ROWS) <= len(rows) <= max(MAX_ROWS, 7 * len(new))
    borders = (rows % _BLOCK == 0) | (rows % _BLOCK == _BLOCK - 1)
    assert sum(new) <= MAX_ROWS or len(new) > 1 or borders.mean() > 3 / _BLOCK, "block borders are over-represented"
