from __future__ import annotations

import sys

import pytest

from assay.harness.backend import Backend


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("torch_native", "native", ""),
        ("http://127.0.0.1:1/v1", "url", ""),
        ("https://example.org", "url", ""),
        ("sage_attn", "kernel", ""),
        ("mine.attn:forward", "kernel", "mine.attn:forward"),
    ],
)
def test_a_backend_is_parsed_without_importing_its_kernel(name: str, kind: str, path: str) -> None:
    backend = Backend.parse(name)
    assert (backend.name, backend.kind, backend.path) == (name, kind, path)
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("reference", "delegate"),
    [("torch_native", "torch_native"), ("triton", "triton"), ("http://127.0.0.1:1/v1", ""), ("sage_attn", "")],
)
def test_no_phase_is_delegated_to_a_kernel(reference: str, delegate: str) -> None:
    assert Backend.parse(reference).delegate == delegate


def test_phases_and_noise_are_those_that_a_kernel_declares() -> None:
    assert [(b.phases, b.noise) for b in map(Backend.parse, ("sage_attn", "triton", "http://127.0.0.1:1"))] == [
        (("extend",), "int8_qk"),
        (("extend", "decode"), ""),
        ((), ""),
    ]
