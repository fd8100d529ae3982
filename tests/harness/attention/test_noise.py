from __future__ import annotations

from dataclasses import replace

import pytest

from assay.harness.attention.declaration import declaration, declares
from assay.harness.attention.noise import FAMILIES, NoiseFamily, Quantised, family


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_stands_for_one_family(name: str) -> None:
    assert family(name).name == name


def test_a_composition_is_found_again_by_its_parts() -> None:
    own = NoiseFamily(k=Quantised("int8", "token", smooth=True), v=Quantised("e5m2", "head"), accumulation="fp16")
    assert own.name == "k:int8-token-smooth,v:e5m2-head,accumulation:fp16"
    assert family(own.name) == own
    assert family("v:e4m3-tensor,k:e4m3-tensor").name == "fp8_kv"


@pytest.mark.parametrize("name", ["int4", "k:int3", "k:int8-row", "w:int8", "k:int8-token-head", "accumulation:bf16", ","])
def test_what_is_no_family_is_refused_with_the_ones_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"int8_qk.*k:int8-token"):
        family(name)


def test_only_k_can_be_smoothed() -> None:
    with pytest.raises(ValueError, match="smoothed"):
        NoiseFamily(v=Quantised("int8", "block", smooth=True))


def test_16_bits_are_no_quantisation() -> None:
    assert not replace(FAMILIES["tf32"], v=Quantised("fp16")).quantises
    assert FAMILIES["int8_qk"].quantises


def test_a_kernel_declares_a_name_or_a_composition() -> None:
    named = declares(noise="fp8_kv")(lambda call: call.q)
    composed = declares(noise=NoiseFamily(k=Quantised("e4m3", "tensor"), v=Quantised("e4m3", "tensor")))(lambda call: call.q)
    assert declaration(named).noise == declaration(composed).noise == "fp8_kv"
    with pytest.raises(ValueError, match="int4"):
        declares(noise="int4")


@pytest.mark.parametrize("given", [{"head_dims": ()}, {"dtypes": ()}, {"dtypes": "float16"}])
def test_a_kernel_declares_at_least_one_value_of_what_it_restricts(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        declares(**given)  # type: ignore[arg-type]
