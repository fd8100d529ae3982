"""Limits in nats that declared noise explains."""

from __future__ import annotations

import pytest

from assay.harness.attention.noise import FAMILIES
from assay.harness.judge.noise_limits import EXACT_KL, EXACT_SWING, MAX_SWING, _relative_error, change_limit, kl_limit, swing_limit


def test_a_kernel_that_declares_nothing_gets_what_rounding_explains() -> None:
    assert _relative_error("") == 0.0
    assert kl_limit([]) == kl_limit(["", ""]) == EXACT_KL
    assert swing_limit([]) == swing_limit(["", ""]) == EXACT_SWING


def test_coarser_storage_has_larger_limits() -> None:
    order = ["", "fp16_accumulation", "int8_qk", "fp8_kv", "fp8_qkv", "fp8_e5m2_kv"]
    limits = [kl_limit([name]) for name in order]
    assert limits == sorted(limits)
    assert len(set(limits)) == len(order)
    assert kl_limit(["int8_qk", "int8_qk"]) - EXACT_KL == pytest.approx(2 * (kl_limit(["int8_qk"]) - EXACT_KL))


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_excuses_a_certain_swap(name: str) -> None:
    assert EXACT_SWING <= swing_limit([name, name]) <= MAX_SWING < 16
    assert 0 < kl_limit([name]) < 0.2


def test_what_was_measured_for_int8_is_within_its_limits_with_room() -> None:
    assert 6.3e-5 * 10 <= kl_limit(["int8_qk"]) <= 1e-3
    assert 0.95 * 2 <= swing_limit(["int8_qk"]) <= 3


def test_a_log_likelihood_changes_by_at_most_the_root_of_twice_the_kl() -> None:
    assert change_limit(2e-4) == pytest.approx(0.02)
