from __future__ import annotations

import torch

from assay.harness.attention.sample_calls import GRID, grid_of


def test_a_grid_has_each_condition_in_each_layer_with_different_data() -> None:
    calls = grid_of(2, GRID, (4, 2), 8, torch.bfloat16, "cpu")
    assert [(c.layer, c.lens_q[0], c.prefixes[0]) for c in calls] == [
        (layer, *lens) for layer in range(2) for lens in GRID
    ]
    assert len(GRID) == 8
    assert len({float(c.q[0, 0, 0]) for c in calls}) > 8
