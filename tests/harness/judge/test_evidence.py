"""What the claims about a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.noise_limits import EXACT_KL
from assay.harness.judge.probe_scores import kernel_cost
from assay.harness.sides import ROLES, Engine

FLOAT32: Mapping[Engine, dict[str, Any]] = {"sglang": {"dtype": "float32"}, "vllm": {"model_config": {"dtype": "torch.float32"}}}


@pytest.mark.parametrize(
    ("kinds", "other", "dtype"),
    [
        (("sglang", "sglang"), {}, "float32"),
        (("sglang", "vllm"), {}, "float32"),
        (("vllm", "vllm"), {"model_config": {"dtype": "torch.bfloat16"}}, ""),
    ],
)
def test_a_dtype_of_both_sides_decides_what_another_kernel_costs(
    tmp_path: Path, runs: ModuleType, kinds: tuple[Engine, Engine], other: dict[str, Any], dtype: str
) -> None:
    servers = {
        role: ServerManifest(
            role=role, backend="", engine="", kind=kind, claimed_phases=(), launch_command="", startup_s=1.0,
            arguments=other if other and role == "candidate" else FLOAT32[kind],
        )
        for role, kind in zip(ROLES, kinds, strict=True)
    }  # fmt: skip
    specs = runs.spec_of(), runs.spec_of("torch_native", candidate_arg=("--page-size=16",))
    backend, flag = (
        replace(RunEvidence.of(runs.run_of(tmp_path / str(number), spec)), servers=servers) for number, spec in enumerate(specs)
    )
    assert (backend.dtype, flag.dtype) == (dtype, dtype)
    assert (backend.honest_kl, flag.honest_kl) == (EXACT_KL, kernel_cost(dtype)), "a shadow compares layers of another backend"
