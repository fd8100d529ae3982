"""SGLang's own attention backends as kernels of the contract, without a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, KernelRefused, Mask
from assay.harness.attention.declaration import Declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.engines.registry import checked_backend
from assay.harness.engines.sglang import native_kernel
from assay.harness.engines.sglang.native_kernel import NativeKernel
from assay.harness.errors import UsageError


def a_call(lens: tuple[int, int] = (3, 5)) -> AttentionCall:
    return call_of([lens], (4, 2), 64, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda: a_call().with_spec(mask=Mask(causal=False)), "attention that is not causal"),
        (lambda: replace(a_call(), v=a_call().v[:, :, :32]), "V of another head_dim than K"),
        (lambda: a_call((0, 5)), "a sequence without a new token"),
        (lambda: a_call().with_spec(phase="decode"), "several new tokens of a sequence in decode"),
        (lambda: a_call().to("meta"), "tensors on meta; SGLang is set up for"),
    ],
)
def test_what_sglang_has_no_batch_for_is_refused_by_name(change: Callable[[], AttentionCall], why: str) -> None:
    call = change()
    if call.q.device.type == "meta":  # its lengths are on the host, as everywhere else
        call = replace(call, cu_seqlens_q=a_call().cu_seqlens_q, cu_seqlens_k=a_call().cu_seqlens_k)
    with pytest.raises(KernelRefused, match=f"sglang:mine is not made for this call, which has {why}"):
        NativeKernel("sglang:mine", "mine", 1, Declaration())(call)


@pytest.mark.parametrize("page", ["", "x", "0", "24", "-16"])
def test_a_page_size_that_is_no_power_of_two_is_refused(page: str) -> None:
    with pytest.raises(UsageError, match=f"'triton@{page}' has the page size '{page}', expected a power of two"):
        kernels.find("", f"sglang:triton@{page}")


def test_without_sglang_the_error_says_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    native_kernel._sglang.cache_clear()  # another test of this process may have imported it
    native_kernel.kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(UsageError) as error:
        kernels.find("--candidate", "sglang:triton")
    assert error.value.do == "install sglang"


@pytest.mark.parametrize("name", ["sglang:triton", "sglang:triton@16"])
def test_a_server_is_told_the_name_that_it_knows(name: str) -> None:
    with pytest.raises(UsageError, match=f"--candidate: {name} is a backend without a server") as error:
        checked_backend("sglang", "--candidate", name)
    assert error.value.do == "name it triton"


def test_a_runner_made_under_inference_mode_serves_calls_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block table and its pool are kept for all calls of a shape, in whatever mode of autograd the first came."""
    shape = native_kernel._Shape("made-first-here", "cpu", 1, 4, 2, 64, 64, torch.float32, 4, 512, 2048)
    monkeypatch.setattr(native_kernel, "_Runner", lambda shape: torch.zeros(shape.batch, shape.length, dtype=torch.int32))
    with torch.inference_mode():
        table: Any = native_kernel._runner(shape)
    native_kernel._runner.cache_clear()
    table.copy_(torch.ones_like(table))
    assert bool(table.all())


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "assay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)  # 600 s on two busy cores


@pytest.mark.slow
def test_torch_native_passes_the_whole_matrix() -> None:
    done = assay("check", "sglang:torch_native")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sglang:torch_native is correct on all " in done.stdout


@pytest.mark.slow
@pytest.mark.interpreter
def test_triton_rounds_what_it_adds_up_for_a_score_where_each_q_head_has_its_own_kv_head() -> None:
    """A finding about SGLang 0.5.23: ``_fwd_kernel_stage1`` multiplies q by k in their own dtype. See docs/gpu.md."""
    done = assay("check", "sglang:triton@16", "--read-out", "0", "--all")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("sglang:triton@16 computes something other than attention in decode; wrong on [1-9] of ", done.stdout)
    assert "No known bug explains the output in decode" in done.stdout
    assert "Not covered: bfloat16, by declaration" in done.stdout


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fa3", ("attention backend 'fa3' cannot compute on this machine (cpu): AssertionError: FlashAttention v3",)),
        ("nope", ("has no attention backend 'nope'; it has", "flex_attention", "torch_native, triton")),
        ("tritn", ("did you mean 'triton'",)),
    ],
)
def test_a_backend_that_cannot_run_here_ends_the_command_with_the_reason(name: str, words: tuple[str, ...]) -> None:
    done = assay("check", f"sglang:{name}")
    assert done.returncode == 2, done.stdout + done.stderr
    for word in (*words, "Expected: ", "What to do: "):
        assert word in " ".join(done.stderr.split())


_PLANNED = """
import torch
from types import SimpleNamespace
from assay.harness.engines.sglang import native_kernel
native_kernel._sglang()
native_kernel._registry()["planning"] = lambda runner: SimpleNamespace(scale=runner.model_config.scaling)
for scale in (192**-0.5, 0.1):
    shape = native_kernel._Shape("planning", "cpu", 1, 4, 1, 576, 512, torch.float32, 1, 64, 64, latent_scale=scale)
    print(native_kernel._runner(shape)._backend.scale == scale)
"""


@pytest.mark.slow
def test_a_backend_that_plans_with_the_models_scale_plans_with_that_of_the_call() -> None:
    """FlashInfer's MLA backend does. SGLang's kit has the scale of the 576 dims."""
    done = subprocess.run([sys.executable, "-c", _PLANNED], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split()[-2:] == ["True", "True"], done.stderr


@pytest.fixture(scope="module")
def planted() -> list[dict[str, Any]]:
    script = Path(__file__).parent / "planted_backends.py"
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_bugs_planted_in_a_backend_are_caught_and_the_backend_as_it_is_is_not(planted: list[dict[str, Any]]) -> None:
    found = {one["backend"]: one for one in planted if "backend" in one}
    assert found.pop("torch_native")["verdict"] == "pass"
    assert {name: one["verdict"] for name, one in found.items()} == dict.fromkeys(
        ("RowsByPlace", "ConsecutivePages", "Unwritten", "OneTokenMore"), "regression"
    )
    phases = {name: {case.partition("-")[0] for case in one["failing"]} for name, one in found.items()}
    assert phases == {
        "RowsByPlace": {"extend", "decode"},
        "ConsecutivePages": {"extend", "decode"},
        "Unwritten": {"extend", "decode"},
        "OneTokenMore": {"decode"},
    }


@pytest.mark.slow
def test_nothing_global_of_sglang_stays_changed(planted: list[dict[str, Any]]) -> None:
    assert planted[-1] == {"arguments": False, "parallel": {}, "forward context": False, "gradients off": False}


@pytest.mark.sglang
def test_an_sglang_without_its_test_kit_is_named_and_no_bug_of_assay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernel, "_KIT", "sglang.no_such_kit.common")
    native_kernel._sglang.cache_clear()
    with pytest.raises(UsageError, match=r"its installation lacks sglang\.no_such_kit") as error:
        native_kernel.version()
    assert "with its tests" in error.value.do
    native_kernel._sglang.cache_clear()
