"""Tests of whether memory holds both servers at the same time (``servers = "auto"``)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from assay.harness.engines.sglang.launch import CUDA_MEM_FRACTION
from assay.harness.errors import UsageError
from assay.harness.sides import Device, flag_values

GIB = 1024**3
# The three processes of a CPU server take about 2 GiB (measured, SGLang 0.5.23); one more is for the KV cache and activations.
_CPU_SERVER_BYTES = 3 * GIB
# bf16 weights become fp32 (twice the bytes), and half of them exist a second time while they are loaded.
_CPU_MODEL_COPIES = 2.5
# CUDA context and activations lie outside --mem-fraction-static.
_CUDA_OUTSIDE_FRACTION = 0.1
# The part of a server's share that remains for the KV cache.
_CUDA_KV_BYTES = 1 * GIB
_WEIGHTS = ("*.safetensors", "*.bin")


def hold_both(
    device: Device, model_bytes: int | None, available_bytes: int, mem_fraction: float = CUDA_MEM_FRACTION
) -> bool:
    """Return True if two servers of the same model fit side by side.

    Args:
        model_bytes: bytes of the weights on disk, or None if unknown, which counts as too large.
        mem_fraction: a CUDA server's ``--mem-fraction-static``.
    """
    if model_bytes is None:
        return False
    if device == "cpu":
        return 2 * one_server_bytes(device, model_bytes) <= available_bytes
    shares_fit = 2 * mem_fraction + _CUDA_OUTSIDE_FRACTION <= 1
    # The second server takes its share of what the first one leaves.
    return shares_fit and one_server_bytes(device, model_bytes) <= mem_fraction * (1 - mem_fraction) * available_bytes


def one_server_bytes(device: Device, model_bytes: int) -> float:
    """Estimate the least bytes that a server needs for a model with this many bytes of weights; on CUDA, inside its share."""
    if device == "cpu":
        return _CPU_SERVER_BYTES + _CPU_MODEL_COPIES * model_bytes
    return model_bytes + _CUDA_KV_BYTES


def mem_fraction(engine_args: Sequence[str]) -> float:
    """Return a CUDA server's ``--mem-fraction-static``: the user's, or assay's own.

    Raises:
        UsageError: the user's is not a number.
    """
    value = flag_values(tuple(engine_args)).get("--mem-fraction-static", str(CUDA_MEM_FRACTION))
    try:
        return float(value)
    except ValueError:
        raise UsageError(
            f"--mem-fraction-static is {value!r}.", "a number between 0 and 1", "correct --engine-arg"
        ) from None


def model_bytes(folder: Path) -> int | None:
    """Return the bytes of a model's weights, or None without weights."""
    return sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern)) or None


def available_bytes(device: Device) -> int:
    """Return the free memory of the machine or container, or of the first visible GPU, or 0 if it cannot be read."""
    if device == "cuda":
        return _free_gpu_bytes(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    import psutil

    machine, container = int(psutil.virtual_memory().available), _container_bytes(Path("/sys/fs/cgroup"))
    return machine if container is None else min(machine, container)


def _container_bytes(cgroup: Path) -> int | None:
    """Return the memory left below the limit of cgroup v2 (kernel documentation, cgroup-v2.rst), or None without a limit."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        if limit == "max":
            return None
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def _free_gpu_bytes(visible: str) -> int:
    gpu = visible.split(",")[0].strip() or "0"
    query = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 1024**2
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0
