"""Launching a server of transformers: `Launch` -> its command line and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from assay.harness.engines.launch import HOST, Launch, common_settings, with_extra

CHUNK_FLAG = ""
"""It has no flag for chunks of a prompt, which it never splits."""


def command(launch: Launch, port: int, name: str) -> list[str]:
    """Return the server's command line; ``name`` is the model name that it answers to."""
    return [
        launch.interpreter or sys.executable, "-m", "assay.harness.engines.hf.process",
        "--model", str(launch.model.resolve()),
        "--host", HOST,
        "--port", str(port),
        "--served-model-name", name,
        "--device", launch.device,
        *launch.common,
        *launch.engine_args,
    ]  # fmt: skip


def settings(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that assay sets for a server, in addition to those ``inherited``."""
    return with_extra(launch, common_settings(launch, inherited) | {"TOKENIZERS_PARALLELISM": "false"})
