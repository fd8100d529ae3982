"""Random faults: each shows somewhere, and nowhere outside of its restrictions."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of

NUMBER = 60
SERIES = 16
"""Calls that one kernel gets where a fault depends on the calls before."""
SHORT = 200
"""Tokens of a sequence that most faults need no more than."""
NOISE = 1e-4
"""Relative error of float32 on these calls, with room to spare."""


@pytest.fixture(scope="session")
def faults(drawn_faults: ModuleType) -> list[Any]:
    return list(drawn_faults.examples(NUMBER))


@pytest.fixture(scope="session")
def calls(drawn_faults: ModuleType) -> list[AttentionCall]:
    """Calls other than those that the faults were drawn by, the shortest first."""
    made = list(drawn_faults.random_calls(1, 96))
    return [call for call in made if max(call.lens_k) <= SHORT] + [call for call in made if max(call.lens_k) > SHORT]


@pytest.fixture(scope="session")
def first_shown(drawn_faults: ModuleType, faults: list[Any], calls: list[AttentionCall]) -> list[int | None]:
    """For each fault, the number of the first call on which it shows."""

    def first(fault: Any) -> int | None:
        length = SERIES if fault.group == "state" else 1
        for start in range(0, len(calls), length):
            series = calls[start : start + length]
            if any(fault.mask(call).any() for call in series):
                for i, found in enumerate(drawn_faults.differences(fault.kernel(), series)):
                    if found.shows():
                        return start + i
        return None

    return [first(fault) for fault in faults]


def test_every_fault_visibly_differs_from_the_oracle_on_some_call(first_shown: list[int | None]) -> None:
    assert [seed for seed, number in enumerate(first_shown) if number is None] == []


def test_most_faults_show_on_short_sequences(first_shown: list[int | None], calls: list[AttentionCall]) -> None:
    short = sum(max(call.lens_k) <= SHORT for call in calls)

    assert sum(number is not None and number < short for number in first_shown) >= 0.9 * NUMBER


def test_outside_of_its_restrictions_a_fault_agrees_with_the_oracle(
    drawn_faults: ModuleType, faults: list[Any], calls: list[AttentionCall]
) -> None:
    truths = [oracle(call) for call in calls[:SERIES]]
    restricted = [fault for fault in faults if fault.where]

    assert len(restricted) > NUMBER / 2
    for fault in restricted:
        kernel, seen = fault.kernel(), 0
        for call, truth in zip(calls, truths, strict=False):
            given, chosen = call.clone(), fault.mask(call)
            errors = drawn_faults.relative_errors(kernel(given), truth)[~chosen]
            seen += len(errors)
            assert (errors < NOISE).all(), fault.truth
            assert chosen.any() or all(torch.equal(getattr(call, name), getattr(given, name)) for name in "qkv"), (
                fault.truth
            )
        assert seen, fault.truth


def test_a_fault_of_state_is_right_in_the_first_call_of_a_fresh_kernel(
    drawn_faults: ModuleType, faults: list[Any], calls: list[AttentionCall]
) -> None:
    stateful = [fault for fault in faults if fault.group == "state"]

    assert stateful
    for fault in stateful:
        for call in calls[:SERIES]:
            (found,) = drawn_faults.differences(fault.kernel(), [call])
            assert found.output < NOISE


def test_kernels_of_one_fault_do_not_share_their_state(faults: list[Any], calls: list[AttentionCall]) -> None:
    for fault in faults:
        if fault.group == "state":
            kernels = fault.kernel(), fault.kernel()
            once = [kernels[0](call.clone()).clone() for call in calls[:SERIES]]
            again = [kernels[1](call.clone()).clone() for call in calls[:SERIES]]
            assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_a_fault_that_overwrites_an_earlier_output_shows_only_later(
    drawn_faults: ModuleType, faults: list[Any], calls: list[AttentionCall]
) -> None:
    fault = next(fault for fault in faults if fault.template == "output_memory_reused")
    series = [replace(calls[0], q=calls[0].q + layer).with_spec(layer=layer, phase="extend") for layer in (1, 2)]

    assert drawn_faults.shows(fault, series[0], later=series[1:])
    assert not drawn_faults.shows(fault, series[1], before=series[:1])
    assert not drawn_faults.shows(fault, series[0])


def test_draws_are_of_every_group_and_template_and_no_two_are_equal(
    drawn_faults: ModuleType, drawn_bugs: ModuleType, faults: list[Any]
) -> None:
    groups = [fault.group for fault in faults]
    templates = {one.__name__ for of_group in drawn_bugs.TEMPLATES.values() for one in of_group}

    assert [groups.count(group) for group in ("mask", "rows", "scales", "mix", "state")] == [12] * 5
    assert len(templates - {fault.template for fault in faults}) <= 3
    assert len({fault.truth for fault in faults}) == NUMBER
    assert drawn_faults.draw(7).truth == faults[7].truth


def test_a_truth_is_one_sentence_that_ends_with_its_restrictions(faults: list[Any]) -> None:
    for fault in faults:
        assert re.fullmatch(r"[A-Z0-9](?:[^.]|\.\d)*\.", fault.truth)
        assert fault.truth.endswith(" and ".join(f"only {one.words}" for one in fault.where) + ".")


CALLS = {
    "GQA": call_of([(5, 0), (3, 40), (1, 17)], (8, 2), 16, torch.float32, "cpu"),
    "MHA": call_of([(33, 7)], (4, 4), 24, torch.float32, "cpu"),
    "MQA": call_of([(1, 9), (20, 20)], (4, 1), 64, torch.float32, "cpu"),
    "not causal": call_of([(6, 30), (9, 0)], (4, 2), 8, torch.float32, "cpu").with_spec(mask=Mask(causal=False)),
}
CALLS["head_dim of values"] = replace(CALLS["GQA"], v=CALLS["GQA"].v[..., :10])


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_without_a_fault_is_right(
    drawn_faults: ModuleType, name: str, dtype: torch.dtype, least: float
) -> None:
    call = replace(CALLS[name], **{tensor: getattr(CALLS[name], tensor).to(dtype) for tensor in "qkv"})

    out = drawn_faults.correct(call)

    assert out.dtype == dtype
    assert drawn_faults.relative_errors(out, oracle(call)).max() < least


@pytest.mark.parametrize("name", CALLS)
def test_every_fault_computes_every_call_in_its_dtype(faults: list[Any], name: str) -> None:
    call = replace(CALLS[name], **{tensor: getattr(CALLS[name], tensor).bfloat16() for tensor in "qkv"})

    for fault in faults:
        kernel = fault.kernel()
        for _ in range(3):
            out = kernel(call.clone())
            assert out.dtype == torch.bfloat16
            assert out.shape == (*call.q.shape[:2], call.v.shape[2])
            assert out.isfinite().all()
