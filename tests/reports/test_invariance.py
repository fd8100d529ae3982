"""The document of features that should not affect outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.reports.document import Document
from assay.reports.invariance import invariance_document

ONE, BOTH = ("page-size",), ("page-size", "prefix-cache")
REFERENCE = {"model": "tiny", "flags": (), "environment": {"KEY": "secret"}, "interpreter": "/other/python"}


@pytest.mark.parametrize("name", ["pass", "unended", "regression", "unsteady"])
def test_a_comparison_of_features_is_what_it_was(
    golden: Callable[[str, Document], None], arm_records: ModuleType, tmp_path: Path, name: str
) -> None:
    """A pass, one that ended early, two sets that break, and one that differs at times."""
    arm = arm_records.arm
    made: dict[str, tuple[Any, ...]] = {
        "pass": ([arm("prefix-cache"), arm(*ONE, number=3)], {"arms": (("prefix-cache",), ONE)}),
        "unended": ([arm("prefix-cache")], {"ended": False}),
        "regression": ([arm(*ONE), arm(*BOTH, number=3, decode=0.8), arm(*BOTH, "order", number=4, decode=0.8),
                        arm("batch", number=5, decode=0.8)], {"spec": {"device": "cpu", "reference": REFERENCE}}),
        "unsteady": ([arm(*ONE, decode=0.8), arm(*ONE, number=3, why="asked again")], {"arms": (ONE,)}),
    }  # fmt: skip
    folder = InvarianceFolder.new(tmp_path / "out")
    records, manifest = made[name]
    arm_records.write(folder, records, **manifest)
    result = judge_invariance(folder)
    document = invariance_document(result)
    assert InvarianceResult.model_validate_json(document.json(result)) == result
    golden(f"invariance-{name}", document)
