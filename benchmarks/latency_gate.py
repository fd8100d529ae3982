"""False alarms and detections of the latency gate, on a pair of servers with the same kernel.

    python benchmarks/latency_gate.py --runs 50                   # false alarms
    python benchmarks/latency_gate.py --sleep 0.05 --repeats 5    # detections of a wait of 5 % of a decode step
    python benchmarks/latency_gate.py --fresh 10                  # ten pairs of equal servers, each started again

The pair is started once and timed repeatedly. In the candidate, the kernel waits for a share of the decode step in the last layer
of each pass (busily, since a sleep is too coarse): a fault that affects nothing but latency.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from assay.harness.bench.bench_plan import BenchPlan, plan_bench, timed_spec
from assay.harness.bench.drive import make_engines, measure_servers
from assay.harness.collect.plan import Plan, prepare
from assay.harness.collect.servers import running
from assay.harness.config import make_spec, recorded_spec
from assay.harness.engines.base import Engine
from assay.harness.evidence.bench_folder import BenchFolder
from assay.harness.judge.latency import judge_bench
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.progress import ProgressDisplay
from assay.harness.sides import Role

WAIT = "ASSAY_LATENCY_GATE_WAIT"
KERNEL = f'''
import os, time
from pathlib import Path
import numpy as np
from assay.harness.attention.sdpa import torch_sdpa

WAIT = np.memmap(os.environ["{WAIT}"], np.float64, "r", shape=(2,))
SLOW = Path(os.environ.get("ASSAY_EVIDENCE", "")).name == "candidate"


def forward(call):
    out = torch_sdpa(call)
    if call.layer == int(WAIT[1]):
        if call.q.is_cuda:  # in both servers, so that they differ only in the wait
            import torch
            torch.cuda.synchronize()
        until = time.perf_counter() + WAIT[0] * SLOW
        while time.perf_counter() < until:
            pass
    return out
'''
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--backend", help="backend of both servers; by default the kernel that can wait")
    parser.add_argument("--runs", type=int, default=0, help="measurements without a wait")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        help="shape of a load with two requests in flight; by default short; may be repeated",
    )
    parser.add_argument(
        "--run-seconds", type=float, default=5.0, help="duration of each --runs or --fresh measurement, in seconds"
    )
    parser.add_argument(
        "--sleep", type=float, action="append", default=[], help="wait, as a share of the decode step; may be repeated"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="duration of a measurement with a wait, in seconds"
    )
    parser.add_argument("--fresh", type=int, default=0, help="pairs of servers to start and measure without a wait")
    parser.add_argument("--repeats", type=int, default=1, help="measurements with each wait")
    parser.add_argument("--out", type=Path, help="a new folder for all timings")
    args = parser.parse_args()
    args.shape = args.shape or ["short"]
    if args.backend and args.sleep:
        parser.error("--sleep needs the kernel that can wait: remove --backend")
    with tempfile.TemporaryDirectory(prefix="assay-latency-gate-") as made:
        folder = (args.out or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "waiting_kernel.py").write_text(KERNEL)
        wait = np.memmap(folder / "wait", np.float64, "w+", shape=(2,))
        os.environ[WAIT] = str(folder / "wait")
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
        sys.path.append(str(folder))
        name = args.backend or "waiting_kernel:forward"
        flags = {"device": args.device, "model": args.model, "reference": name, "candidate": name}
        spec = timed_spec(make_spec(flags | {"engine_arg": tuple(args.engine_arg)}))
        run = prepare(spec.changed(greedy_prompts=0))
        config = json.loads((run.model / "config.json").read_text())
        wait[1] = config["num_hidden_layers"] - 1
        if args.fresh:
            between(run, args, folder)
        else:
            experiment(run, args, wait, folder)


def planned(run: Plan, args: argparse.Namespace, seconds: float, seed: int = 0) -> BenchPlan:
    loads = {"latency_shapes": tuple(args.shape), "latency_concurrency": (2,), "latency_seconds": seconds}
    return plan_bench(replace(run, spec=run.spec.model_copy(update=loads)), seed)


def timed(plan: BenchPlan, engines: dict[Role, Engine], folder: Path) -> BenchFolder:
    out = BenchFolder.new(folder)
    with ProgressDisplay(Console(quiet=True)) as display:
        measure_servers(plan, engines, out, display)
    out.seal()
    return out


def between(run: Plan, args: argparse.Namespace, folder: Path) -> None:
    """Measure pairs of equal servers, each newly started: the interval of one pair does not cover the spread between processes."""
    console = Console(width=200)
    ratios: list[float] = []
    for number in range(args.fresh):
        plan = planned(run, args, args.run_seconds, number)
        engines = make_engines(plan, BenchFolder.new(folder / f"pair-{number}"))
        with running(list(engines.values()), run.spec.device):
            out = timed(plan, engines, folder / f"pair-{number}" / "timed")
        line(console, f"pair {number}", out)
        ratios += [row.ratio or math.nan for row in judge_bench(out).rows if row.metric == "itl"]
    shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    console.print(f"inter-token ratio of {args.fresh} pairs of equal servers: {shown}", highlight=False, soft_wrap=True)


def experiment(run: Plan, args: argparse.Namespace, wait: np.ndarray, folder: Path) -> None:
    """Start the pair, time it repeatedly, and print one line per measurement."""
    engines = make_engines(planned(run, args, args.seconds), BenchFolder.new(folder / "servers"))
    console = Console(width=200)

    def time_it(seconds: float, seed: int, name: str) -> BenchFolder:
        return timed(planned(run, args, seconds, seed), engines, folder / "servers" / name)

    with running(list(engines.values()), run.spec.device):
        first = judge_bench(time_it(12.0, 0, "first"))
        if not first.loads[0].rounds:
            sys.exit("Only warm-up rounds in 12 s: this machine is too slow or too busy to measure anything.")
        step = next(row.reference_s for row in first.rows if row.metric == "itl")
        console.print(f"decode step {1e3 * step:.3f} ms")
        same: list[dict[float, str]] = []
        for number in range(args.runs):
            out = time_it(args.run_seconds, number + 1, f"same-{number}")
            same.append(line(console, f"same {number}", out))
        caught: dict[float, Counter[float]] = {share: Counter() for share in args.sleep}
        for number in range(args.repeats):
            for share in args.sleep:
                wait[0] = share * step
                out = time_it(args.seconds, int(1e4 * share) + number, f"wait-{share}-{number}")
                said = line(console, f"wait {100 * share:g} % of the step", out)
                caught[share].update(bound for bound, verdict in said.items() if verdict == "regression")
                wait[0] = 0.0
        if args.runs:
            alarms = Counter(bound for said in same for bound, verdict in said.items() if verdict == "regression")
            shown = ", ".join(f"{alarms[bound]} at {bound:g}" for bound in BOUNDS)
            console.print(f"{args.runs} runs of the same kernel twice; false alarms: {shown}", highlight=False)
        if args.sleep:
            table = Table("wait", *(f"bound {bound:g}" for bound in BOUNDS), title=f"caught in {args.repeats} runs")
            for share, counts in caught.items():
                table.add_row(f"{100 * share:g} %", *(str(counts[bound]) for bound in BOUNDS))
            console.print(table)


def line(console: Console, what: str, out: BenchFolder) -> dict[float, str]:
    """Print a measurement, and return the verdict of its ratios for each bound."""
    said = {bound: judged(out, bound) for bound in BOUNDS}
    result = said[1.10]
    values = {
        metric: [(row.ratio or math.nan, row.high or math.inf) for row in result.rows if row.metric == metric]
        for metric in ("ttft", "itl", "e2e", "throughput")
    }
    middle = ", ".join(
        f"{metric} {np.median([ratio for ratio, _ in found]):.3f}"
        f" (+-{100 * np.median([high / ratio - 1 for ratio, high in found]):.1f} %)"
        for metric, found in values.items()
    )
    found = ", ".join(f"{bound:g}: {ratios(one)}" for bound, one in said.items())
    console.print(
        f"{what}: {result.rounds - result.warm_up_rounds} rounds; {middle}; {found}", highlight=False, soft_wrap=True
    )
    return {bound: ratios(one).split()[0] for bound, one in said.items()}


def judged(out: BenchFolder, bound: float) -> LatencyResult:
    """The result with a bound, which is written into the manifest."""
    manifest = out.manifest()
    out.write_manifest(
        manifest.model_copy(
            update={"spec": recorded_spec(manifest.spec).changed(latency_bound=bound).model_dump(mode="json")}
        )
    )
    out.seal()
    return judge_bench(out)


def ratios(result: LatencyResult) -> str:
    """The verdict of the ratios alone, and how many of them share it: one pair has no counters per measurement."""
    verdicts = [row.verdict for row in result.rows]
    for verdict in ("regression", "inconclusive", "pass"):
        if verdict in verdicts:
            return f"{verdict} {verdicts.count(verdict)}/{len(verdicts)}"
    return "nothing"


if __name__ == "__main__":
    main()
