"""Candidates that do not return an attention output, in real servers: none passes, and each ends with a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
KERNELS = '''
import ctypes, os, sys, time
import torch
from assay.harness.attention.oracle import oracle

def right(call):
    return oracle(call).to(call.q.dtype)

def later(call):
    """Whether the server has answered its warm-up."""
    later.calls = getattr(later, "calls", 0) + 1
    return later.calls > 60

def exits(call):
    if later(call):
        os._exit(0)
    return right(call)

def leaves(call):
    if later(call):
        sys.exit(0)
    return right(call)

def crashes(call):
    if later(call):
        ctypes.string_at(0)
    return right(call)

def hangs(call):
    if later(call):
        time.sleep(600)
    return right(call)

def prints(call):
    print("x" * 1_000_000, "\\x1b[31m", flush=True)
    return right(call)

def is_nan(call):
    return right(call) * float("nan")

def mutates(call):
    out = right(call)
    call.q.zero_()
    call.k.zero_()
    return out
'''

ENDS = {"exits", "leaves", "crashes", "hangs"}
"""What ends a server, or its answers. What `prints` is right, and `mutates` changes copies of what the model uses."""
HARMLESS = {"prints", "mutates"}


@pytest.mark.parametrize("kernel", sorted(ENDS | HARMLESS | {"is_nan"}))
def test_a_hostile_kernel_is_no_pass(tmp_path: Path, kernel: str) -> None:
    (tmp_path / "hostile_kernels.py").write_text(KERNELS)
    (tmp_path / "assay.toml").write_text("[run]\nrequest_timeout = 20\n")
    command = [
        sys.executable, "-m", "assay", "run", "--out", str(tmp_path / "run"), "--candidate", f"hostile_kernels:{kernel}",
        "--questions", "48", "--suites", "accuracy", "--margin", "0.1",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550, check=False)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["exit_code"] == done.returncode
    if kernel in ENDS:
        assert report["verdict"] == "error"
    elif kernel not in HARMLESS:
        assert report["verdict"] != "pass"
    assert "\x1b[31m" not in done.stdout
    assert [p.pid for p in psutil.process_iter() if str(tmp_path) in _evidence(p)] == []


def _evidence(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("ASSAY_EVIDENCE", ""))
    except psutil.Error:
        return ""
