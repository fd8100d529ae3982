from __future__ import annotations

from typing import get_args

import pytest

from assay.harness.config import RunSpec
from assay.harness.sides import ENGINES, Device, Engine, Side, differing, flag_values, profile_of, treatment

TRITON = Side(backend="triton")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_a_reference_on_each_device_and_its_kernels_are_known(engine: Engine) -> None:
    profile = profile_of(engine)
    assert set(profile.references) == set(get_args(Device))
    assert set(profile.references.values()) <= set(profile.kernels), "a run could not show that the reference computed"


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ((), {}),
        (("--page-size=16",), {"--page-size": "16"}),
        (("--page-size", "16", "--disable-radix-cache"), {"--page-size": "16", "--disable-radix-cache": "true"}),
        (("--cuda-graph-bs", "1", "2", "4"), {"--cuda-graph-bs": "1 2 4"}),
        (("--page-size=16", "--page-size=32"), {"--page-size": "32"}),
    ],
)
def test_flags_have_values_however_they_are_spelled(flags: tuple[str, ...], values: dict[str, str]) -> None:
    assert flag_values(flags) == values


@pytest.mark.parametrize(
    ("changed", "found", "name"),
    [
        ({}, {}, ""),
        ({"backend": "mine:forward"}, {"backend": ("triton", "mine:forward")}, "mine:forward"),
        ({"model": "other"}, {"model": ("tiny", "other")}, "model=other"),
        ({"flags": ("--page-size", "16")}, {"--page-size": ("", "16")}, "--page-size=16"),
        ({"environment": {"A": "1"}}, {"environment.A": ("", "1")}, "environment.A=1"),
        ({"interpreter": "/new/python"}, {"interpreter": ("", "/new/python")}, "interpreter=/new/python"),
    ],
)
def test_a_treatment_is_what_differs_between_the_sides(
    changed: dict[str, object], found: dict[str, tuple[str, str]], name: str
) -> None:
    candidate = TRITON.model_copy(update=changed)
    assert treatment(TRITON, candidate) == found
    assert treatment(candidate, TRITON) == {setting: values[::-1] for setting, values in found.items()}
    assert differing(found) == name


def test_one_flag_is_no_treatment_in_another_spelling() -> None:
    spelled = [Side(backend="triton", flags=flags) for flags in (("--page-size=16",), ("--page-size", "16"))]
    assert treatment(*spelled) == {}


def test_flags_are_sorted_into_two_sides_that_differ_in_the_backend() -> None:
    spec = RunSpec.of(reference="triton", candidate="mine:forward", model="m", engine_arg=("--page-size=16",), questions=7)
    assert spec.reference == Side(backend="triton", model="m", flags=("--page-size=16",))
    assert spec.treatment == {"backend": ("triton", "mine:forward")}
    assert spec.workload.questions == 7


def test_sides_may_be_given_whole() -> None:
    candidate = Side(backend="triton", environment={"SGLANG_RADIX_FORCE_MISS": "1"})
    spec = RunSpec(reference=TRITON, candidate=candidate)
    assert spec.treatment == {"environment.SGLANG_RADIX_FORCE_MISS": ("", "1")}
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
