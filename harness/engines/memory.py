"""Tests of whether memory holds both servers at the same time (``servers = "auto"``)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.sides import Device, MemoryProfile, Side, flag_values, profile_of

GIB = 1024**3
# CUDA context and activations lie outside a server's share.
_CUDA_OUTSIDE_FRACTION = 0.1
# The part of a server's share that remains for the KV cache.
_CUDA_KV_BYTES = 1 * GIB
_WEIGHTS = ("*.safetensors", "*.bin")


def hold_both(device: Device, sides: Sequence[Side], sizes: Sequence[int | None], available_bytes: int) -> bool:
    """Return True if two servers fit side by side.

    Args:
        sides: both sides.
        sizes: for each, the bytes of its weights on disk, or None if unknown, which counts as too large.
        available_bytes: free memory of the device.

    Raises:
        UsageError: the share of the GPU that a side's flags name is not a number.
    """
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return False
    needed = [one_server_bytes(profile_of(s.engine).memory, device, size) for s, size in zip(sides, known, strict=True)]
    if device == "cpu":
        return sum(needed) <= available_bytes
    share = max(mem_fraction(side) for side in sides)
    # The second server takes its share of what the first one leaves.
    return 2 * share + _CUDA_OUTSIDE_FRACTION <= 1 and max(needed, default=0) <= share * (1 - share) * available_bytes


def one_server_bytes(memory: MemoryProfile, device: Device, model_bytes: int) -> float:
    """Estimate the least bytes that a server needs for a model with this many bytes of weights; on CUDA, inside its share."""
    if device == "cpu":
        return memory.server_bytes + memory.model_copies * model_bytes
    return model_bytes + _CUDA_KV_BYTES


def mem_fraction(side: Side) -> float:
    """Return a CUDA server's share of the GPU's memory: the user's, or assay's own.

    Raises:
        UsageError: the user's is not a number.
    """
    memory = profile_of(side.engine).memory
    value = flag_values(side.flags).get(memory.share_flag, str(memory.share))
    try:
        return float(value)
    except ValueError:
        raise UsageError(
            f"{memory.share_flag} is {value!r}.", "a number between 0 and 1", "correct --engine-arg"
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
