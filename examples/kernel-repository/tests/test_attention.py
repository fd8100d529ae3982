"""The kernel against assay's oracle: on the complete op-level matrix, and case by case."""

from __future__ import annotations

import pytest


def test_forward_is_correct(assay):
    assay.check("fastattn.attention:forward")


@pytest.mark.assay_kernel("fastattn.attention:forward", phases=["extend"], dtypes=["bfloat16"])
def test_each_extend_call_in_bfloat16(assay_case):
    assay_case.check()
