"""The fingerprint of a process of a server, from the parts that an engine's own objects give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import engine_label
from assay.harness.evidence.run_file import nonce_of_process
from assay.harness.fingerprint.facts import PACKAGES, device_facts, variables
from assay.harness.fingerprint.folder_readings import observed, versions
from assay.harness.sides import Engine

_SHARED = ("tokens", "generation")


def describe_process(
    engine: Engine, version: str, model: str, device: str, parts: Mapping[str, Callable[[], Any]]
) -> Fingerprint:
    """Observe the parts of an engine's process, and its variables, packages and hardware.

    Args:
        engine: the engine's name.
        version: its version.
        model: the model's folder.
        device: torch device of the model runner.
        parts: functions by part. A part whose function raises is not observed, with the reason.
    """
    every = {
        **parts,
        "environment": lambda: variables(os.environ),
        "packages": lambda: versions(PACKAGES),
        "hardware": lambda: device_facts(device),
    }
    if rank():  # the first rank reports what all ranks share
        every = {part: observe for part, observe in every.items() if part not in _SHARED}
    with torch.inference_mode():
        seen = observed(every)
    label = engine_label(engine, version, device.partition(":")[0])
    return Fingerprint(run=nonce_of_process(), source="server", engine=label, model=model, **seen)


def rank() -> int:
    """Return the rank of this process among those of its server."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
