from __future__ import annotations

from dataclasses import replace

import pytest

from assay.harness.attention.noise import FAMILIES, family
from assay.harness.engines.sglang.catalog import native_noise


@pytest.mark.parametrize(
    ("names", "phase", "stored", "expected"),
    [
        (("triton",), "extend", False, ""),
        (("flashinfer",), "extend", False, "merged_prefix"),
        (("flashinfer", "triton"), "extend", False, "merged_prefix"),
        (("flashinfer",), "decode", False, ""),
        (("triton",), "decode", True, "fp8_qp"),
    ],
)
def test_backends_that_merge_the_prefix_have_its_noise_in_prefill(
    names: tuple[str, ...], phase: str, stored: bool, expected: str
) -> None:
    assert native_noise(names, phase, stored) == expected


def test_both_noises_are_one_family() -> None:
    assert family(native_noise(("flashinfer",), "extend", True)) == replace(FAMILIES["fp8_qp"], merged=True)
