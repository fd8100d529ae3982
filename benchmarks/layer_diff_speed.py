"""Speed of the two parts of a layer diff: the error reduction in the shadow, and naming the cause.

    python benchmarks/layer_diff_speed.py --device cuda

- The error reduction against a plain copy of the same tensors, and whether its sums are right. Bytes are those that cross the
  memory bus: the reduction reads both outputs, the copy reads and writes both.
- Naming the cause from synthetic calls of 32 layers x 8 conditions, with a kernel whose mask is top-left and with a correct one:
  seconds until the smallest calls named the bug, and until all calls were run three times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
from assay.harness.attention.call import AttentionCall, Kernel, Mask
from assay.harness.attention.oracle import sequences
from assay.harness.attention.sample_calls import call_of
from assay.harness.evidence.error_table import DISTANCE, condition_numbers
from assay.harness.localize.staged import diagnose_kernel
from assay.harness.server.reduction import LayerSums
from assay.harness.server.reduction_kernel import TILE, WARPS, reduce, unpack
from assay.harness.stats.error_sums import query_sums, relative_l1

SHAPES = ((4096, 32, 128), (16384, 32, 128))
TILES = ((1024, 1), (2048, 1), (2048, 2), (2048, 4), (4096, 2), (4096, 4), (8192, 4), (8192, 8), (16384, 8))
"""(elements of each output that a program reads at once, warps)."""
CONDITIONS = ((24, 0), (190, 0), (512, 0), (9, 64), (49, 46), (128, 512), (300, 1000), (1, 90))
"""(new tokens, cached prefix) of a call's one sequence."""
CONSOLE = Console(width=150)


def seconds(run: Callable[[], object], repetitions: int, flush: Tensor) -> float:
    """Median time on the GPU. The write before each run flushes the cache and lets the CPU get ahead."""
    taken: list[float] = []
    for _ in range(repetitions):
        flush.zero_()
        begun, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        begun.record()
        run()
        ended.record()
        ended.synchronize()
        taken.append(begun.elapsed_time(ended) / 1000)
    return statistics.median(taken)


def mistakes(got: LayerSums, truth: LayerSums) -> str:
    """The difference between the sums of two reductions."""
    (index, sums), (other, wanted) = ((one.index, one.apart) for one in (got.cells(0, 0), truth.cells(0, 0)))
    if index.shape != other.shape or (index != other).any() or (sums[:, 2:] != wanted[:, 2:]).any():
        return "WRONG: cells or counts differ"
    off = abs(sums[:, :2] / wanted[:, :2] - 1).max()
    return f"{'right' if off < 1e-5 else 'WRONG'}: sums off by {off:.0e}"


def reduction(shape: tuple[int, int, int], dtype: torch.dtype, repetitions: int, sweep: bool) -> None:
    """Print the bandwidth of the reduction and of a copy."""
    generator = torch.Generator("cuda").manual_seed(0)
    reference = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    out = (reference + 0.02 * torch.randn(shape, generator=generator, device="cuda")).to(dtype)
    reference = reference.to(dtype)
    # Four requests, two of them with a cached prefix, as in a chunk of prefill.
    new = [shape[0] // 4] * 4
    where = torch.from_numpy(condition_numbers("extend", new, [0, 0, 512, 512])).cuda()
    bytes_read = 2 * out.numel() * out.element_size()
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    copies = torch.empty_like(out), torch.empty_like(out)

    def copy() -> None:
        copies[0].copy_(out)
        copies[1].copy_(reference)

    def in_torch(layer: LayerSums) -> Tensor:
        sums = query_sums(out, reference)[..., : len(DISTANCE)]
        layer.add(sums, where)
        return relative_l1(sums).flatten().max(0).values

    truth = LayerSums(shape[1], torch.device("cuda"))
    sums = query_sums(out, reference)[..., : len(DISTANCE)]
    truth.add(sums, where)
    worst = relative_l1(sums).flatten()
    del sums
    table = Table(
        "path", "us", "GB/s", "of copy", "us a call, launches included", "sums", "worst query", title=f"{shape} {dtype}"
    )

    def row(name: str, run: Callable[[LayerSums], object], moved: int, notes: tuple[str, str]) -> None:
        layer = LayerSums(shape[1], torch.device("cuda"))
        run(layer)  # compiles
        took = seconds(partial(run, layer), repetitions, flush)
        torch.cuda.synchronize()
        begun = time.monotonic()
        for _ in range(repetitions):
            run(layer)
        torch.cuda.synchronize()
        each = (time.monotonic() - begun) / repetitions
        speed = moved / took
        table.add_row(
            name, f"{took * 1e6:.1f}", f"{speed / 1e9:.0f}", f"{speed / copied:.2f}", f"{each * 1e6:.1f}", *notes
        )

    copied = 2 * bytes_read / seconds(copy, repetitions, flush)
    row("copy_", lambda layer: copy(), 2 * bytes_read, ("", ""))
    layer = LayerSums(shape[1], torch.device("cuda"))
    in_torch(layer)
    row("PyTorch (row_errors, add)", in_torch, bytes_read, (mistakes(layer, truth), ""))
    for tile, warps in dict.fromkeys([(TILE, WARPS), *(TILES if sweep else ())]):
        layer = LayerSums(shape[1], torch.device("cuda"))

        def run(layer: LayerSums, tile: int = tile, warps: int = warps) -> tuple[Tensor, Tensor]:
            return unpack(reduce(out, reference, where, layer._sums, tile, warps))

        value, at = run(layer)
        off = abs(float(value) / float(worst.max()) - 1)
        right = off < 1e-5 and float(worst[at]) >= float(worst.max()) * (1 - 1e-5)
        notes = mistakes(layer, truth), f"{'right' if right else 'WRONG'}: off by {off:.0e}"
        shown = " (as shipped)" if (tile, warps) == (TILE, WARPS) else ""
        row(f"Triton, tile {tile}, {warps} warps{shown}", run, bytes_read, notes)
    CONSOLE.print(table)


def attention(top_left: bool, call: AttentionCall) -> Tensor:
    """PyTorch's attention with a right-aligned mask or, as SageAttention was called, a top-left one."""
    outs = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        mask = Mask().visible(
            torch.arange(q.shape[2], device=q.device), q.shape[2], q.shape[2] if top_left else k.shape[2]
        )
        mask = torch.nn.functional.pad(mask, (0, k.shape[2] - mask.shape[1]))
        outs.append(scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def naming(device: str, layers: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Print the time it takes to name the cause from synthetic calls, and the name."""
    calls = [
        call_of([lens], heads, head_dim, dtype, device, seed=layer * len(CONDITIONS) + i).with_spec(layer=layer)
        for layer in range(layers)
        for i, lens in enumerate(CONDITIONS)
    ]
    what = f"{layers} layers x {len(CONDITIONS)} conditions, {heads[0]} heads on {heads[1]}, head_dim {head_dim}, {dtype}, {device}"
    table = Table("kernel", "time", "named after s", "all after s", "worst / bound", "findings", title=what)
    kernels: dict[str, Kernel] = {"top-left": partial(attention, True), "correct": partial(attention, False)}
    for name, kernel in kernels.items():
        for turn in ("first", "second"):
            begun = time.perf_counter()
            run, findings, first_s = diagnose_kernel(kernel, calls)
            seconds = time.perf_counter() - begun
            worst = max(result.worst for result in run.results)
            named = "-" if first_s is None else f"{first_s:.2f}"
            said = "; ".join(f"{f.where}: {f.diagnosis}" for f in findings) or "none"
            table.add_row(name, turn, named, f"{seconds:.2f}", f"{worst:.2g}", said)
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu: only the second table")
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes of the kernel")
    args = parser.parse_args()
    if args.device == "cuda":
        CONSOLE.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        for shape in SHAPES:
            reduction(shape, torch.bfloat16, args.repetitions, args.sweep)
        reduction(SHAPES[0], torch.float32, args.repetitions, args.sweep)
        naming("cuda", 32, (32, 8), 128, torch.bfloat16)
    naming(args.device, 4, (4, 2), 64, torch.float32)


if __name__ == "__main__":
    main()
