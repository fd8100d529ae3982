"""What the benchmarks share: the command line of assay, kernels of this folder, and a model with the shape of an 8B model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from assay.harness.engines.model import TINY_MODEL

HERE = Path(__file__).parent
REFERENCE = {"cpu": "torch_native", "cuda": "triton"}
"""The reference backend on each device."""
DUMMY_WEIGHTS = "--load-format=dummy"
"""Flag of SGLang for a model folder without weights."""
SHAPE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
}
"""The shape of Llama 3.1 8B."""


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` with these folders and this one first, so that a server finds the kernels in them."""
    return os.pathsep.join([*map(str, folders), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def assay(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    output: IO[str] | None = None,
) -> int:
    """Run ``assay`` with the kernels of this folder importable, and variables added to the environment; return its exit code.

    What it prints to its standard output goes to `output`, if that is given.
    """
    command = [sys.executable, "-m", "assay", *arguments]
    variables = os.environ | {"PYTHONPATH": python_path()} | env
    return subprocess.run(command, cwd=cwd, env=variables, stdout=output, check=False).returncode


def shaped_model(folder: Path, shape: Mapping[str, Any] = MappingProxyType(SHAPE_8B)) -> Path:
    """Create a folder with the configuration of a model of this shape and the tiny model's tokenizer, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in TINY_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(TINY_MODEL / "chat_template.jinja", folder)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(shape)))
    return folder
