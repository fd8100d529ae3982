"""What a pass asks of the layer suite: every layer, with a cached prefix, and no call that the candidate did not compute."""

from __future__ import annotations

import numpy as np
import pytest

from assay.harness.conditions import CACHED_PREFIX, PHASES
from assay.harness.evidence.error_sums import SUMS
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors, ShadowHeader
from assay.harness.judge import checks

ASKED = ("mmlu", "layers")


def cells(layers: list[int], prefix: str = ">= 16", phase: str = "extend", failed: bool = False) -> ShadowErrors:
    index = np.array([[n, 0, PHASES.index(phase), CACHED_PREFIX.labels.index(prefix), 0, 0] for n in layers], np.int64)
    error = (FailedCalls(layer=0, phase="extend", calls=2, text="it raised"),) if failed else ()
    legend = ShadowHeader(reference="r", candidate="c", phases=("extend",), failed=error)
    return ShadowErrors(index.reshape(-1, 6), np.ones((len(layers), len(SUMS))), np.ones(len(layers)), (legend,))


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (cells([0, 1, 2, 3]), "ok"),
        (cells([0, 1, 3]), "missing"),
        (cells([]), "missing"),
        (cells([0, 1, 2, 3], phase="decode"), "missing"),
        (cells([0, 1, 2, 3], failed=True), "failed"),
        (None, "missing"),
    ],
)
def test_every_layer_in_a_phase_that_the_candidate_claims(seen: ShadowErrors | None, status: str) -> None:
    assert checks.check_layers(ASKED, seen, ("extend",), range(4)).status == status


def test_layers_that_were_not_asked_for_are_not_checked() -> None:
    assert checks.check_layers(("mmlu",), None, ("extend",), range(4)).status == "not checked"


@pytest.mark.parametrize(
    ("prefix", "status"), [(">= 16", "ok"), ("2-15", "missing"), ("1", "missing"), ("0", "missing")]
)
def test_a_cached_prefix_was_met_in_the_layer_diff(prefix: str, status: str) -> None:
    assert checks.check_cached_prefix_of_layers(cells([0], prefix)).status == status


def test_no_cell_is_no_cached_prefix() -> None:
    assert checks.check_cached_prefix_of_layers(cells([])).status == "missing"
