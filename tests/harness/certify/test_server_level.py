"""What a certificate with servers takes from recorded calls; the servers themselves are in test_server_level_server.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import TORCH_SDPA
from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.certify.kernel import CertifiedKernel, certified_kernel
from assay.harness.certify.op_level import OpLevel, honest
from assay.harness.certify.op_tasks import op_envelope
from assay.harness.certify.pins import is_named
from assay.harness.certify.server_level import _effect_of, _findings_of, certified_spec
from assay.harness.collect.plan import prepare
from assay.harness.collect.run_folder import open_folder
from assay.harness.evidence.certificate import HIDDEN


@pytest.fixture(scope="module")
def recorded() -> list[AttentionCall]:
    """Calls as a run records them: of each layer and phase, with and without a cached prefix, alone and in a batch."""
    made = []
    for layer in range(4):
        for lens in ([(40, 0)], [(30, 54)], [(29, 54), (33, 54), (21, 0)]):
            made.append(call_of(lens, (4, 2), 64, torch.float32, "cpu", seed=layer).with_spec(layer=layer))
        for lens in ([(1, 80)], [(1, 80), (1, 91), (1, 20)]):
            made.append(call_of(lens, (4, 2), 64, torch.float32, "cpu", seed=9 + layer).with_spec(layer=layer, phase="decode"))
    return made


@pytest.mark.few(3)
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
def test_a_fault_is_named_on_the_calls_that_the_run_recorded(recorded: list[AttentionCall], id: str, named: bool | None) -> None:
    assert is_named(CATALOGUE[id], _findings_of(CATALOGUE[id], CertifiedKernel(), recorded)) is named


@pytest.mark.slow
def test_a_fault_in_a_kernel_that_quantises_is_named_on_recorded_calls(recorded: list[AttentionCall]) -> None:
    fault = CATALOGUE["mask-top-left-layer-2"]
    kernel = CertifiedKernel(honest("int8_qk", 1), "mine:int8")
    assert [(one.id, one.where.startswith("extend, ")) for one in _findings_of(fault, kernel, recorded)] == [
        ("mask-top-left", False)
    ]


def test_a_fault_that_is_missed_is_measured_on_recorded_calls(recorded: list[AttentionCall]) -> None:
    small, large = (_effect_of(CATALOGUE[id], recorded, "int8_qk") for id in ("accumulator-fp16", "scale-doubled"))
    assert small is not None
    assert large is not None
    assert 0 < small <= HIDDEN < large


def test_the_run_of_a_certificate_has_the_kernel_as_its_candidate() -> None:
    assert certified_spec("cpu", "tiny", CertifiedKernel()).candidate.backend == TORCH_SDPA
    assert certified_spec("cpu", "tiny", CertifiedKernel(honest("int8_qk", 1), "mine:int8")).candidate.backend == "mine:int8"


def test_a_run_records_the_noise_family_under_the_name_that_the_certificate_has(tmp_path: Path) -> None:
    kernel = certified_kernel("sage_attn")
    run = open_folder(prepare(certified_spec("cpu", "tiny", kernel)), tmp_path / "run").manifest()
    assert run.noise["candidate"] == op_envelope(OpLevel(kernel=kernel)).noise == "int8_qk"
