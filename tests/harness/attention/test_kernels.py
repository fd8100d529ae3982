from __future__ import annotations

import pytest

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.oracle import oracle


def test_published_kernels_can_be_loaded() -> None:
    assert {"sage_attn", "sage_attn_as_shipped"} <= set(kernels.published())
    assert kernels.declaration(kernels.load("sage_attn")).phases == ("extend",)


def test_a_path_is_loaded_and_declares_every_phase() -> None:
    found = kernels.load("assay.harness.attention.oracle:oracle")
    assert found is oracle
    assert kernels.declaration(found).phases == ("extend", "decode")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_kernel", "published are .*sage_attn"),
        ("no.such.module:kernel", "cannot be imported"),
        ("assay.harness.attention.oracle:no_such_function", "cannot be imported"),
        ("assay.harness.attention.published:GROUP", "expected a function"),
    ],
)
def test_a_missing_kernel_is_refused(name: str, says: str) -> None:
    with pytest.raises(KernelRefused, match=says):
        kernels.load(name)


def test_an_unknown_phase_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="prefill"):
        kernels.declares(phases=("prefill",))


def test_a_path_is_not_a_url() -> None:
    assert kernels.is_path("mine.attn:forward")
    assert not kernels.is_path("http://127.0.0.1:30000")
    assert not kernels.is_path("triton")


def test_titles_name_the_package_and_the_interpreter() -> None:
    sage = kernels.load("sage_attn")
    assert kernels.title("sage_attn", sage, interpreted=True) == "sageattention 1.0.6 (Triton interpreter)"

    def mine(call: AttentionCall) -> object:
        return call

    assert kernels.title("mine:mine", mine, interpreted=True) == "mine:mine"  # type: ignore[arg-type]
