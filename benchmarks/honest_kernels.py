"""How often honest kernels of every noise family are flagged on the op-level matrix, and how far bounds lie above their noise.

The kernels here share no code with the ensemble that bounds come from: they round as real kernels do, without random phases, in
loops over blocks. These check 1,000 whole matrices in processes of one thread and print one table at the end, the families in
turn; every second kernel of a family declares all features, so that its matrix has their calls too. With ``--features``, these
kernels alone, on the calls that ask for a feature:

    python benchmarks/honest_kernels.py --matrices 1000 --processes 16
    python benchmarks/honest_kernels.py --features --matrices 1000 --minutes 60 --device cuda --processes 12

``--minutes``, Ctrl-C or SIGTERM end it earlier, with the table of the matrices that are done.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import TimeoutError as MultiprocessingTimeout
from multiprocessing import get_context
from multiprocessing.pool import IMapIterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from assay.harness.attention.call import FEATURES, AttentionCall, Kernel, Outputs
from assay.harness.attention.declaration import declaration, declares
from assay.harness.attention.matrix import cases
from assay.harness.attention.matrix_data import excluded
from assay.harness.attention.noise import family as family_of
from assay.harness.attention.oracle import sequences
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.checks.check_findings import MatrixRun
from assay.harness.localize.guard import Guard, run_calls
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.stats.share import clopper_pearson
from assay.harness.text import one_line

RATIOS_OF = 5
"""A fifth of the matrices also measure how far bounds lie above the noise, which simulates every cell, needed or not."""
Rounding = Callable[[Tensor], Tensor]
"""A tensor [heads, tokens, dim] or weights [heads, queries, keys] -> the same, as it is stored."""


def same(x: Tensor) -> Tensor:
    return x


def scaled(x: Tensor, to: Rounding, largest: float, dims: tuple[int, ...]) -> Tensor:
    if not x.numel():  # a sequence without new tokens
        return x
    top = x.abs().amax(dims, keepdim=True)
    scale = torch.where(top == 0, 1.0, top / largest)
    return to(x / scale) * scale


def in_blocks(x: Tensor, to: Rounding, largest: float, block: int) -> Tensor:
    return torch.cat([scaled(part, to, largest, (1, 2)) for part in x.split(block, 1)], 1)


def fp8(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).float()


def tf32(cut: bool, x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits if cut else bits + 0x1000) & ~0x1FFF).view(torch.float32)


E4M3, E5M2 = partial(fp8, torch.float8_e4m3fn), partial(fp8, torch.float8_e5m2)


def temper(scores: Tensor, positions: Tensor, call: AttentionCall) -> Tensor:
    """Temper scores [heads, queries, keys] of queries at these positions."""
    if not (length := call.spec.temperature):
        return scores
    return scores * torch.where(positions > length, positions.float().log() / math.log(length), 1.0)[:, None]


def modified(scores: Tensor, positions: Tensor, call: AttentionCall, fast_tanh: bool) -> Tensor:
    """Cap and temper scores [heads, queries, keys] of queries at these positions."""
    if cap := call.spec.softcap:
        capped = (scores / cap).tanh()
        if fast_tanh:  # tanh.approx; in float32, as Triton kernels without a tanh compute it
            capped = tf32(False, capped) if call.q.dtype.itemsize == 2 else 2 * torch.sigmoid(2 * scores / cap) - 1
        scores = cap * capped
    return temper(scores, positions, call)


def stored_in_float(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """K and V in float32, from what is stored if a call has that."""
    if call.stored is None:
        return call.k.float(), call.v.float()
    return call.stored.k.float() * call.stored.k_scale, call.stored.v.float() * call.stored.v_scale


@dataclass(frozen=True)
class Blocked:
    """Attention in blocks of keys, as FlashAttention computes it, or in splits that are merged, as FlashDecoding does."""

    block: int = 64
    split: bool = False
    backwards: bool = False
    q: Rounding = same
    k: Rounding = same
    v: Rounding = same
    p: Rounding | None = None
    operand: Rounding = same
    smooth: str = ""
    fp16_sums: bool = False
    fast_tanh: bool = False
    page: int = 0
    """Tokens of the pages that are loaded whole: behind a sequence they hold NaN, which the mask takes out of the scores."""
    merged: bool = False
    """Whether the splits are the cached keys and the new ones, each of whose outputs is stored in the call's dtype."""

    def of_values(self, weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply the weights of some keys [heads, rows, keys] with their values [heads, keys, head_dim_v]."""
        rounded = self.operand(weights)
        if self.p is not None:
            rounded = self.p(weights)
        elif dtype != torch.float32:
            rounded = weights.to(dtype).float()
        product = rounded @ v
        if self.fp16_sums:
            product = product.half().float()
        if self.merged:
            total = weights.sum(-1, keepdim=True)
            product = (product / total.clamp(min=1e-30)).to(dtype).float() * total
        return product

    def __call__(self, call: AttentionCall) -> Outputs:
        group = call.q.shape[1] // call.k.shape[1]
        mean = call.k.float().mean(0)[:, None]
        all_k, all_v = stored_in_float(call)
        store_k = self.k if call.stored is None or self.q is not same else same
        store_v = self.v if call.stored is None or self.p is not None else same
        smooth = self.smooth
        whole_scores = bool(smooth and (call.spec.softcap or call.spec.sinks))
        outs, lses = [], []
        for (rows_q, rows_k), first in zip(sequences(call), call.prefixes, strict=True):
            q, k, v = (t.float().transpose(0, 1) for t in (call.q[rows_q], all_k[rows_k], all_v[rows_k]))
            taken = k.new_zeros(k.shape[0], 1, k.shape[2])
            if smooth and k.numel():
                taken = mean if smooth == "batch" else k.mean(1, keepdim=True)
                k = (k - taken).to(call.k.dtype).float()
            given = q
            q, k, v = self.operand(self.q(q)), self.operand(store_k(k)), self.operand(store_v(v))
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            length = k.shape[1]
            if self.page:
                k, v = (pad(t, (0, 0, 0, -length % self.page), value=nan) for t, nan in ((k, math.nan), (v, 0.0)))
            rows = torch.arange(q.shape[1], device=q.device)
            distances = rows[:, None] + first - torch.arange(k.shape[1], device=q.device)
            seen = distances > rows[:, None] + first - length if not call.causal else distances >= 0
            if call.spec.mask.window:
                seen = seen & (distances < call.spec.mask.window)
            # What smoothing took from all scores of a query is added to its log-sum-exp.
            shift = call.scale * (given @ taken.repeat_interleave(group, 0).transpose(1, 2))
            borders = [0, max(first, 0), k.shape[1]] if self.merged else [*range(0, k.shape[1], self.block), k.shape[1]]
            splits = [slice(start, stop) for start, stop in pairwise(borders) if stop > start]
            parts = []
            top = q.new_full((*q.shape[:2], 1), -math.inf)
            total, sums = torch.zeros_like(top), q.new_zeros(*q.shape[:2], v.shape[2])
            for keys in reversed(splits) if self.backwards else splits:
                scores = call.scale * (q @ k[:, keys].transpose(1, 2))
                if self.fp16_sums:
                    scores = scores.half().float()
                if whole_scores:  # it is capped, or compared with a sink
                    scores = scores + shift
                scores = modified(scores, rows + first, call, self.fast_tanh)
                scores = scores.masked_fill(~seen[:, keys], -math.inf)
                own = scores.amax(-1, keepdim=True)
                new = own if self.split else torch.maximum(top, own)
                safe = torch.where(new.isinf(), 0.0, new)
                weights = (scores - safe).exp()
                product = self.of_values(weights, v[:, keys], call.q.dtype)
                if self.split:
                    parts.append((own, weights.sum(-1, keepdim=True), product))
                    continue
                fade = (torch.where(top.isinf(), -math.inf, top - safe)).exp()
                total, sums, top = total * fade + weights.sum(-1, keepdim=True), sums * fade + product, new
                if self.fp16_sums:
                    sums = sums.half().float()
            if parts:
                top = torch.stack([own for own, _, _ in parts]).amax(0)
                safe = torch.where(top.isinf(), 0.0, top)  # of queries that see no key
                total = sum((own - safe).exp() * part for own, part, _ in parts)  # type: ignore[assignment]
                sums = sum((own - safe).exp() * part for own, _, part in parts)  # type: ignore[assignment]
            if call.spec.sinks:
                sinks = torch.tensor(call.spec.sinks, device=q.device)[:, None, None]
                highest = torch.maximum(top, sinks)
                sums, total = sums * (top - highest).exp(), total * (top - highest).exp() + (sinks - highest).exp()
                top = highest
            outs.append((sums / total).to(call.q.dtype).transpose(0, 1))
            taken_off = 0.0 if whole_scores else temper(shift, rows + first, call)
            lses.append((total.log() + top + taken_off)[..., 0].transpose(0, 1))
        nowhere = call.q.new_full((call.spec.padded_rows, call.q.shape[1], call.v.shape[2]), math.nan)
        return Outputs(torch.cat([*outs, nowhere]), torch.cat([*lses, nowhere[..., 0].float()]))


def plain(call: AttentionCall) -> Outputs:
    """Plain attention in float32, rounded once."""
    wide = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    found = Blocked(block=10**9)(wide)
    return Outputs(found.out.to(call.q.dtype), found.lse)


def per_token(to: Rounding, largest: float) -> Rounding:
    return partial(scaled, to=to, largest=largest, dims=(2,))


def per_tensor(to: Rounding, largest: float) -> Rounding:
    return partial(scaled, to=to, largest=largest, dims=(0, 1, 2))


def per_head(to: Rounding, largest: float) -> Rounding:
    return partial(scaled, to=to, largest=largest, dims=(1, 2))


def blocks(size: int) -> Rounding:
    return partial(in_blocks, to=torch.round, largest=127.0, block=size)


def half(x: Tensor) -> Tensor:
    return x.half().float()


def weights_fp8(x: Tensor) -> Tensor:
    return E4M3(x * 448) / 448


def weights_fp8_unscaled(x: Tensor) -> Tensor:
    return E4M3(x * 256) / 256


INT8_TOKEN = per_token(torch.round, 127.0)
KERNELS: dict[str, list[Kernel]] = {
    "": [
        torch_sdpa, plain, Blocked(64), Blocked(16), Blocked(128, backwards=True), Blocked(32, split=True),
        Blocked(64, split=True), Blocked(1), Blocked(16, page=16),
    ],
    "int8_qk": [
        Blocked(64, q=blocks(128), k=blocks(64), v=half, p=half, smooth="batch"),
        Blocked(64, q=blocks(128), k=blocks(64), v=half, p=half, smooth="sequence"),
        Blocked(32, q=blocks(64), k=blocks(32), v=half, p=half, smooth="sequence", split=True),
        Blocked(128, q=blocks(128), k=blocks(128), v=half, p=half, smooth="batch", backwards=True),
    ],
    "int8_kv": [Blocked(64, k=INT8_TOKEN, v=INT8_TOKEN), Blocked(32, k=INT8_TOKEN, v=INT8_TOKEN, split=True)],
    "fp8_kv": [
        Blocked(64, k=per_tensor(E4M3, 448), v=per_tensor(E4M3, 448)),
        Blocked(16, k=per_head(E4M3, 448), v=per_head(E4M3, 448), split=True),
    ],
    "fp8_e5m2_kv": [Blocked(64, k=E5M2, v=E5M2), Blocked(32, k=E5M2, v=E5M2, split=True)],
    "fp8_pv": [
        Blocked(64, v=per_tensor(E4M3, 448), p=weights_fp8), Blocked(128, v=per_head(E4M3, 448), p=weights_fp8_unscaled),
        Blocked(32, v=per_tensor(E4M3, 448), p=weights_fp8, split=True),
    ],
    "int8_qk_fp8_pv": [
        Blocked(64, q=blocks(128), k=blocks(64), v=per_head(E4M3, 448), p=weights_fp8, smooth="batch"),
        Blocked(128, q=blocks(64), k=blocks(128), v=per_head(E4M3, 448), p=weights_fp8, smooth="sequence"),
    ],
    "tf32": [Blocked(64, operand=partial(tf32, True)), Blocked(64, operand=partial(tf32, False), split=True), Blocked(64)],
    "fp16_accumulation": [Blocked(64, fp16_sums=True), Blocked(32, fp16_sums=True, split=True)],
    "merged_prefix": [Blocked(split=True, merged=True)],
}  # fmt: skip
"""Honest kernels, by the family that they declare."""
FEATURED = {family: [kernel for kernel in kernels if kernel is not torch_sdpa] for family, kernels in KERNELS.items()}
FEATURED[""].append(Blocked(64, fast_tanh=True))
"""Those that compute every feature, and one whose tanh has the error of PTX's tanh.approx, 2**-11."""
DECLARED: dict[str, list[tuple[Kernel, tuple[str, ...]]]] = {
    family: [pair for n, kernel in enumerate(kernels) for pair in ((kernel, ()), (FEATURED[family][n], FEATURES))]
    for family, kernels in KERNELS.items()
}
"""Each kernel with the features that it declares: none, and all of them."""


@dataclass(frozen=True)
class Outcome:
    """One matrix.

    Attributes:
        family: what the kernel declared.
        flagged: ids of its findings.
        worst: worst own error over bound, of a cell.
        query: worst own error over bound of a single query; 0 where none stands out from its cell.
        lse: worst error of a log-sum-exp over its bound; 0 where the kernel declares none.
        ratios: bound over the noise of this kernel, of each call: its worst cell of many queries.
        calls: calls that were compared.
        seconds: time taken.
        seed: of the matrix.
        kernel: number of the kernel in its family in `DECLARED`.
    """

    family: str
    flagged: tuple[str, ...]
    worst: float
    query: float
    lse: float
    ratios: tuple[float, ...]
    calls: int
    seconds: float
    seed: int
    kernel: int


@dataclass(frozen=True)
class Job:
    """A kernel, by its number in `DECLARED`, and the seed of the matrix; `cases` of it at random, or 0 for all."""

    family: str
    kernel: int
    seed: int
    cases: int
    device: str
    features: bool = False


def outcome(job: Job) -> Outcome:
    """Run one kernel on the matrix of a seed, within guards, and find what `assay check` does."""
    start = time.monotonic()
    kernel, asked = DECLARED[job.family][job.kernel]
    declared = declares(noise=job.family, features=asked)(lambda call: kernel(call))
    some = cases(seed=job.seed, size="small", device=job.device, declared=declaration(declared))
    if job.features:
        some = [
            case for case in some
            if case.condition["asked for"] != "nothing" or case.condition["data"].startswith("on the grid")
        ]  # fmt: skip
    noise = family_of(job.family)
    some = [case for case in some if not excluded(noise, case.condition["data"])]
    if job.cases:
        some = random.Random(job.seed).sample(some, min(job.cases, len(some)))
    made, guard = [(case, case.make()) for case in some], Guard(declared)
    run = run_calls(guard, [call for _, call in made], repeats=0)
    flagged = tuple(one.id for one in MatrixRun(run, guard, made, "").findings() if one.severity != "info")
    worst = max(float((one.own / one.bounds).max()) for one in run.results)
    query = max((one.queries[0].excess for one in run.results if one.queries), default=0.0)
    ratios = () if job.seed // 10 % RATIOS_OF else tuple(map(ratio_of, run.results))
    lse = max((float(one.lse_errors.excess) for one in run.results if one.lse_errors is not None), default=0.0)
    seconds = time.monotonic() - start
    return Outcome(job.family, flagged, worst, query, lse, ratios, len(run.results), seconds, job.seed, job.kernel)


def attempted(job: Job) -> Outcome:
    """Run `outcome`; one that raises counts as flagged, and the others go on."""
    start = time.monotonic()
    try:
        return outcome(job)
    except Exception as error:
        raised = one_line(f"{type(error).__name__}: {error}")
        return Outcome(job.family, (raised,), 0.0, 0.0, 0.0, (), 0, time.monotonic() - start, job.seed, job.kernel)


def ratio_of(result: CallResult) -> float:
    """The bound over the own error of a kernel on a call, in the median cell."""
    seen = result.own > 0
    return float((result.limits.bounds / result.own)[seen].median()) if bool(seen.any()) else math.nan


def median_ratio(outcomes: list[Outcome]) -> float:
    found = [ratio for one in outcomes for ratio in one.ratios if not math.isnan(ratio)]
    return statistics.median(found) if found else math.nan


def main() -> None:
    """Run the matrices and print one table at the end, of those that are done by then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrices", type=int, default=1000)
    parser.add_argument("--cases", type=int, default=0, help="cases of each matrix, chosen at random; all by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then, with the matrices that are done")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--features", action="store_true", help="only the calls of the matrix that ask for windows, sinks, ..."
    )
    parser.add_argument("--families", nargs="*", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    jobs = []
    for n in range(given.matrices):
        family = given.families[n % len(given.families)]
        turn, kernels = n // len(given.families), len(DECLARED[family])
        kernel = (2 * turn + 1 if given.features else turn) % kernels
        jobs.append(Job(family, kernel, given.seed + n, given.cases, given.device, given.features))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, outcomes = time.monotonic(), []
    with get_context("spawn").Pool(given.processes, _start_process) as pool:
        try:
            for one in _until(start + 60 * given.minutes, pool.imap_unordered(attempted, jobs)):
                outcomes.append(one)
                if len(outcomes) % 50 == 0:
                    print(_total(outcomes, time.monotonic() - start), flush=True)
        except (KeyboardInterrupt, TimeoutError) as stop:
            for again in (signal.SIGINT, signal.SIGTERM):  # as `timeout` sends it, to the process and to its group
                signal.signal(again, signal.SIG_IGN)
            print(f"stopped ({type(stop).__name__}) with {len(jobs) - len(outcomes)} matrices left out", flush=True)
        print_table(outcomes, given.families, time.monotonic() - start)


def _start_process() -> None:
    """Let the first process alone react to Ctrl-C, and give each of the others one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _until(end: float, found: IMapIterator[Outcome]) -> Iterator[Outcome]:
    """Yield what is found until `end`, by the monotonic clock; a matrix may take long, and a process may be gone.

    Raises:
        TimeoutError: the time is over.
    """
    while True:
        try:
            yield found.next(None if math.isinf(end) else max(0.0, end - time.monotonic()))
        except StopIteration:
            return
        except MultiprocessingTimeout:
            raise TimeoutError from None


def _total(outcomes: list[Outcome], seconds: float) -> str:
    flagged = sum(bool(one.flagged) for one in outcomes)
    return f"{len(outcomes)} matrices, {flagged} flagged, {seconds:.0f} s"


def print_table(outcomes: list[Outcome], families: list[str], seconds: float) -> None:
    """Print one line per family, with the upper end of the 95 % interval of its rate, and one for each flagged matrix."""
    print(
        f"{'family':18s} matrices flagged    at most  worst cell/bound  worst query/bound  worst lse/bound  median of worst  "
        "median bound/noise  calls  seconds"
    )
    for family in (*families, "all"):
        of = [one for one in outcomes if family in (one.family, "all")]
        if not of:
            continue
        flagged = [one for one in of if one.flagged]
        print(
            f"{family or 'exact':18s} {len(of):8d} {len(flagged):7d} "
            f"{clopper_pearson(len(flagged), len(of), 0.05).high:10.2%}  {max(one.worst for one in of):16.2f}  "
            f"{max(one.query for one in of):17.2f}  {max(one.lse for one in of):15.2f}  "
            f"{statistics.median(one.worst for one in of):15.2f}  {median_ratio(of):18.2f}  "
            f"{max(one.calls for one in of):5d}  {statistics.mean(one.seconds for one in of):7.2f}"
        )
        for one in flagged if family != "all" else ():
            ids = ", ".join(one.flagged)
            worst = f"cell {one.worst:.2f}, query {one.query:.2f}, lse {one.lse:.2f}"
            print(f"    seed {one.seed} kernel {one.kernel}: {ids}, worst {worst}")
    print(_total(outcomes, seconds), flush=True)


if __name__ == "__main__":
    main()
