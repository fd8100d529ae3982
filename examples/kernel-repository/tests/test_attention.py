"""The kernel against assay's oracle, on the complete op-level matrix."""

from __future__ import annotations


def test_forward_is_correct(assay):
    assay.check("fastattn.attention:forward")
