"""`assay diff` of both SageAttention kernels, on the tiny model and on an 8B-shaped one with made-up weights:
``python benchmarks/diffs.py --device cuda``. Own error sees what the outputs of made-up weights cannot show.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from assay.harness.engines.model import TINY_MODEL

# The shape of Llama 3.1 8B.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
}


def shaped_model(folder: Path) -> Path:
    """A folder with the configuration of an 8B model, the tiny model's tokenizer, and no weights."""
    for path in TINY_MODEL.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(TINY_MODEL / "chat_template.jinja", folder)
    config = json.loads((TINY_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only-tiny", action="store_true", help="leave the 8B-shaped model out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="assay-diffs-") as made:
        folder = Path(made)
        (folder / "8b").mkdir()
        models = [("tiny", [])]
        if not args.only_tiny:
            models.append((str(shaped_model(folder / "8b")), ["--engine-arg=--load-format=dummy"]))
        for number, (model, flags) in enumerate(models):
            for candidate in ("sage_attn", "sage_attn_as_shipped"):
                command = ["diff", "--device", args.device, "--model", model, "--candidate", candidate, *flags]
                begun = time.monotonic()
                out = folder / f"{number}-{candidate}"
                code = subprocess.run(
                    [sys.executable, "-m", "assay", *command, "--out", str(out)], check=False
                ).returncode
                print(f"== {model} {candidate}: exit {code}, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
