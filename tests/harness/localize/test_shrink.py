from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.faults import fault, rounded_oracle
from assay.harness.attention.sage import sage_attn_as_shipped
from assay.harness.attention.sample_calls import call_of
from assay.harness.errors import AssayError
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import run_kernel
from assay.harness.localize.shrink import as_pytest, out_of_bounds, shrink

CALL = call_of([(40, 30), (26, 60), (9, 0)], (4, 2), 32, torch.float32, "cpu")
SEED = "assay.harness.attention.sage:sage_attn_as_shipped"
ORACLE = "assay.harness.attention.faults:rounded_oracle"


def test_the_smallest_call_that_still_fails() -> None:
    kernel = fault("mask-top-left")
    small = shrink(kernel, CALL)
    assert (small.lens_q, small.prefixes) == ([1], [1])  # below that the bug cannot show
    assert (small.q.shape, small.k.shape) == ((1, 1, 8), (2, 1, 8))
    assert small.scale == 8**-0.5
    assert out_of_bounds(kernel)(small, kernel(small))


def test_what_the_failure_needs_is_kept() -> None:
    kernel = fault("leak-values-previous", heads=[1], when=lambda new, prefix: new >= 7)
    small = shrink(kernel, replace(CALL, phase="decode", layer=5))
    assert len(small.lens_q) == 2
    assert small.lens_q[1] == 7
    assert small.q.shape[1] == 2  # the fault sits in head 1
    assert (small.phase, small.layer) == ("decode", 5)


def test_it_is_deterministic_and_bounded() -> None:
    runs = 0
    faulty = fault("prefix-dropped")

    def counted(call: AttentionCall) -> Tensor:
        nonlocal runs
        runs += 1
        return faulty(call)

    once, again = shrink(faulty, CALL), shrink(faulty, CALL)
    assert torch.equal(once.q, again.q)
    shrink(counted, CALL, runs=5)
    assert runs == 5


def test_a_refusal_is_no_failure() -> None:
    faulty = fault("prefix-dropped")

    def picky(call: AttentionCall) -> Tensor:
        if call.q.shape[2] < 32 or call.q.shape[0] < 3:
            raise KernelRefused("too small")
        return faulty(call)

    small = shrink(picky, CALL)
    assert small.q.shape[2] == 32
    assert small.lens_q == [3]


def test_other_failures_can_be_kept() -> None:
    small = shrink(rounded_oracle, CALL, lambda call, out: sum(call.prefixes) >= 60)
    assert (small.lens_q, small.prefixes) == ([1], [60])


def test_what_does_not_fail_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="nothing to shrink"):
        shrink(rounded_oracle, CALL)


def run_pytest(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shrunk.py").write_text(source)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        "test_shrunk.py",
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.interpreter
def test_the_printed_test_is_red_with_the_kernel_and_green_with_the_oracle(tmp_path: Path) -> None:
    call = call_of([(20, 30), (9, 0)], (4, 2), 64, torch.bfloat16, "cpu", seed=3)
    small = shrink(sage_attn_as_shipped, call, runs=40)
    [finding] = diagnose(run_kernel(sage_attn_as_shipped, [small]))
    source = as_pytest(small, SEED, finding)
    assert "call_of([(" in source
    red = run_pytest(tmp_path, source)
    assert red.returncode == 1, red.stdout
    assert "1 failed" in red.stdout
    green = run_pytest(tmp_path, source.replace(SEED, ORACLE))
    assert green.returncode == 0, green.stdout + green.stderr


FAULTY = """
from assay.harness.attention.faults import fault
from assay.harness.attention.kernels import declares

_faulty = fault("values-saturate-fp8-e4m3")


def kernel(call):
    return _faulty(call)
"""


def test_data_that_is_needed_is_written_into_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud_kernel.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = fault("values-saturate-fp8-e4m3")
    loud = replace(CALL, v=(CALL.v * 500).bfloat16(), q=CALL.q.bfloat16(), k=CALL.k.bfloat16())
    [finding] = diagnose(run_kernel(kernel, [loud]))
    with pytest.raises(AssayError, match="shrink the call first"):
        as_pytest(loud, "loud_kernel:kernel", finding)
    source = as_pytest(shrink(kernel, loud), "loud_kernel:kernel", finding)
    assert "AttentionCall(" in source
    red = run_pytest(tmp_path, source)
    assert red.returncode == 1, red.stdout
    green = run_pytest(tmp_path, source.replace("loud_kernel:kernel", ORACLE))
    assert green.returncode == 0, green.stdout + green.stderr
