from __future__ import annotations

import pytest

from assay.harness.engines.catalog import delegate_of


@pytest.mark.parametrize(
    ("reference", "computes"),
    [("torch_native", "torch_native"), ("triton", "triton"), ("http://127.0.0.1:1/v1", ""), ("sage_attn", "")],
)
def test_what_a_kernel_leaves_is_never_left_to_a_kernel(reference: str, computes: str) -> None:
    assert delegate_of(reference) == computes
