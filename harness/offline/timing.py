"""Timing a kernel against a reference kernel on recorded calls, without a server, and checking it on the same calls.

Speed without correctness is not reported: a kernel with a wrong mask may be fast because it reads fewer keys.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, default_device
from assay.harness.attention.kernels import declaration, declares
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import read_pack
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import compute, measure, run_and_repeat
from assay.harness.offline.roofline import limit_s, work_of
from assay.harness.offline.timing_result import KernelTiming, ShapeTiming
from assay.harness.stats.ratio import MIN_RATIOS, RatioDecision, decide_ratios
from assay.harness.verdict import Finding, kernel_verdict

WARM_UP = 3
"""Untimed runs of each kernel on each shape, in which Triton compiles and tunes."""
MAX_REPEATS = 200
_L2_BYTES = 256 * 2**20


TORCH_SDPA = f"{__name__}:torch_sdpa"
"""The kernel that others are compared with unless one is named."""


@declares(about="PyTorch's scaled_dot_product_attention, one sequence at a time")
def torch_sdpa(call: AttentionCall) -> Tensor:
    """Attention by PyTorch's own kernels, one sequence at a time; on a GPU, FlashAttention for half precision.

    It is slower than a packed kernel for batches of many short sequences.
    """
    return _sdpa(call, call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist())


def _sdpa(call: AttentionCall, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    outs = []
    for (q0, q1), (k0, k1) in zip(pairwise(queries), pairwise(keys), strict=True):
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
        masked = call.causal and q1 - q0 > 1
        uncached = q1 - q0 == k1 - k0
        mask = causal_lower_right(q1 - q0, k1 - k0) if masked and not uncached else None
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=masked and uncached,
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def time_kernels(
    candidate: Kernel,
    reference: Kernel,
    calls: Sequence[AttentionCall],
    bound: float,
    alpha: float,
    seconds: float,
    reproduce: str,
    names: tuple[str, str],
) -> KernelTiming:
    """Time a kernel against a reference kernel on recorded calls, and compare it with the oracle on the same calls.

    For each shape, the reference, the candidate and both again run in random order, repeatedly; the ratios are those of paired
    runs. On a GPU, CUDA events time the kernels' own work, and the L2 cache is overwritten before each run, as in Triton's
    ``do_bench``; on a CPU, the wall clock is used.

    Args:
        candidate: kernel under test.
        reference: kernel to compare with.
        calls: calls on the device to be timed.
        bound: largest ratio that passes.
        alpha: error rate; see `assay.harness.stats.ratio.decide_ratios`.
        seconds: time for all shapes, divided evenly; each is timed at least `MIN_RATIOS` times.
        reproduce: a command that reproduces the findings.
        names: of candidate and reference.

    Raises:
        UsageError: there is no call of a phase that the candidate declares, or every one was refused; or a package that a
            kernel imports is not installed.
    """
    phases = declaration(candidate).phases
    groups = _by_shape([call for call in calls if call.phase in phases])
    if not groups:
        raise UsageError(
            f"There is no {' or '.join(phases)} call.",
            "calls that the candidate computes",
            "record a pack with such calls",
        )
    device = calls[0].q.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    refused: list[str] = []
    timed: list[tuple[list[AttentionCall], list[Times], float]] = []
    rng, run = random.Random(0), _clock(device)
    for group in groups:
        try:
            worst = max(_own_error(candidate, call) for call in group)
            timed.append((group, _time(candidate, reference, group[0], run, rng, seconds / len(groups)), worst))
        except KernelRefused as error:
            refused.append(f"{_where(group[0])}: {error}")
    if not timed:
        raise UsageError(
            f"Every call was refused: {refused[0]}.", "calls that both kernels compute", "record a pack with such calls"
        )
    decisions = decide_ratios([_logs(times) for _, times, _ in timed], bound, alpha)
    scheme = declaration(candidate).noise
    shapes = tuple(
        _shape(group, times, worst, decision, name, scheme)
        for (group, times, worst), decision in zip(timed, decisions, strict=True)
    )
    findings = _findings(candidate, shapes, [group for group, _, _ in timed], reproduce)
    return KernelTiming(
        verdict=kernel_verdict(findings, refused, [shape.verdict for shape in shapes]),
        candidate=names[0],
        reference=names[1],
        device=name,
        bound=bound,
        shapes=shapes,
        refused=tuple(refused),
        findings=tuple(findings),
    )


def calls_of(pack: Path) -> list[AttentionCall]:
    """The calls of a replay pack, on the GPU if there is one.

    Raises:
        UsageError: `pack` is no pack.
        EvidenceError: it is damaged.
    """
    device = default_device()
    return [one.call.to(device) for one in read_pack(pack)]


def _by_shape(calls: Sequence[AttentionCall]) -> list[list[AttentionCall]]:
    groups: dict[object, list[AttentionCall]] = {}
    for call in calls:
        key = (
            call.phase,
            *call.lens_q,
            -1,
            *call.lens_k,
            call.q.shape[1:],
            call.k.shape[1:],
            call.q.dtype,
            call.causal,
        )
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _own_error(kernel: Kernel, call: AttentionCall) -> float:
    return measure(call, compute(kernel, call.clone()), declaration(kernel).noise).worst


Times = tuple[float, float, float, float]
"""Seconds of one repeat: reference, candidate, reference again, candidate again."""
Run = Callable[[], Tensor]
Clock = Callable[[Run], float]


def _clock(device: torch.device) -> Clock:
    """A function that runs something once and returns its duration in seconds."""

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


def _time(
    candidate: Kernel, reference: Kernel, call: AttentionCall, run: Clock, rng: random.Random, seconds: float
) -> list[Times]:
    """Seconds by repeat."""
    # Each kernel gets a copy: one that overwrites its inputs would change the other's work.
    turns = [_run(reference, call.clone()), _run(candidate, call.clone())]
    for turn in turns:
        for _ in range(WARM_UP):
            run(turn)
    found: list[Times] = []
    begun = time.monotonic()
    while len(found) < MIN_RATIOS or (len(found) < MAX_REPEATS and time.monotonic() - begun < seconds):
        taken = [0.0, 0.0, 0.0, 0.0]
        for at in rng.sample(range(4), 4):
            taken[at] = run(turns[at % 2])
        found.append((taken[0], taken[1], taken[2], taken[3]))
    return found


def _run(kernel: Kernel, call: AttentionCall) -> Run:
    if kernel is not torch_sdpa:
        return lambda: kernel(call)
    # Reading lengths from a GPU synchronises with it, which is not part of the reference's work.
    edges = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return lambda: _sdpa(call, *edges)


def _logs(times: Sequence[Times]) -> tuple[list[float], list[float]]:
    logs = torch.tensor(times, dtype=torch.float64).log()
    slower = torch.stack(
        [logs[:, 1] - logs[:, 0], logs[:, 3] - logs[:, 2]], dim=1
    ).flatten()  # in the order of measurement
    return slower.tolist(), (logs[:, 2] - logs[:, 0]).tolist()


def _shape(
    group: Sequence[AttentionCall],
    times: Sequence[Times],
    worst: float,
    decision: RatioDecision,
    device: str,
    scheme: str,
) -> ShapeTiming:
    call, work = group[0], work_of(group[0])
    ours = statistics.median(one for first, _, again, _ in times for one in (first, again))
    theirs = statistics.median(one for _, first, _, again in times for one in (first, again))
    limits = limit_s(call, device), limit_s(call, device, scheme)
    return ShapeTiming(
        phase=call.phase,
        new=tuple(call.lens_q),
        prefix=tuple(call.prefixes),
        heads=(call.q.shape[1], call.k.shape[1]),
        head_dim=call.q.shape[2],
        dtype=str(call.q.dtype).removeprefix("torch."),
        layers=tuple(sorted({one.layer for one in group})),
        reference_s=ours,
        candidate_s=theirs,
        repeats=len(times),
        ratio=decision.ratio.value,
        low=decision.ratio.interval.low,
        high=decision.ratio.interval.high,
        floor=decision.floor.value,
        verdict=decision.verdict,
        reference_tflops=work.flops / ours / 1e12,
        candidate_tflops=work.flops / theirs / 1e12,
        reference_share=limits[0] and limits[0] / ours,
        candidate_share=limits[1] and limits[1] / theirs,
        own_error=worst if math.isfinite(worst) else None,
        right=worst <= 1,
    )


def _where(call: AttentionCall) -> str:
    return f"{call.phase}, new {call.lens_q}, prefix {call.prefixes}"


def _findings(
    candidate: Kernel, shapes: Sequence[ShapeTiming], groups: Sequence[Sequence[AttentionCall]], reproduce: str
) -> list[Finding]:
    found: list[Finding] = []
    for shape in shapes:
        share = shape.candidate_share
        if share is not None and share > 1:
            found.append(
                Finding(
                    id="impossible-speed",
                    title="faster than the device",
                    severity="serious",
                    where=f"{shape.phase}, new {list(shape.new)}, prefix {list(shape.prefix)}",
                    diagnosis=f"The candidate was {share:.2f} times faster than the device's limits allow for this work, so it did "
                    "not do all of it.",
                    evidence=(f"{1e6 * shape.candidate_s:.1f} us, {shape.candidate_tflops:.0f} TFLOP/s",),
                    reproduce=reproduce,
                )
            )
    wrong = [(shape, group) for shape, group in zip(shapes, groups, strict=True) if not shape.right]
    if not wrong:
        return found
    faster = [shape for shape, _ in wrong if shape.high < 1]
    # The two cheapest shapes are enough to name a bug.
    cheap = sorted((group for _, group in wrong), key=lambda group: work_of(group[0]).flops)[:2]
    named = diagnose(run_and_repeat(candidate, [group[0] for group in cheap]), reproduce)
    best = min((shape.ratio for shape in faster), default=1.0)
    speed = (
        f"On {len(faster)} of these shapes it takes less time, down to {best:.2f} of the reference's: not a speed-up, since "
        "it does different work."
        if faster
        else "Its times are for different work."
    )
    errors = [shape.own_error for shape, _ in wrong]
    finite = [error for error in errors if error is not None]
    evidence = [f"own error up to {max(finite):.3g} times its bound"] if finite else []
    evidence += ["an output is not finite"] if None in errors else []
    found.append(
        Finding(
            id="wrong-kernel-timed",
            title="speed of a wrong kernel",
            severity="serious",
            where=f"{len(wrong)} of {len(shapes)} shapes",
            diagnosis=f"The candidate is wrong on the calls that were timed. {speed}",
            evidence=(*evidence, *(finding.diagnosis for finding in named)),
            reproduce=reproduce,
        )
    )
    return found
