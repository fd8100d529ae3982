"""Commands that run a kernel, in real processes: only a command that came to its end decides about the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.evidence.pack import Source

KERNELS = """
import ctypes, os, sys
from assay import KernelRefused
from assay.harness.attention.bugs.faults import rounded_oracle

def exits(call):
    os._exit(0)

def crashes(call):
    ctypes.string_at(0)

class Leaves:
    assay = property(lambda self: sys.exit(0))

    def __call__(self, call):
        return rounded_oracle(call)

leaves = Leaves()

def is_read():
    frame = sys._getframe()
    while frame and not frame.f_globals["__name__"].startswith("assay.harness.readout."):
        frame = frame.f_back
    return frame is not None

def hangs_when_it_is_read(call):
    if is_read():
        print("hanging", flush=True)
        ctypes.CDLL(None).sleep(600)
    if call.k.shape[0] != 17:  # so that its condition takes no time to find
        raise KernelRefused("takes 17 keys")
    return rounded_oracle(call) * 2

def exits_when_it_is_shrunk(call):
    return os._exit(0) if call.q.shape[1] == 1 else rounded_oracle(call) * 2
"""
SOME = ("--phase", "decode", "--dtype", "float32", "--case", "1+16-")
NO_VERDICT = "The process that ran the kernel {} before its work was done; there is no verdict."


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def assay(python: Run) -> Run:
    """A function that runs a command of assay in a folder with these kernels, in a process of its own."""

    def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        (folder / "ending_kernels.py").write_text(KERNELS)
        return python("-m", "assay", *arguments, cwd=folder, timeout=120)

    return run


def pack(folder: Path) -> Path:
    """A replay pack of one call."""
    writer = PackWriter(folder, Source(engine="e", model="m", model_hash="h", reference="r", candidate="c"), 10**7)
    call = call_of([(4, 20)], (2, 1), 64, torch.float32, "cpu")
    writer.add(call, rounded_oracle(call), candidate=rounded_oracle(call))
    writer.flush()
    return folder


def test_a_kernel_that_exits_with_0_does_not_pass(assay: Run, tmp_path: Path) -> None:
    done = assay(tmp_path, "check", "ending_kernels:exits", *SOME)
    assert done.returncode == 3
    assert "The process that ran the kernel exited with status 0 before its work was done" in done.stderr
    assert "the process of the kernel exited with status 0 in layer 0 decode, new+prefix 1+" in done.stdout
    assert "What to do" in done.stderr


def test_a_kernel_that_crashes_is_no_verdict_and_its_stack_is_shown(assay: Run, tmp_path: Path) -> None:
    done = assay(tmp_path, "check", "ending_kernels:crashes", *SOME)
    assert done.returncode == 3
    assert "the process of the kernel was killed by SIGSEGV in layer 0 decode, new+prefix 1+" in done.stdout
    assert "0 of " in done.stdout
    assert 'ending_kernels.py", line 10 in crashes' in done.stderr


def test_a_kernel_that_exits_on_recorded_calls_does_not_pass(assay: Run, tmp_path: Path) -> None:
    done = assay(tmp_path, "replay", str(pack(tmp_path / "pack")), "--candidate", "ending_kernels:exits")
    assert done.returncode == 3, done.stderr
    assert NO_VERDICT.format("exited with status 0") in done.stderr


def test_a_kernel_that_exits_while_a_recorded_call_is_shrunk_stays_wrong(assay: Run, tmp_path: Path) -> None:
    done = assay(tmp_path, "replay", str(pack(tmp_path / "pack")), "--candidate", "ending_kernels:exits_when_it_is_shrunk")
    assert done.returncode == 1, done.stderr
    assert "exited with status 0 before its work was done; its findings up to then are above" in done.stderr
    assert "1 of 1 recorded call" in done.stdout


def test_sys_exit_where_no_guard_expects_it_does_not_pass(assay: Run, tmp_path: Path) -> None:
    done = assay(tmp_path, "check", "ending_kernels:leaves", *SOME)
    assert done.returncode == 3
    assert NO_VERDICT.format("raised SystemExit: 0") in done.stderr


@pytest.mark.slow  # fast: test_ctrl_c_does_not_wait_for_the_kernel
def test_ctrl_c_ends_a_kernel_that_hangs_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "ending_kernels.py").write_text(KERNELS)
    command = [sys.executable, "-m", "assay", "check", "ending_kernels:hangs_when_it_is_read", *SOME]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stderr is not None
        while "hanging" not in process.stderr.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "interrupted; there is no verdict" in said
