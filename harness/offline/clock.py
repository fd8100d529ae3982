"""Clocks for kernels: seconds of two kernels on one call, in interleaved order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, Outputs, PreparedKernel
from assay.harness.attention.sdpa import prepared, torch_sdpa
from assay.harness.stats.ratio import MIN_RATIOS

_WARM_UP = 3
"""Untimed runs of each kernel on each shape, in which Triton compiles and tunes."""
_MAX_REPEATS = 200
_L2_BYTES = 256 * 2**20

Times = tuple[float, float, float, float]
"""Seconds of one repeat: reference, candidate, reference again, candidate again."""
Run = Callable[[], "Tensor | Outputs"]
Clock = Callable[[Run], float]


def clock(device: torch.device) -> Clock:
    """Make a function that runs something once and returns its duration in seconds."""

    def on_cpu(run: Run) -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    if device.type != "cuda":
        return on_cpu
    scratch = torch.empty(_L2_BYTES, dtype=torch.int8, device=device)

    def on_gpu(run: Run) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        scratch.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return on_gpu


def time_pair(
    candidate: Kernel, reference: Kernel, call: AttentionCall, run: Clock, rng: random.Random, seconds: float
) -> list[Times]:
    """Time a pair of kernels, in seconds by repeat. What a kernel prepares for all layers of a pass is not timed."""
    with ExitStack() as stack:
        # Each kernel gets a copy: one that overwrites its inputs would change the other's work.
        turns = [_run(kernel, call.clone(), stack) for kernel in (reference, candidate)]
        for turn in turns:
            for _ in range(_WARM_UP):
                run(turn)
        times: list[Times] = []
        begun = time.monotonic()
        while len(times) < MIN_RATIOS or (len(times) < _MAX_REPEATS and time.monotonic() - begun < seconds):
            taken = [0.0, 0.0, 0.0, 0.0]
            for at in rng.sample(range(4), 4):
                taken[at] = run(turns[at % 2])
            times.append((taken[0], taken[1], taken[2], taken[3]))
    return times


def _run(kernel: Kernel, call: AttentionCall, stack: ExitStack) -> Run:
    if kernel is torch_sdpa:
        return prepared(call)
    return stack.enter_context(kernel.prepared(call)) if isinstance(kernel, PreparedKernel) else lambda: kernel(call)
