"""Divergences over arrays: bounds, equalities, clusters, and what is never averaged away."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr, softmax

from assay.harness.errors import EvidenceError
from assay.harness.evidence.logit_files import CACHE_STATES, CacheState, Logits, LogitsHeader, Positions, ScoredSequence
from assay.harness.judge.logits import compare_roles, merged_kl
from assay.harness.sides import Role
from assay.harness.statement import state

VOCABULARY, K = 12, 4
logit = st.floats(-6, 6)
logits = st.lists(logit, min_size=VOCABULARY, max_size=VOCABULARY).map(np.array)
START, PROMPT, LENGTH = 20, 30, 41
POSITIONS = LENGTH - START - 1


def top(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.argsort(-values, kind="stable")[:K]


@given(logits, logits)
def test_merging_tokens_gives_a_lower_bound(first: Any, second: Any) -> None:
    at = top(first)
    merged = merged_kl(log_softmax(first)[at], log_softmax(second)[at])
    assert 0 <= merged <= rel_entr(softmax(first), softmax(second)).sum() + 1e-9


@given(logits, logits)
def test_it_is_the_divergence_of_the_merged_distributions(first: Any, second: Any) -> None:
    at = top(first)
    p, q = softmax(first)[at], softmax(second)[at]
    p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
    assert merged_kl(np.log(p[:-1]), np.log(q[:-1])) == pytest.approx(rel_entr(p, q).sum(), abs=1e-9)


def test_a_token_that_is_excluded_is_infinitely_far_and_nan_stays_nan() -> None:
    half = math.log(0.5)
    assert merged_kl([half, half], [0.0, -math.inf]) == math.inf
    assert np.isnan(merged_kl([[half, half]], [[half, math.nan]])).all()


def scored(role: Role, changes: dict[int, float], repeat: int = 0, cached: dict[CacheState, int] | None = None) -> Logits:
    """Three sequences with one distribution everywhere; at the positions of `changes` the first token's logit is shifted."""
    said: dict[CacheState, int] = {"cold": 0, "cached": START, **(cached or {})}
    sequences = [
        ScoredSequence(item=f"greedy-{i:03d}", prompt_tokens=PROMPT, length=LENGTH, start=START, cached=said) for i in range(3)
    ]
    n = 3 * POSITIONS
    values = np.tile(np.linspace(3, -3, VOCABULARY), (n, 1))
    for position, shift in changes.items():
        values[position, 0] += shift
    chosen = log_softmax(values, axis=1)
    positions = Positions(
        token=chosen[:, 0].astype(np.float32),
        best=np.argmax(values, axis=1).astype(np.int32),
        top_ids=np.tile(np.arange(K, dtype=np.int32), (n, 1)),
        logprobs=chosen[:, :K].astype(np.float32),
    )
    header = LogitsHeader(role=role, repeat=repeat, backend="x", engine="y", top_k=K, sequences=tuple(sequences))
    return Logits(header, np.arange(3 * LENGTH, dtype=np.int32), dict.fromkeys(CACHE_STATES, positions))


def test_a_row_has_the_mean_the_worst_place_and_the_tops() -> None:
    at = 2 * POSITIONS + 15
    comparison = compare_roles(scored("reference", {}), scored("candidate", {at: -2.0, 3: 0.1}), scored("reference", {}, 1))
    assert comparison.not_observed == ()
    assert [row.condition for row in comparison.rows] == ["cold", "cached"]
    row = comparison.rows[0]
    p = softmax(np.linspace(3, -3, VOCABULARY))
    first, second = np.linspace(3, -3, VOCABULARY), np.linspace(3, -3, VOCABULARY)
    first[0] -= 2.0
    second[0] += 0.1
    kls = [rel_entr(p, softmax(changed)).sum() for changed in (first, second)]  # exact: the rest changes by one factor
    assert (row.positions, row.sequences, row.nonfinite) == (3 * POSITIONS, 3, 0)
    assert row.mean_kl == pytest.approx(sum(kls) / (3 * POSITIONS), rel=1e-4)
    assert row.max == pytest.approx(kls[0], rel=1e-4)
    assert row.max_at == "greedy-002, answer token 7 of 11"
    assert (row.median, row.floor_mean_kl) == (0.0, 0.0)
    assert row.p99 is not None
    assert row.p999 is not None
    assert 0 < row.p99 < row.p999 < kls[0]
    assert row.same_top == 1 - 1 / (3 * POSITIONS)
    assert row.mass == pytest.approx(p[:K].sum(), rel=1e-5)


def with_nan(logits: Logits, where: slice) -> Logits:
    positions = logits.by_condition["cold"]
    broken = positions.logprobs.copy()
    broken[where] = math.nan
    return replace(logits, by_condition={**logits.by_condition, "cold": replace(positions, logprobs=broken)})


def test_what_is_not_finite_is_counted_and_in_no_mean() -> None:
    reference, candidate = scored("reference", {}), scored("candidate", {0: 1.0, 30: 0.5})
    clean, broken = (compare_roles(reference, c).rows for c in (candidate, with_nan(candidate, slice(0, 5))))
    assert broken[0].nonfinite == 5
    assert broken[0].positions == clean[0].positions
    assert broken[0].mean_kl is not None
    assert clean[0].max is not None
    assert broken[0].max is not None
    assert broken[0].max < clean[0].max  # the worst position is among those that are not finite
    assert broken[1].nonfinite == 0


@pytest.mark.parametrize(("condition", "cached", "required"), [("cached", 15, 16), ("cold", 2, 1)])
def test_a_condition_that_was_not_honoured_is_not_observed(condition: CacheState, cached: int, required: int) -> None:
    candidate = scored("candidate", {3: 1.0}, cached={condition: cached})
    comparison = compare_roles(scored("reference", {}), candidate)
    assert [row.condition for row in comparison.rows] == [c for c in CACHE_STATES if c != condition]
    reference = {"cold": 0, "cached": START}[condition]
    had = ("reference", reference, reference), ("candidate", cached, cached)
    assert comparison.not_observed == (
        state("not-cached-as-required", condition=condition, left_out=3, sequences=3, required=required, cached=had),
    )


def test_scorings_of_other_tokens_are_refused() -> None:
    candidate = scored("candidate", {})
    other = replace(candidate, ids=candidate.ids[::-1])
    with pytest.raises(EvidenceError, match=r"candidate \(repeat 0\) was scored on other tokens"):
        compare_roles(scored("reference", {}), other)
    positions = candidate.by_condition["cold"]
    followed = replace(positions, top_ids=positions.top_ids + 1)
    with pytest.raises(EvidenceError, match="other tokens"):
        compare_roles(scored("reference", {}), replace(candidate, by_condition=dict.fromkeys(CACHE_STATES, followed)))
