"""Speed, memory and findings of `assay tensors diff`, beside numpy by (token, head) and SGLang's comparator, on the same data.

    python benchmarks/tensor_diff.py [--folder DIR] [--layers 32] [--tokens 2048] [--heads 32] [--sglang PYTHON]

Two dumps of one bfloat16 tensor per layer; with the defaults 32 layers of [2048, 32, 128], 1.07 GB on both sides. SGLang's
comparator reads .pt files of its own dumper and needs polars: name a Python that has both. Every measurement runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import assay.harness.engines

Dump = dict[str, Tensor]
LAYER, HEAD, TOKEN = 11, 5, 70
STAND_INS = Path(assay.harness.engines.__file__).parent / "stand_ins"
"""What SGLang imports on a machine without a GPU."""


def name(layer: int) -> str:
    """The key of a layer's tensor."""
    return f"model.layers.{layer}.self_attn.attn"


def one_head(x: Tensor) -> None:
    """All tokens of one head, 10 % too large: beyond what rounding to bfloat16 explains."""
    x[:, HEAD] *= 1.1


def one_token(x: Tensor) -> None:
    """One token of one head."""
    x[TOKEN, HEAD] *= 1.1


def one_layer(x: Tensor) -> None:
    """All of one layer."""
    x += 0.2 * torch.randn_like(x)


def nan(x: Tensor) -> None:
    """One element."""
    x[TOKEN, HEAD, 3] = math.nan


def permuted(x: Tensor) -> None:
    """Two tokens exchanged, in all heads."""
    x[[TOKEN, TOKEN + 1]] = x[[TOKEN + 1, TOKEN]]


def one_dim(x: Tensor) -> None:
    """The last dimension of one head is lost."""
    x[:, HEAD, -1] = 0


def scale(x: Tensor) -> None:
    """All of one layer, 5 % too large."""
    x *= 1.05


FAULTS = {
    "one head": (one_head, (LAYER, HEAD, 0)),
    "one token": (one_token, (LAYER, HEAD, TOKEN)),
    "one layer": (one_layer, (LAYER, 0, 0)),
    "NaN": (nan, (LAYER, HEAD, TOKEN)),
    "permuted tokens": (permuted, (LAYER, 0, TOKEN)),
    "one dimension": (one_dim, (LAYER, HEAD, 0)),
    "scale": (scale, (LAYER, 0, 0)),
}
"""Each with the layer, head and token of its first difference."""


def make(folder: Path, layers: int, tokens: int, heads: int) -> None:
    """Write the reference, a copy, a candidate whose every element is rounded otherwise, and one dump per fault."""
    torch.manual_seed(0)
    reference = {name(i): torch.randn(tokens, heads, 128).bfloat16() for i in range(layers)}
    save(folder / "a", reference)
    save(folder / "equal", reference)
    noisy = {key: (x.float() * (1 + 2**-9 * torch.randn(x.shape))).bfloat16() for key, x in reference.items()}
    save(folder / "noisy", noisy)
    for title, (change, _) in FAULTS.items():
        changed = reference[name(LAYER)].clone()
        change(changed)
        save(folder / title.replace(" ", "-"), noisy | {name(LAYER): changed})


def save(folder: Path, dump: Dump) -> None:
    """A folder of one safetensors file."""
    folder.mkdir(parents=True)
    safetensors.torch.save_file(dump, folder / "dump.safetensors")


def as_dumper(folder: Path, source: Path) -> None:
    """The same tensors as SGLang's dumper writes them: a .pt file each."""
    folder.mkdir(parents=True)
    for index, (key, x) in enumerate(safetensors.torch.load_file(source / "dump.safetensors").items()):
        layer = key.split(".")[2]
        meta = {"step": 0, "rank": 0, "dump_index": index, "name": "attn_out", "layer_id": int(layer), "dims": "t h d"}
        file = f"step=0___rank=0___dump_index={index}___name=attn_out___layer_id={layer}.pt"
        torch.save({"value": x, "meta": meta}, folder / file)


MEASURE = """
import json, sys, time
def peak():  # not ru_maxrss, which begins with that of the parent
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
{setup}
loaded = peak()
start = time.perf_counter()
{run}
seconds = time.perf_counter() - start
print("MEASURED", json.dumps({{"seconds": seconds, "above_start_mb": peak() - loaded, "found": found}}))
"""
ASSAY = (
    "from pathlib import Path\nfrom assay.harness.ingest.tensors.tensor_diff import diff\n"
    "from assay.harness.ingest.tensors.dump import open_dump",
    "result = diff(open_dump(Path(sys.argv[1])), open_dump(Path(sys.argv[2])))\nat = result.first\n"
    "found = [result.verdict, *([at.layer, at.head, at.token] if at else [])]",
)
NUMPY = (
    "import numpy as np, torch, safetensors.torch",
    "a, b = (safetensors.torch.load_file(sys.argv[i] + '/dump.safetensors') for i in (1, 2))\nworst = (0, '')\n"
    "for key in a:\n    x, y = a[key].float().numpy(), b[key].float().numpy()\n"
    "    e = np.abs(y - x).sum(-1) / np.abs(x).sum(-1)\n    worst = max(worst, (float(e.max()), key))\nfound = worst[1]",
)
READ = (
    "",
    "total = 0\nfor i in (1, 2):\n    with open(sys.argv[i] + '/dump.safetensors', 'rb', buffering=0) as f:\n"
    "        buffer = bytearray(8 << 20)\n        while n := f.readinto(buffer): total += n\nfound = total",
)


def measure(code: tuple[str, str], a: Path, b: Path) -> dict[str, Any]:
    """Run one way to compare two dumps in a process of its own; the best of three."""
    script = MEASURE.format(setup=code[0], run=code[1])
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, str(a), str(b)], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout.split("MEASURED", 1)[1]))
    best: dict[str, Any] = min(runs, key=lambda one: one["seconds"])
    return best


SGLANG = """
import sys, time
from sglang.srt.debug_utils.comparator.entrypoint import parse_args, run
start = time.perf_counter()
try:
    code = run(parse_args(["--baseline-path", sys.argv[1], "--target-path", sys.argv[2], "--preset", "raw"]))
finally:
    print("MEASURED", time.perf_counter() - start)
"""


def sglang(python: str, a: Path, b: Path) -> float | None:
    """Seconds of SGLang's comparator without its imports; None if it failed."""
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([python, "-c", SGLANG, str(a), str(b)], capture_output=True, text=True, check=False, env=env)
    if done.returncode or "MEASURED" not in done.stdout:
        print((done.stderr or done.stdout)[-800:])
        return None
    print("  its last line:", done.stdout.split("MEASURED")[0].strip().splitlines()[-1][:160])
    return float(done.stdout.split("MEASURED", 1)[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sglang", default="", help="a Python with sglang and polars")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        make(folder, given.layers, given.tokens, given.heads)
        gigabytes = 2 * (folder / "a" / "dump.safetensors").stat().st_size / 1e9
        print(f"{gigabytes:.2f} GB, both sides; {given.layers} layers of [{given.tokens}, {given.heads}, 128] bfloat16")
        for title, code in (("reading", READ), ("assay", ASSAY), ("numpy", NUMPY)):
            for other in ("equal", "noisy"):
                one = measure(code, folder / "a", folder / other)
                seconds = one["seconds"]
                memory = f"{one['above_start_mb']:5.0f} MB above start"
                print(f"{title:8} {other:6} {seconds:6.3f} s {gigabytes / seconds:6.1f} GB/s, {memory}: {one['found']}")
        for title, (_, at) in FAULTS.items():
            one = measure(ASSAY, folder / "a", folder / title.replace(" ", "-"))
            right = one["found"] == ["regression", *at]
            print(f"fault {title:16} {'found' if right else 'MISSED'}: {one['found']}, {one['seconds']:.3f} s")
        if given.sglang:
            as_dumper(folder / "da", folder / "a")
            as_dumper(folder / "db", folder / "noisy")
            theirs = sglang(given.sglang, folder / "da", folder / "db")
            ours = measure(ASSAY, folder / "da", folder / "db")
            print(f"the same as .pt files: SGLang's comparator {theirs} s, assay {ours['seconds']:.3f} s")


if __name__ == "__main__":
    main()
