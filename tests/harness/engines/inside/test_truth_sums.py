"""What sampled queries show about a candidate and its reference: single wrong queries, and a reference that is off by one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.noise import family
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.inside.shadow import LayerSums
from assay.harness.engines.inside.truth_sums import _BLOCK, MAX_ROWS, TruthSums, sampled_rows
from assay.harness.evidence.error_table import DIMENSIONS, QUERY, ErrorTable, RoleErrors, condition_numbers, excess, joined
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader
from assay.harness.judge.own_error import _known_differences
from assay.harness.judge.truth_bounds import AgainstNoise, compare_with_noise
from assay.harness.statement import state

HEADS, WINDOW, LENS = 4, 8, [(1, 30), (1, 12), (1, 3)]
NEW, PREFIX = 2048, 64
LONG = call_of([(NEW, PREFIX)], (HEADS, 2), 16, torch.bfloat16, "cpu", seed=7)


def windowed(window: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> AttentionCall:
    call = call_of(LENS, (HEADS, 2), 32, dtype, "cpu", seed=seed)
    return call.with_spec(phase="decode", mask=Mask(window=window))


def attend(window: int) -> Tensor:
    return rounded_oracle(windowed(window))


def compared(
    call: AttentionCall, candidate: Tensor, reference: Tensor, noise: str = "", missed: Sequence[int] = ()
) -> tuple[AgainstNoise, ShadowErrors]:
    """What the shadow makes of one call of layer 2, if the sample misses some queries."""
    conditions = condition_numbers(call.phase, call.lens_q, call.prefixes)
    heads, sums = LayerSums(HEADS, torch.device("cpu")), TruthSums(HEADS, noise, "")
    worst = [int(at) // HEADS for _, at in heads.measure(candidate, reference, torch.from_numpy(conditions))]
    rows = np.setdiff1d(sampled_rows(call.lens_q, call.prefixes, np.random.default_rng(1)), missed)
    sums.add(call, (candidate, reference), rows, conditions, 0, worst)
    header = ShadowHeader(
        reference="r", candidate="c", phases=(call.phase,), candidate_noise=noise, dtype=sums.dtype,
        accumulation=sums.accumulation, known=tuple((2, call.phase, how) for how in sums.known),
    )  # fmt: skip
    shadow = ShadowErrors(joined([heads.cells(2, 0), sums.cells(2, 0)]), (header,))
    return compare_with_noise(shadow), shadow


@pytest.mark.parametrize(("rows", "heads"), [([701, 1302, 2000], slice(None)), ([1302], slice(1, 2))])
def test_single_wrong_queries_do_not_drown_in_their_cells(rows: list[int], heads: slice) -> None:
    right = rounded_oracle(LONG)
    wrong = right.clone()
    wrong[rows, heads] = 0
    against, shadow = compared(LONG, wrong, right, missed=rows)
    assert not against.cells.flagged.any()
    assert not against.gains.flagged.any()
    worst = shadow.cells.candidate.worst
    flagged = worst[excess(worst) > 1]
    assert set(flagged[:, QUERY.index("position")] - PREFIX) <= set(rows)
    assert set(flagged[:, QUERY.index("prefix")]) == {PREFIX}
    assert 1 in against.queries.index[against.queries.flagged][:, DIMENSIONS.index("head")]
    assert not against.reference_queries.flagged.any()


@pytest.mark.few(2)
@pytest.mark.parametrize("noise", ["", "int8_qk", "fp8_kv"])
def test_honest_queries_are_within_their_bounds(noise: str) -> None:
    candidate = honest_outputs(LONG, family(noise), members=2, seed=11)[0].to(LONG.q.dtype)
    against, _ = compared(LONG, candidate, rounded_oracle(LONG), noise)
    assert float(against.queries.excess.max()) < 0.6
    assert not against.reference_queries.flagged.any()


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_reference_that_is_off_by_a_key_says_nothing_against_a_right_candidate(window: int) -> None:
    against, shadow = compared(windowed(WINDOW), attend(WINDOW), attend(window))
    for measured in (against.cells, against.gains, against.queries, against.reference, against.reference_queries):
        assert len(measured.index)
        assert not measured.flagged.any()
    assert not len(against.apart.index)
    assert shadow.known == {(2, "decode", "window")}
    assert [*_known_differences(shadow)] == [state("difference-known", how="window", phase="decode", layers=[2])]


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_a_candidate_that_is_off_in_the_same_way_is_wrong(window: int) -> None:
    against, _ = compared(windowed(WINDOW), attend(window), attend(window))
    assert against.cells.flagged.any()
    assert against.queries.flagged.any()
    assert not against.reference.flagged.any()


@pytest.mark.parametrize("window", [0, WINDOW - 2, WINDOW + 2])
def test_a_reference_that_is_off_by_more_is_wrong(window: int) -> None:
    against, _ = compared(windowed(WINDOW), attend(WINDOW), attend(window))
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
    ("asked", "felt"),
    [
        ({"mask": Mask(window=WINDOW)}, True), ({"mask": Mask(window=30)}, True),
        ({"mask": Mask(window=31)}, False), ({"mask": Mask(window=4096)}, False),
        ({"softcap": 1.0}, True), ({"softcap": 1e4}, False),
        ({"temperature": 8}, True), ({"temperature": 31}, False),
        ({"sinks": (0.0,) * HEADS}, True), ({"sinks": (-40.0,) * HEADS}, False),
    ],
)  # fmt: skip
def test_a_feature_is_felt_by_queries_whose_output_it_changes(asked: dict[str, Any], felt: bool) -> None:
    """A kernel that ignores windows above 300 passed with a model that has windows of 1,024: every call was shorter."""
    call = windowed(0).with_spec(**asked)
    sums, out = TruthSums(HEADS, "", ""), rounded_oracle(call)
    sums.add(call, (out, out), np.arange(len(LENS)), np.zeros(len(LENS), np.int64), 0)
    assert sums.felt == {call.features[0]: felt}


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


def test_of_several_processes_the_worse_query_stays() -> None:
    index = np.array([[0, 0, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0]])
    mild, bad = (np.array([[off, 1.0, 4.0, at, 0.0]] * 2) for off, at in ((0.5, 3.0), (3.0, 9.0)))
    mild, bad = (replace(RoleErrors.none(2), worst=worst) for worst in (mild, bad))
    found = joined([ErrorTable.of(index, None, mild, bad), ErrorTable.of(index, None, bad, mild)])
    assert len(found.index) == 2
    assert set(excess(found.candidate.worst)) == set(excess(found.reference.worst)) == {3.0}
    assert set(found.candidate.worst[:, QUERY.index("position")]) == {9.0}
