"""What a certificate with servers takes from recorded calls; the servers themselves are in test_server_level_server.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.faults import CATALOGUE
from assay.harness.attention.sample_calls import call_of
from assay.harness.certify.pins import is_named
from assay.harness.certify.server_level import findings_of


@pytest.fixture(scope="module")
def recorded() -> list[AttentionCall]:
    """Calls as a run records them: of each layer and phase, with and without a cached prefix, alone and in a batch."""
    made = []
    for layer in range(4):
        for lens in ([(40, 0)], [(30, 54)], [(29, 54), (33, 54), (21, 0)]):
            made.append(replace(call_of(lens, (4, 2), 64, torch.float32, "cpu", seed=layer), layer=layer))
        for lens in ([(1, 80)], [(1, 80), (1, 91), (1, 20)]):
            made.append(
                replace(call_of(lens, (4, 2), 64, torch.float32, "cpu", seed=9 + layer), layer=layer, phase="decode")
            )
    return made


@pytest.mark.parametrize(
    ("id", "named"),
    [
        ("mask-top-left", True),
        ("mask-top-left-layer-2", True),
        ("leak-values-next", True),
        ("wrong-from-call-8", True),
        ("layer-2-zero", None),
        ("sliding-window-2048", False),
    ],
)
def test_a_fault_is_named_on_the_calls_that_the_run_recorded(
    recorded: list[AttentionCall], id: str, named: bool | None
) -> None:
    assert is_named(CATALOGUE[id], findings_of(CATALOGUE[id], recorded)) is named
