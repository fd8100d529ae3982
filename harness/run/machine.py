"""The machine and its software: git, packages, hardware and the model's files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from assay.harness.engines.environments import interpreter, python_of
from assay.harness.evidence.manifest import Origin
from assay.harness.files import file_hash, timestamp
from assay.harness.fingerprint.facts import device_facts
from assay.harness.fingerprint.folder_readings import versions
from assay.harness.run.plan import Plan
from assay.harness.sides import profile_of

_PACKAGES = (
    "sglang", "sglang-kernel", "torch", "triton", "transformers", "sageattention", "flashinfer-python", "numpy", "aiohttp",
)  # fmt: skip
_HASHED = ("*.safetensors", "*.bin", "*.gguf", "tokenizer*", "chat_template*", "config.json", "generation_config.json")


def origin_of(plan: Plan, command: str, nonce: str) -> Origin:
    """Describe what runs here and now, with which software, on which machine."""
    return Origin(
        nonce=nonce,
        created=timestamp(),
        spec=plan.spec.recorded().model_dump(mode="json"),
        command=command,
        packages=installed_packages(),
        engines={
            role: next(filter(None, map(interpreter(python).version_of, profile_of(side.engine).distributions)), "")
            for role, side in plan.spec.sides.items()
            if (python := python_of(side))
        },
        hardware=_hardware(plan.spec.device),
        python=sys.version.split()[0],
        git=_git_state(Path.cwd()),
        model_hashes={role: hash_model(folder) for role, folder in plan.models.items()},
    )


def installed_packages() -> dict[str, str]:
    """Return the versions of the installed packages that can change a result."""
    return {name: installed for name, installed in versions(_PACKAGES).items() if name != "python"}


def _hardware(device: str) -> str:
    """Describe the machine in one line, for example "AMD EPYC 7763, 2 cores, 24 GiB". On CUDA it starts with the GPU's name."""
    facts, memory = device_facts(device), round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    line = f"{facts['processor']}, {os.cpu_count()} cores, {memory} GiB"
    return f"{facts.get('gpu', 'no GPU found')}; {line}" if device == "cuda" else line


def _git_state(folder: Path) -> str:
    """Return the commit of `folder`'s repository, marked if it has uncommitted changes, or an empty string outside a repository."""
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit} with uncommitted changes" if changed else commit


@cache
def hash_model(folder: Path) -> str:
    """Hash the names and contents of a model's weights, tokenizer and configuration with SHA-256.

    Computed once per process: it takes minutes for a large model.
    """
    total = hashlib.sha256()
    for path in sorted({path for pattern in _HASHED for path in folder.glob(pattern)}):
        total.update(f"{path.name}\0{file_hash(path)}\n".encode())
    return total.hexdigest()
