"""The reduction on the device, compared with a direct computation in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.conditions import CACHED_PREFIX, POSITION
from assay.harness.engines.inside.reduction import LayerSums
from assay.harness.evidence.error_table import DISTANCE, ErrorTable, condition_numbers, elements, relative_l1

HEADS, DIM = 3, 16
LENS = ([3, 20, 2], [0, 1, 40])
ROWS = {("0", "0"): [0], ("0", "1-15"): [1, 2], ("1", "0"): [3], ("1", "1-15"): list(range(4, 19)),
        ("1", "16-63"): list(range(19, 23)), (">= 16", "0"): [23], (">= 16", "1-15"): [24]}  # fmt: skip


def outputs(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    noise = 0.1 * torch.randn(rows, HEADS, DIM, generator=generator)
    return (reference.float() + noise).to(dtype), reference


def cells_of(
    calls: list[tuple[Tensor, Tensor]], new: list[int], prefix: list[int], layer: int = 0, first_head: int = 0
) -> ErrorTable:
    sums = LayerSums(HEADS, torch.device("cpu"))
    for out, reference in calls:
        sums.measure(out, reference, torch.from_numpy(condition_numbers("extend", new, prefix)))
    return sums.cells(layer, first_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cell_agrees_with_float64(dtype: torch.dtype) -> None:
    calls = [outputs(25, 1, dtype), outputs(25, 2, dtype)]
    sums = cells_of(calls, *LENS, layer=5, first_head=HEADS).distance(("prefix", "position", "head"), {"phase": "extend"})
    found, counted = relative_l1(sums), elements(sums)
    assert np.isnan(found[..., :HEADS]).all(), "heads of a later process have numbers of their own"
    for i, prefix in enumerate(CACHED_PREFIX.labels):
        for j, position in enumerate(POSITION.labels):
            for head in range(HEADS):
                rows = ROWS.get((prefix, position), [])
                a, b = (torch.cat([pair[side][rows, head] for pair in calls]).double() for side in (0, 1))
                assert counted[i, j, HEADS + head] == a.numel()
                if rows:
                    error = float((a - b).abs().sum() / b.abs().sum())
                    assert found[i, j, HEADS + head] == pytest.approx(error, rel=1e-5)


def test_elements_that_are_not_finite_are_counted_and_the_worst_query_has_one() -> None:
    out, reference = outputs(4, 3)
    out[1, 0, :4] = torch.nan
    reference[3, 2, 0] = torch.inf
    out[3, 2, 0] = torch.inf
    sums = cells_of([(out, reference)], [4], [0]).distance(("head",))
    assert sums[:, DISTANCE.index("nonfinite")].tolist() == [4, 0, 0]
    assert elements(sums).tolist() == [64, 64, 63]
    assert np.isinf(relative_l1(sums)).tolist() == [True, False, False]
    (worst, at), _ = LayerSums(HEADS, torch.device("cpu")).measure(out, reference, torch.zeros(4, dtype=torch.int64))
    assert (float(worst), int(at)) == (float("inf"), HEADS)
