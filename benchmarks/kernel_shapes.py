"""Time and own error of kernels at the shapes of a model's prefill, on a GPU, without a server.

    python benchmarks/kernel_shapes.py [--candidate mine:forward] [--seconds 2]

`triton.testing.do_bench` times a kernel and PyTorch's attention on the same call, whose own error is measured too. A wrong kernel
gets no ratio: one with a wrong mask may be fast because it reads fewer keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.guard import compute
from assay.harness.localize.kernel_runs import measure

SHAPES = ((512, 0), (2048, 0), (8192, 0), (512, 1536), (512, 7680), (2048, 6144))
HEADS, HEAD_DIM = (32, 8), 128


def pytorch(call: AttentionCall) -> Tensor:
    """Run PyTorch's attention on the one sequence of a call; its lengths are not read from the GPU, which would wait for it."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (call.q, call.k, call.v))
    uncached = q.shape[2] == k.shape[2]
    mask = None if uncached else causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=uncached, scale=call.scale, enable_gqa=True)


def milliseconds(run: Callable[[], object], seconds: float) -> float:
    """Measure the median time of a kernel."""
    return float(do_bench(run, warmup=200, rep=int(1000 * seconds), return_mode="median"))


def tflops(call: AttentionCall, took_ms: float) -> float:
    """Compute the speed at which the visible pairs of queries and keys were multiplied, both products together."""
    new, keys = call.q.shape[0], call.k.shape[0]
    pairs = new * keys - new * (new - 1) // 2
    return 4 * pairs * call.q.shape[1] * call.q.shape[2] / took_ms / 1e9


def main() -> None:
    """Time each kernel at each shape, and print a table for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--candidate", action="append", help="kernels; by default SageAttention repaired and as shipped"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of timing of each kernel at each shape")
    given = parser.parse_args()
    calls = [call_of([lens], HEADS, HEAD_DIM, torch.bfloat16, "cuda", seed) for seed, lens in enumerate(SHAPES)]
    for name in given.candidate or ["sage_attn", "sage_attn_as_shipped"]:
        kernel = kernels.load(name)
        columns = ("new, cached", "PyTorch, ms", "ms", "ratio", "PyTorch, TFLOP/s", "TFLOP/s", "own error over bound")
        table = Table(*columns, title=name)
        for shape, call in zip(SHAPES, calls, strict=True):
            own = measure(call, compute(kernel, call.clone()), declaration(kernel).noise).worst
            theirs, ours = (milliseconds(partial(run, call), given.seconds) for run in (pytorch, kernel))
            right = own <= 1
            table.add_row(
                f"{shape[0]:,}, {shape[1]:,}", f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}" if right else "wrong",
                f"{tflops(call, theirs):.0f}", f"{tflops(call, ours):.0f}" if right else "", f"{own:.2g}",
            )  # fmt: skip
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
