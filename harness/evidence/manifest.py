"""``manifest.json``: what was run, with which software, on which machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field

from assay.harness.evidence.records import Item, Role
from assay.harness.schema import Record

PACKAGES = (
    "sglang",
    "sglang-kernel",
    "torch",
    "triton",
    "transformers",
    "sageattention",
    "flashinfer-python",
    "numpy",
    "aiohttp",
)
_HASHED = ("*.safetensors", "*.bin", "*.gguf", "tokenizer*", "chat_template*", "config.json", "generation_config.json")


class ServerManifest(Record):
    """A role's server, as it reports itself."""

    role: Role
    backend: str
    engine: str
    claimed_phases: tuple[str, ...]
    launch_command: str = ""
    startup_s: float | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


class Origin(Record):
    """Where evidence comes from.

    Attributes:
        created: ISO 8601, UTC.
        spec: the `RunSpec`.
        command: the command that repeats it.
    """

    created: str
    spec: dict[str, Any]
    command: str
    packages: dict[str, str]
    hardware: str
    python: str
    git: str
    model_hash: str


class Manifest(Origin):
    """What identifies a run: it decides whether the run can be resumed, and lets a reader check and repeat it."""

    run_id: str
    model: str
    items_hash: str


class Failure(Record):
    """What ended a run before it was complete."""

    kind: str
    message: str


class Progress(Record):
    """``progress.json``: the current state of a run."""

    seconds: float = 0.0
    servers: tuple[ServerManifest, ...] = ()
    failure: Failure | None = None


def installed_packages() -> dict[str, str]:
    """Versions of the installed packages that can change a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: str) -> str:
    """The machine in one line, for example "AMD EPYC 7763, 2 cores, 24 GiB". On CUDA it starts with the GPU's name."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    line = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {memory} GiB"
    if device == "cuda":
        import torch

        line = f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU found'}; {line}"
    return line


def git_state(folder: Path) -> str:
    """Commit of the repository that contains `folder`, and whether it has uncommitted changes; empty outside of a repository."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        dirty = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + (" with uncommitted changes" if dirty.strip() else "")


def hash_model(folder: Path) -> str:
    """SHA-256 of the names and contents of a model's weights, tokenizer and configuration."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in _HASHED for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def hash_items(items: Iterable[Item]) -> str:
    """SHA-256 of ids, prompts and expected answers, in order: equal if two runs asked the same."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.suite, item.id, item.prompt, item.expected]).encode() + b"\n")
    return total.hexdigest()
