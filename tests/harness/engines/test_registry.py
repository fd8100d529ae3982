"""Each engine's package has what the registry promises neutral rooms."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from assay.harness.attention.noise import FAMILIES, family
from assay.harness.engines import launch, registry
from assay.harness.engines.launched import LaunchedServer
from assay.harness.errors import UsageError
from assay.harness.evidence.manifest import engine_label, engine_of
from assay.harness.sides import ENGINES, Engine, profile_of


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        (registry.Arguments, "arguments"), (launch.Launching, "launch"),
    ],
)  # fmt: skip
def test_a_module_has_every_member_with_the_parameters_of_its_protocol(engine: Engine, protocol: Any, name: str) -> None:
    module = registry.module(engine, name)
    members = [*inspect.getmembers(protocol, inspect.isfunction), *((each, None) for each in protocol.__annotations__)]
    asked = [(member, function) for member, function in members if not member.startswith("_")]
    assert asked
    for member, function in asked:
        own = getattr(module, member)
        if function is not None:
            parameters = [*inspect.signature(function).parameters][1:]
            assert [*inspect.signature(own).parameters] == parameters, f"{engine}.{name}.{member}"


def test_a_witness_has_neither_features_nor_kernels() -> None:
    assert [engine for engine in ENGINES if not profile_of(engine).instrumented] == ["hf"]
    for find in (registry.features, registry.native_kernels):
        with pytest.raises(UsageError, match="transformers as an engine has no"):
            find("hf")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_is_one_that_assay_starts_and_its_profile_names_its_reference(engine: Engine) -> None:
    assert issubclass(registry.module(engine, "server").SERVER, LaunchedServer)
    profile = profile_of(engine)
    assert profile.references["cpu"] in profile.cpu_backends
    assert set(profile.cpu_backends) <= set(registry.backends(engine))


@pytest.mark.parametrize(
    ("engine", "names", "phase", "stored", "expected"),
    [
        ("sglang", ("triton",), "extend", False, ""),
        ("sglang", ("flashinfer",), "extend", False, "merged_prefix"),
        ("sglang", ("flashinfer", "triton"), "extend", False, "merged_prefix"),
        ("sglang", ("flashinfer",), "decode", False, ""),
        ("sglang", ("triton",), "decode", True, "fp8_qp"),
        ("vllm", ("CPU_ATTN",), "decode", True, ""),
        ("vllm", ("CPU_ATTN", "FLASH_ATTN"), "decode", True, "fp8_qp"),
    ],
)
def test_backends_that_merge_the_prefix_have_its_noise_in_prefill(
    engine: Engine, names: tuple[str, ...], phase: str, stored: bool, expected: str
) -> None:
    assert registry.native_noise(engine, names, phase, stored) == expected


def test_both_noises_are_one_family() -> None:
    assert family(registry.native_noise("sglang", ("flashinfer",), "extend", True)) == replace(FAMILIES["fp8_qp"], merged=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_label_names_its_engine(engine: Engine) -> None:
    assert engine_of(engine_label(engine, "1.2", "cpu")) == engine
