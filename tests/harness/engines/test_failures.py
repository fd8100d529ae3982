"""The cause of a server's failure, read off its log; `tests/data/server_failures` says where the logs come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.engines.failures import CAUSES, ended, read

LOGS = Path(__file__).parents[2] / "data" / "server_failures"
# The log, the known cause, words of the line that names it, and words of the remedy.
EXPECTED = {
    "architecture": ("architecture", "'NoSuchForCausalLM' is not a registered model", "newer SGLang"),
    "disk": ("disk", "No space left on device", "make room"),
    "fa3_without_gpu": ("gpu-architecture", "FlashAttention v3 Backend requires SM>=80 and SM<=90", "another GPU"),
    "flag": ("flag", "error: unrecognized arguments: --no-such-flag", "correct --engine-arg"),
    "flashinfer_missing": ("missing-package", "flashinfer_python with minimum required version 0.7.2 is not installed", "pip"),
    "gpu_architecture": ("gpu-architecture", "no kernel image is available", "another GPU"),
    "gpu_memory": ("gpu-memory", "CUDA out of memory. Tried to allocate 112.00 MiB", "--servers=in-turn"),
    "graph_memory": ("gpu-memory", "Capture cuda graph failed: CUDA out of memory", "nvidia-smi"),
    "head_dim_flashinfer": ("head-dim", "Unsupported head_dim: 80", "head size"),
    "head_dim_sage": ("head-dim", "headdim should be in [64, 96, 128]", "head size"),
    "head_dim_triton": ("head-dim", "Lq in {16, 32, 64, 128, 256, 576}, where Lq = 80", "head size"),
    "illegal_access": ("kernel-access", "an illegal memory access was encountered", "compute-sanitizer"),
    "jit_build": ("jit-build", "Ninja build failed", "compiler's first error"),
    "jit_headers": ("jit-headers", "fatal error: Python.h: No such file or directory", "python3-dev"),
    "jit_ninja": ("jit-ninja", "No such file or directory: 'ninja'", "pip install ninja"),
    "jit_nvcc": ("jit-compiler", "Could not find nvcc", "CUDA toolkit"),
    "memory_share": ("memory-share", "Raise --mem-fraction-static above 0.003", "--mem-fraction-static=0.45"),
    "memory_share_gpu": ("memory-share", "Raise --mem-fraction-static above 0.408", "--mem-fraction-static=0.45"),
    "memory_share_large": ("memory-share", "above 0.790", "--servers=in-turn --engine-arg=--mem-fraction-static=0.85"),
    "memory_share_old": ("memory-share", "Please try to increase --mem-fraction-static", "--mem-fraction-static=0.45"),
    "missing_kernel_module": ("missing-module", "'nosuchmodule:kernel' cannot be imported", "install nosuchmodule"),
    "missing_module": ("missing-module", "No module named 'sageattention'", "install sageattention"),
    "missing_torchvision": ("missing-module", "No module named 'torchvision'", "install torchvision"),
    "no_gpu_build": ("no-gpu", "Torch not compiled with CUDA enabled", "--device=cpu"),
    "no_gpu_driver": ("no-gpu", "Found no NVIDIA driver", "--device=cpu"),
    "port": ("port", "address already in use", "what holds the port"),
    "shared_library": ("shared-library", "Could not load any common_ops library", "fit together"),
    "shared_memory": ("gpu-shared-memory", "out of resource: shared memory, Required: 163840", "blocks smaller"),
    "two_servers": ("gpu-shared", "Some GPUs may be occupied by other processes", "while the server loads"),
    "unknown": ("", "KeyError: 'model.layers.0.self_attn.rotary_emb.inv_freq'", "assay doctor"),
    "weights": ("weights", "SafetensorError: Error while deserializing header", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_the_line_that_names_the_cause_is_found_with_one_remedy(name: str) -> None:
    told = read((LOGS / f"{name}.log").read_text())
    cause, line, do = EXPECTED[name]
    assert line in told.line
    assert (told.cause, do in told.do) == (cause, True), told
    assert "\n" not in told.line + told.do
    assert "{" not in told.do, "a group of the pattern that was not filled in"


def test_every_log_is_expected_and_most_causes_have_one() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*EXPECTED, "silent"}
    without = {cause.id for cause in CAUSES} - {cause for cause, _, _ in EXPECTED.values()}
    assert without == {"host-memory", "trust", "offline", "open-files", "backend-device"}


def test_a_server_that_ended_itself_says_why_and_not_only_how() -> None:
    error = ended(
        "the candidate server (x)",
        "was killed by SIGKILL",
        "during start-up",
        (LOGS / "jit_ninja.log").read_text(),
        "Its log ends:\n  y",
    )
    assert error.found == (
        "the candidate server (x) failed during start-up: FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"
    )
    assert error.cause == "jit-ninja"
    assert str(error).splitlines()[0] == error.found
    assert error.details == "SGLang ended its own processes during start-up.\nIts log ends:\n  y"


def test_a_server_that_was_killed_from_outside_is_not_said_to_have_ended_itself() -> None:
    error = ended("the server", "was killed by SIGKILL", "after it was ready", (LOGS / "silent.log").read_text(), "")
    assert error.found == "the server was killed by SIGKILL after it was ready."
    assert "dmesg" in error.do


def test_an_exception_that_was_survived_is_not_the_cause_of_a_later_one() -> None:
    survived = "Traceback (most recent call last):\n  File\nModuleNotFoundError: No module named 'optional'\n[2026-11-22] next\n"
    assert read(survived + (LOGS / "gpu_memory.log").read_text()).cause == "gpu-memory"
    told = read(survived + (LOGS / "unknown.log").read_text())
    assert (told.cause, told.line[:9]) == ("", "KeyError:")


def test_an_assertion_without_a_message_shows_its_source() -> None:
    log = "Traceback (most recent call last):\n  File\n    assert page_size == 1\n           ^^^^\nAssertionError\n"
    assert read(log).line == "AssertionError: assert page_size == 1"
