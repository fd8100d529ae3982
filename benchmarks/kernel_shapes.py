"""Time and own error of kernels at the shapes of a model's prefill, without a server.

    python benchmarks/kernel_shapes.py --device cuda

Measures the time against PyTorch's attention, the achieved TFLOP/s, the share of the device's limit, and the own error of the same
calls; a wrong kernel gets no ratio. ``assay bench kernel`` does the same for recorded calls.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console

from assay.harness.attention import kernels
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.offline.timing import time_kernels
from assay.reports.kernel_timing import timing_document
from assay.reports.terminal import render

SHAPES = {
    "cpu": ((64, 0), (64, 64)),
    "cuda": ((512, 0), (2048, 0), (8192, 0), (512, 1536), (512, 7680), (2048, 6144)),
}
HEADS, HEAD_DIM = {"cpu": (4, 2), "cuda": (32, 8)}, {"cpu": 64, "cuda": 128}
BOUND, ALPHA = 1.1, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--candidate", action="append", help="kernels; by default SageAttention repaired and as shipped"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of timing per kernel")
    args = parser.parse_args()
    device = args.device
    calls = [
        call_of([lens], HEADS[device], HEAD_DIM[device], torch.bfloat16, device, seed)
        for seed, lens in enumerate(SHAPES[device])
    ]
    command = f"python benchmarks/kernel_shapes.py --device {device}"
    for name in args.candidate or ["sage_attn", "sage_attn_as_shipped"]:
        names = (name, "torch_sdpa")
        timing = time_kernels(kernels.load(name), torch_sdpa, calls, BOUND, ALPHA, args.seconds, command, names)
        render(timing_document(timing), Console(width=250))


if __name__ == "__main__":
    main()
