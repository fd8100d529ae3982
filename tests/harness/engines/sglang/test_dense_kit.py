"""SGLang's own dense attention kit on backends of the plugin: MHA, GQA and MQA, extend and decode, page sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines.sglang.launch import STAND_INS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.interpreter]

CASES = 12


def run_kit(backend: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).parent / "dense_kit.py"), backend]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{STAND_INS}:{os.environ.get('PYTHONPATH', '')}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "ASSAY_DELEGATE": "torch_native",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_sage_attn_passes_every_case_at_the_kits_own_tolerance() -> None:
    cases = run_kit("sage_attn")
    assert len(cases) == CASES
    assert [case for case in cases if case["error"]] == []


def test_as_shipped_fails_exactly_where_a_prefix_is_cached() -> None:
    cases = run_kit("sage_attn_as_shipped")
    failed = {case["case"] for case in cases if case["error"]}
    extends_on_prefix = {case["case"] for case in cases if any(case["prefix"]) and "decode" not in case["case"]}
    assert failed == extends_on_prefix, cases
    assert failed
