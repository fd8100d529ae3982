"""Errors seen in the candidate's own server, as if the reference's had run the candidate in its shadow."""

from __future__ import annotations

import math

import pytest
import torch

from assay.harness.engines.inside.shadow import LayerSums
from assay.harness.evidence.error_table import condition_numbers, relative_l1
from assay.harness.evidence.layer_diff_record import with_roles_exchanged
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader


@pytest.mark.parametrize(("claimed", "errors"), [("extend", {0.0, math.inf}), ("decode", set())])
def test_a_nonfinite_output_of_its_own_server_is_the_candidates(claimed: str, errors: set[float]) -> None:
    served, shadow = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    served[1] = float("nan")
    sums = LayerSums(heads=1, device=torch.device("cpu"))
    sums.measure(shadow, served, torch.from_numpy(condition_numbers("extend", [1, 1], [0, 16])))
    header = ShadowHeader(reference="mine", candidate="torch_native", phases=("extend", "decode"))
    seen = with_roles_exchanged(ShadowErrors(sums.cells(layer=0, first_head=0), (header,)), (claimed,))
    assert (seen.headers[0].reference, seen.headers[0].candidate) == ("torch_native", "mine")
    own = relative_l1(seen.cells.distance(("layer", "phase", "prefix"))).ravel()
    assert {float(error) for error in own if not math.isnan(error)} == errors
