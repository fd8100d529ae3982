"""The sums of a layer's errors compared with float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.conditions import CACHED_PREFIX, POSITION
from assay.harness.engines.inside.shadow import LayerSums
from assay.harness.evidence.error_table import DISTANCE, ErrorTable, condition_numbers, elements, relative_l1
from assay.harness.stats import error_sums

HEADS, DIM = 3, 16
LENS = ([3, 20, 2], [0, 1, 40])
ROWS = {("0", "0"): [0], ("0", "1-15"): [1, 2], ("1", "0"): [3], ("1", "1-15"): list(range(4, 19)),
        ("1", "16-63"): list(range(19, 23)), (">= 16", "0"): [23], (">= 16", "1-15"): [24]}  # fmt: skip


def outputs(dtype: torch.dtype, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """An output and the reference's."""
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(rows, HEADS, DIM, generator=generator)
    return (reference + 0.1 * torch.randn(reference.shape, generator=generator)).to(dtype), reference.to(dtype)


def cells_of(
    calls: list[tuple[Tensor, Tensor]], new: list[int], prefix: list[int], layer: int = 0, first_head: int = 0
) -> ErrorTable:
    sums = LayerSums(HEADS, torch.device("cpu"))
    for out, reference in calls:
        sums.measure(out, reference, torch.from_numpy(condition_numbers("extend", new, prefix)))
    return sums.cells(layer, first_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cell_agrees_with_float64(dtype: torch.dtype) -> None:
    calls = [outputs(dtype, 25, seed) for seed in (1, 2)]
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
    out, reference = outputs(torch.float32, 4, 3)
    out[1, 0, :4] = torch.nan
    reference[3, 2, 0] = torch.inf
    out[3, 2, 0] = torch.inf
    sums = cells_of([(out, reference)], [4], [0]).distance(("head",))
    assert sums[:, DISTANCE.index("nonfinite")].tolist() == [4, 0, 0]
    assert elements(sums).tolist() == [64, 64, 63]
    assert np.isinf(relative_l1(sums)).tolist() == [True, False, False]
    (worst, at), _ = LayerSums(HEADS, torch.device("cpu")).measure(out, reference, torch.zeros(4, dtype=torch.int64))
    assert (float(worst), int(at)) == (float("inf"), HEADS)


def test_outputs_that_are_reduced_in_parts_have_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    out, reference = outputs(torch.float32, 25, 4)
    whole = error_sums.query_sums(torch.stack([out, -out]), reference)
    monkeypatch.setattr(error_sums, "_AT_ONCE", 4 * HEADS * DIM)
    assert torch.equal(error_sums.query_sums(torch.stack([out, -out]), reference), whole)
