"""Timing a kernel against a reference kernel on recorded calls, without a server, and checking it on the same calls.

Speed without correctness is not reported: a kernel with a wrong mask may be fast because it reads fewer keys.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, Outputs, PreparedKernel, default_device
from assay.harness.attention.kernels import declaration
from assay.harness.attention.sdpa import prepared, torch_sdpa
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import read_pack
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import compute, measure, run_and_repeat
from assay.harness.offline.roofline import limit_s, work_of
from assay.harness.offline.timing_result import KernelTiming, ShapeTiming
from assay.harness.stats.ratio import MIN_RATIOS, RatioDecision, decide_ratios
from assay.harness.text import two_digits
from assay.harness.verdict import Finding, kernel_verdict

_WARM_UP = 3
"""Untimed runs of each kernel on each shape, in which Triton compiles and tunes."""
_MAX_REPEATS = 200
_L2_BYTES = 256 * 2**20

Times = tuple[float, float, float, float]
"""Seconds of one repeat: reference, candidate, reference again, candidate again."""
Run = Callable[[], "Tensor | Outputs"]
Clock = Callable[[Run], float]


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
        seconds: time for all shapes, divided evenly; each is timed at least `assay.harness.stats.ratio.MIN_RATIOS` times.
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
    timed, refused = _timed(candidate, reference, groups, seconds, device)
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
        refused=refused,
        findings=tuple(findings),
    )


def _timed(
    candidate: Kernel,
    reference: Kernel,
    groups: Sequence[Sequence[AttentionCall]],
    seconds: float,
    device: torch.device,
) -> tuple[list[tuple[Sequence[AttentionCall], list[Times], float]], tuple[str, ...]]:
    """Time each group that both kernels compute, with the candidate's worst own error; and return why others were refused."""
    refused: list[str] = []
    timed: list[tuple[Sequence[AttentionCall], list[Times], float]] = []
    rng, run = random.Random(0), _clock(device)
    for group in groups:
        try:
            worst = max(_own_error(candidate, call) for call in group)
            timed.append((group, _time_pair(candidate, reference, group[0], run, rng, seconds / len(groups)), worst))
        except KernelRefused as error:
            call = group[0]
            refused.append(f"{call.phase}, new {call.lens_q}, prefix {call.prefixes}: {error}")
    if not timed:
        raise UsageError(
            f"Every call was refused: {refused[0]}.", "calls that both kernels compute", "record a pack with such calls"
        )
    return timed, tuple(refused)


def calls_of(pack: Path) -> list[AttentionCall]:
    """Read the calls of a replay pack, on the GPU if there is one.

    Raises:
        UsageError: `pack` is not a pack.
        EvidenceError: it is damaged.
    """
    device = default_device()
    return [recorded.call.to(device) for recorded in read_pack(pack)]


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
            call.spec.mask,
        )
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _own_error(kernel: Kernel, call: AttentionCall) -> float:
    return measure(call, compute(kernel, call.clone()), declaration(kernel).noise).worst


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
    ours = statistics.median(seconds for first, _, again, _ in times for seconds in (first, again))
    theirs = statistics.median(seconds for _, first, _, again in times for seconds in (first, again))
    limits = limit_s(call, device), limit_s(call, device, scheme)
    return ShapeTiming(
        phase=call.phase,
        new=tuple(call.lens_q),
        prefix=tuple(call.prefixes),
        heads=(call.q.shape[1], call.k.shape[1]),
        head_dim=call.q.shape[2],
        dtype=str(call.q.dtype).removeprefix("torch."),
        layers=tuple(sorted({call.layer for call in group})),
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


def _findings(
    candidate: Kernel, shapes: Sequence[ShapeTiming], groups: Sequence[Sequence[AttentionCall]], reproduce: str
) -> list[Finding]:
    findings = [_impossible_speed(shape, reproduce) for shape in shapes if (shape.candidate_share or 0) > 1]
    wrong = [(shape, group[0]) for shape, group in zip(shapes, groups, strict=True) if not shape.right]
    if wrong:
        # The two cheapest shapes are enough to name a bug.
        cheap = sorted((call for _, call in wrong), key=lambda call: work_of(call).flops)[:2]
        named = diagnose(run_and_repeat(candidate, cheap), reproduce)
        findings.append(_wrong_kernel([shape for shape, _ in wrong], len(shapes), named, reproduce))
    return findings


def _impossible_speed(shape: ShapeTiming, reproduce: str) -> Finding:
    return Finding(
        id="impossible-speed",
        title="faster than the device",
        severity="serious",
        where=f"{shape.phase}, new {list(shape.new)}, prefix {list(shape.prefix)}",
        diagnosis=f"The candidate was {shape.candidate_share:.2f} times faster than the device's limits allow for this work, so it "
        "did not do all of it.",
        evidence=(f"{1e6 * shape.candidate_s:.1f} us, {shape.candidate_tflops:.0f} TFLOP/s",),
        reproduce=reproduce,
    )


def _wrong_kernel(wrong: Sequence[ShapeTiming], shapes: int, named: Sequence[Finding], reproduce: str) -> Finding:
    """Make the finding on shapes whose own error is out of bounds, of all `shapes`. `named` names the bug."""
    speed = "Its times are for different work."
    if faster := [shape.ratio for shape in wrong if shape.high < 1]:
        speed = (
            f"On {len(faster)} of these shapes it takes less time, down to {min(faster):.2f} of the reference's: not a speed-up, "
            "since it does different work."
        )
    errors = [shape.own_error for shape in wrong]
    finite = [error for error in errors if error is not None]
    evidence = [f"own error up to {two_digits(max(finite))} times its bound"] if finite else []
    evidence += ["an output is not finite"] if None in errors else []
    return Finding(
        id="wrong-kernel-timed",
        title="speed of a wrong kernel",
        severity="serious",
        where=f"{len(wrong)} of {shapes} shapes",
        diagnosis=f"The candidate is wrong on the calls that were timed. {speed}",
        evidence=(*evidence, *(finding.sentence for finding in named)),
        reproduce=reproduce,
    )


def _clock(device: torch.device) -> Clock:
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


def _time_pair(
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
