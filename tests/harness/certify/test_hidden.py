from __future__ import annotations

import math

import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.bugs.seeded import SeededFault, Where
from assay.harness.certify.footprint import WideCall, widened
from assay.harness.certify.hidden import hidden_words, largest_effect
from assay.harness.localize.bounds import CallNoise


@pytest.fixture(scope="module")
def calls() -> list[WideCall]:
    call = call_of([(80, 0), (30, 54)], (4, 2), 64, torch.float32, "cpu")
    return widened([call, call.with_spec(layer=1)])


def scaled(factor: float, where: Where | None = None) -> SeededFault:
    return SeededFault("scaled", "scaled", "", lambda call, out: out * factor, where=where or Where())


def test_an_effect_is_measured_in_what_the_noise_costs(calls: list[WideCall]) -> None:
    least = min(float(CallNoise(one.narrow, "int8_qk").ensemble.noise.min()) for one in calls)
    assert largest_effect(scaled(1.01), calls, "int8_qk") == pytest.approx(0.01 / least, rel=1e-6)
    assert largest_effect(scaled(1.001, Where(layers=(1,))), calls, "int8_qk") == pytest.approx(0.001 / least, rel=1e-6)


def test_an_output_that_is_not_finite_is_hidden_by_nothing(calls: list[WideCall]) -> None:
    assert largest_effect(scaled(math.nan), calls, "int8_qk") == math.inf


def test_rounding_hides_nothing_and_neither_does_a_fault_have_an_effect_where_it_does_not_show(calls: list[WideCall]) -> None:
    assert largest_effect(scaled(1.01), calls, "") is None
    assert largest_effect(scaled(1.01, Where(layers=(7,))), calls, "int8_qk") is None


@pytest.mark.parametrize(("effect", "words"), [(2.9, "(hidden by it)"), (3.1, "(it hides up to 3 times)")])
def test_an_effect_in_words(effect: float, words: str) -> None:
    assert hidden_words(effect, "int8_qk").endswith(words)
    assert hidden_words(None, "") == ""
