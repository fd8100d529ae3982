"""The reduction on the device, compared with a direct computation in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader, condition_numbers
from assay.harness.server.reduction import LayerSums, row_errors

HEADS, DIM = 3, 16
HEADER = ShadowHeader(reference="r", candidate="c", phases=("extend",))


def outputs(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    noise = 0.1 * torch.randn(rows, HEADS, DIM, generator=generator)
    return (reference.float() + noise).to(dtype), reference


def directly(out: Tensor, reference: Tensor) -> float:
    """Relative L1 in float64."""
    a, b = out.double().flatten(), reference.double().flatten()
    return float((a - b).abs().sum() / b.abs().sum())


def cells_of(calls: list[tuple[str, list[int], list[int], Tensor, Tensor]], layer: int = 0, first_head: int = 0) -> ShadowErrors:
    sums = LayerSums(HEADS, torch.device("cpu"))
    for phase, new, prefix, out, reference in calls:
        sums.add(row_errors(out, reference)[0], torch.from_numpy(condition_numbers(phase, new, prefix)))
    return ShadowErrors(*sums.cells(layer, first_head), (HEADER,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cell_agrees_with_float64(dtype: torch.dtype) -> None:
    lens = [(3, 0), (20, 1), (2, 40)]
    new, prefix = [n for n, _ in lens], [p for _, p in lens]
    first, second = outputs(25, 1, dtype), outputs(25, 2, dtype)
    cells = cells_of([("extend", new, prefix, *first), ("extend", new, prefix, *second)])
    table = cells.table(by=("prefix", "position", "head"), where={"phase": "extend"})
    rows = {("0", "0"): [0], ("0", "1-15"): [1, 2], ("1", "0"): [3], ("1", "1-15"): list(range(4, 19)),
            ("1", "16-63"): list(range(19, 23)), (">= 16", "0"): [23], (">= 16", "1-15"): [24]}  # fmt: skip
    for i, prefix_label in enumerate(table.axes["prefix"]):
        for j, position in enumerate(table.axes["position"]):
            where = rows.get((prefix_label, position))
            for head in range(HEADS):
                if where is None:
                    assert np.isnan(table.relative_l1[i, j, head])
                    assert np.isnan(table.nonfinite_share[i, j, head])
                    continue
                out, reference = (torch.cat([pair[side][where, head] for pair in (first, second)]) for side in (0, 1))
                assert table.relative_l1[i, j, head] == pytest.approx(directly(out, reference), rel=1e-5)
                assert table.nonfinite_share[i, j, head] == 0
                assert table.elements[i, j, head] == out.numel()


def test_nonfinite_elements_are_counted_and_left_out() -> None:
    out, reference = outputs(4, 3)
    out[1, 0, :4] = torch.nan
    out[2, 1, 5] = -torch.inf
    reference[3, 2, 0] = torch.inf
    out[3, 2, 0] = torch.inf
    table = cells_of([("extend", [4], [0], out, reference)]).table(by=("head",))
    assert table.nonfinite_share.tolist() == pytest.approx([4 / 64, 1 / 64, 0.0])
    assert table.elements.tolist() == [64, 64, 63]
    kept = out[:, 0].isfinite()
    assert table.relative_l1[0] == pytest.approx(directly(out[:, 0][kept], reference[:, 0][kept]))


def test_a_candidate_without_a_finite_element_has_no_finite_distance() -> None:
    _, reference = outputs(2, 4)
    table = cells_of([("extend", [2], [0], torch.full_like(reference, torch.nan), reference)]).table(by=("head",))
    assert table.nonfinite_share.tolist() == [1.0] * HEADS
    assert np.isinf(table.relative_l1).all()


def test_the_worst_row_is_infinite_where_the_candidate_is_not_finite() -> None:
    out, reference = outputs(3, 5)
    out[1, 2, 0] = torch.nan
    _, relative = row_errors(out, reference)
    assert (relative == torch.inf).nonzero().tolist() == [[1, 2]]
    assert row_errors(reference, reference)[1].max() == 0


def test_heads_of_a_later_process_get_their_own_numbers() -> None:
    cells = cells_of([("extend", [2], [0], *outputs(2, 6))], layer=5, first_head=HEADS)
    assert cells.observed("head") == ("3", "4", "5")
    assert cells.observed("layer") == ("5",)
