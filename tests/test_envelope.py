"""The envelope with real servers: what a kernel does only beyond short questions is seen, and what a run covered is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
KERNEL = """
from itertools import pairwise

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import oracle

@declares(phases=("extend",))
def right(call: AttentionCall):
    return oracle(call).to(call.q.dtype)

@declares(phases=("extend",))
def wrong_beyond_128(call: AttentionCall):
    out = right(call)
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        out[start + 128 : stop] = 0
    return out

def wrong_where(wrong):
    def kernel(call: AttentionCall):
        out = oracle(call).to(call.q.dtype)
        new, total = torch.tensor(call.lens_q), torch.tensor(call.lens_k)
        out[wrong(new, total - new).repeat_interleave(new)] = 0
        return out
    return kernel

wrong_for_202_to_511_cached = wrong_where(lambda new, cached: (new > 1) & (cached >= 202) & (cached <= 511))
wrong_for_more_than_130_behind_a_prefix = wrong_where(lambda new, cached: (new > 130) & (cached > 0))
wrong_for_201_to_576_in_decode = wrong_where(lambda new, cached: (new == 1) & (cached >= 200) & (cached <= 575))
"""
HOLES = ("wrong_for_202_to_511_cached", "wrong_for_more_than_130_behind_a_prefix", "wrong_for_201_to_576_in_decode")
"""Kernels that passed while a run compared the lengths of a few buckets only."""


def diffed(folder: Path, kernel: str) -> dict[str, Any]:
    (folder / "mine.py").write_text(KERNEL)
    command = [sys.executable, "-m", "assay", "run", "--suites", "layers", "--candidate", f"mine:{kernel}", "--out", "run"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(command, cwd=folder, env=environment, timeout=600, check=False)
    made: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return made


def test_a_kernel_that_is_wrong_only_beyond_128_new_tokens_is_a_regression(tmp_path: Path) -> None:
    report = diffed(tmp_path, "wrong_beyond_128")
    assert report["verdict"] == "regression", report["reasons"]
    assert {row["calls"] > 0 for row in report["envelope"]["rows"] if row["label"] == "129-512"} == {True}


@pytest.mark.parametrize("kernel", HOLES)
def test_a_kernel_that_is_wrong_between_the_lengths_of_short_questions_is_a_regression(tmp_path: Path, kernel: str) -> None:
    report = diffed(tmp_path, kernel)
    assert report["verdict"] == "regression", report["reasons"]
    assert [suite["verdict"] for suite in report["suites"] if suite["id"] == "layers"] == ["regression"]
    assert "does not write its output" in report["headline"]


def test_the_envelope_of_a_right_kernel_is_covered_and_says_what_is_not(tmp_path: Path) -> None:
    report = diffed(tmp_path, "right")
    (check,) = [check for check in report["checks"] if check["id"] == "envelope-covered"]
    assert check["status"] == "ok", check["found"]
    assert report["envelope"]["reached"]["extend"]["new-tokens"] == 256
    assert report["envelope"]["reached"]["extend"]["prefix-tokens"] >= 256
    within = [first for first, last in report["envelope"]["compared"]["extend"]["new-tokens"] if 193 < first < 255]
    assert within, "a length that the run drew"


def test_a_workload_that_cannot_see_attention_is_inconclusive(tmp_path: Path) -> None:
    """With dummy weights every answer is noise, whatever the attention."""
    command = [
        sys.executable, "-m", "assay", "run", "--suites", "accuracy", "--candidate", "torch_native", "--out", "run",
        "--questions", "24", "--engine-arg=--load-format=dummy",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=600, check=False)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (check,) = [check for check in report["checks"] if check["id"] == "workload-sensitive"]
    assert (ended.returncode, report["verdict"], check["status"]) == (3, "inconclusive", "missing")
    assert "not seen by accuracy" in check["found"]
