"""Which bugs of a serving engine does `assay run` find in a real vLLM server on a CPU, and where does it place them?

    python benchmarks/vllm_faults.py                       # every fault, several minutes each
    python benchmarks/vllm_faults.py head-lost rope-base
    VLLM_PYTHON=/envs/vllm/bin/python python benchmarks/vllm_faults.py

The candidate is the same vLLM with a fault that a second plugin seeds, in attention or in what surrounds it: attention then is the
right function of wrong inputs, which no comparison of kernels can see. A fault of a kernel is that of a served kernel.

Prints a line for each fault: exit code, minutes, where the two servers part, and what assay names.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAULT = "VLLM_SEEDED_FAULT"
LAYER, HEAD = 2, 1
PLUGIN = "vllm_seeded_faults"


# In the server: each function patches vLLM when its plugins are loaded, in every process.


def _of_impl(change: Callable[[Any, int], None]) -> None:
    """Change the implementation of each attention layer, given with its layer's number, when it is made."""
    from vllm.model_executor.layers.attention import attention as module

    init = module.Attention.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self.impl, int(self.layer_name.split(".")[2]))

    module.Attention.__init__ = made


def _of_metadata(change: Callable[[Any], Any]) -> None:
    """Change the block table of every pass before attention, and assay, read it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    build = Builder.build

    @functools.wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        metadata.block_table = change(metadata)
        return metadata

    Builder.build = built


def wrong_scale() -> None:
    """Multiply the softmax scale of one layer by 1.1."""

    def change(impl: Any, layer: int) -> None:
        impl.scale *= 1.1 if layer == LAYER else 1.0

    _of_impl(change)


def head_lost() -> None:
    """Leave one head of one layer unwritten."""

    def change(impl: Any, layer: int) -> None:
        forward = impl.forward

        def lost(*args: Any, output: Any, **kwargs: Any) -> Any:
            forward(*args, output=output, **kwargs)
            output[:, HEAD] = 0
            return output

        if layer == LAYER:
            impl.forward = lost

    _of_impl(change)


def rope_base() -> None:
    """Turn q and k by angles of a base that is 10 % too large."""
    from vllm.model_executor.layers.rotary_embedding import base as module

    compute = module.RotaryEmbeddingBase._compute_inv_freq
    module.RotaryEmbeddingBase._compute_inv_freq = lambda self, base: compute(self, base * 1.1)


def stale_block_table() -> None:
    """Read the last block of each sequence from the place of the one before, as if the table had not been updated."""

    def change(metadata: Any) -> Any:
        table, page = metadata.block_table.clone(), 32
        for row, length in enumerate(metadata.seq_lens.tolist()):
            if (last := (length - 1) // page) > 0:
                table[row, last] = table[row, last - 1]
        return table

    _of_metadata(change)


def kv_of_another_request() -> None:
    """Read the first block of each sequence from the next sequence of the batch."""

    def change(metadata: Any) -> Any:
        table = metadata.block_table.clone()
        if (count := len(metadata.seq_lens)) > 1:
            table[:count, 0] = metadata.block_table[:count, 0].roll(-1)
        return table

    _of_metadata(change)


def prefix_of_another_prompt() -> None:
    """Take a cached block for that of another prompt if the first half of its tokens is the same."""
    from vllm.v1.core import kv_cache_utils as module

    plain = module.hash_block_tokens

    def hashed(function: Any, parent: Any, tokens: Any, extra: Any = None) -> Any:
        return plain(function, parent, tokens[: len(tokens) // 2], extra)

    module.hash_block_tokens = hashed


FAULTS = {
    each.__name__.replace("_", "-"): each
    for each in (wrong_scale, head_lost, rope_base, stale_block_table, kv_of_another_request, prefix_of_another_prompt)
}
"""The faults of the engine, by name."""
KERNELS = {"mask-top-left": "sage_attn_as_shipped"}
"""The faults of a kernel that vLLM serves."""


def register() -> None:
    """Seed the fault that the environment names: the entry point of the plugin group."""
    fault = os.environ.get(FAULT, "")
    if fault and not hasattr(sys, PLUGIN):
        setattr(sys, PLUGIN, fault)
        FAULTS[fault]()


# On this side.


@dataclass(frozen=True)
class Tried:
    """What a run said of a fault."""

    fault: str
    code: int
    minutes: float
    said: str
    place: str


def plugin_folder(parent: Path) -> Path:
    """Make a folder for PYTHONPATH that has this module, and names it as a plugin of vLLM."""
    info = parent / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = vllm_faults:register\n")
    (parent / "vllm_faults.py").symlink_to(Path(__file__).resolve())
    return parent


def try_fault(fault: str, arguments: list[str], out: Path) -> Tried:
    """Run the reference against a candidate with a fault."""
    if fault in KERNELS:
        candidate = ["--candidate", KERNELS[fault]]
    else:
        settings = {"PYTHONPATH": str(plugin_folder(out / "plugin")), "VLLM_PLUGINS": f"assay,{PLUGIN}", FAULT: fault}
        candidate = [f"--candidate-env={name}={value}" for name, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "assay",
        "run",
        "--engine",
        "vllm",
        "--out",
        str(out / "run"),
        *candidate,
        *arguments,
    ]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    (out / "output.txt").write_text(done.stdout + done.stderr)
    first = next((line for line in done.stdout.splitlines() if line.strip()), done.stderr.strip()[-200:])
    return Tried(fault, done.returncode, (time.monotonic() - begun) / 60, first, _place(out / "run"))


def _place(run: Path) -> str:
    """Return where the servers part, as the report has it, or an empty string."""
    for report in run.rglob("report.json"):
        for finding in json.loads(report.read_text()).get("findings", ()):
            if "part" in str(finding.get("id", "")):
                return str(finding.get("title", ""))
    return ""


def main() -> int:
    """Try the named faults, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs, by default a temporary one")
    names = [*KERNELS, *FAULTS]
    asked, arguments = parser.parse_known_args()
    if unknown := set(asked.faults) - set(names):
        parser.error(f"unknown faults {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    out = asked.out or Path(tempfile.mkdtemp(prefix="vllm-faults-"))
    missed = 0
    for fault in asked.faults or names:
        tried = try_fault(fault, arguments, out / fault)
        missed += tried.code != 1
        print(f"{fault:26} exit {tried.code}  {tried.minutes:4.1f} min  {tried.said}  {tried.place}", flush=True)
    print(f"runs are in {out}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
