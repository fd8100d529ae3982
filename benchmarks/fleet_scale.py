"""What sweeps and spread certificates cost and gain by size, as one table.

    python benchmarks/fleet_scale.py --only driver --cells 500          # two cores: a small one; needs Ray
    python benchmarks/fleet_scale.py --only driver                      # 10,000 cells of 0.1 s
    python benchmarks/fleet_scale.py --only certify checks              # 16 cores or more
    python benchmarks/fleet_scale.py --only cards                       # two GPUs or more

- driver: a sweep of cells of 0.1 s on a Ray of this machine: the driver's CPU per cell and its memory, Ray's own CPU, and the time
  to the first result. A cell here sleeps and writes a result and a record, as the command of a real one does, and with
  ``--megabytes 100`` as much evidence as `assay run` on the tiny model, in files as large as its recorded calls;
- certify, checks: `assay certify --level op` and a sweep of `assay check`, by workers: the sum of what the examinations or checks
  took over the wall time. All numbers of workers run at the same time where there are as many cores, on one equally loaded machine;
- cards: two cells side by side on this machine, each of which names the GPU that it sees.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import assay, python_path
from rich.console import Console
from rich.table import Table

from assay.harness.evidence.cell import OUT, RESULT, CellRecord, read_cell, write_cell
from assay.harness.evidence.certificate import read_certificate
from assay.harness.files import timestamp
from assay.harness.progress import ProgressDisplay
from assay.harness.sweep import session
from assay.harness.sweep.cell_process import hashes
from assay.harness.sweep.cells import Combination, SweepCell, SweepPlan
from assay.harness.sweep.executor import Executor, Needs, Task, Workplace
from assay.harness.sweep.spec import SweepSpec
from assay.harness.sweep.this_machine import ThisMachine, gpus_here

console = Console(width=150)
PARTS = ("driver", "certify", "checks", "cards")
CELL_S = 0.1
MEGABYTES = int(os.environ.get("FLEET_SCALE_MEGABYTES", "0"))
"""Evidence that a cell writes, in files of one megabyte."""
HONEST = "torch.nn.functional:scaled_dot_product_attention"
UUID = "import torch; print(torch.cuda.get_device_properties(0).uuid, torch.cuda.device_count())"
BUSY = """
import time, torch
x, end = torch.randn(4096, 4096, device="cuda"), time.time() + 10
while time.time() < end:
    (x @ x).sum().item()
"""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    part: str
    what: str
    figure: str
    goal: str = ""


@dataclass(frozen=True)
class SimulatedCell:
    """In place of `cell_process.CellWork`: a cell whose command takes `CELL_S`."""

    key: str
    command: tuple[str, ...]
    axes: Mapping[str, str]
    limits: object
    commit: str = ""

    def __call__(self, place: Workplace) -> CellRecord:
        begun = time.monotonic()
        time.sleep(CELL_S)
        (place.folder / OUT).mkdir()
        for number in range(MEGABYTES):
            (place.folder / OUT / f"{number}.safetensors").write_bytes(os.urandom(10**6))
        (place.folder / RESULT).write_text(json.dumps({"verdict": "pass", "headline": "passed", "rows": [*range(400)]}))
        record = CellRecord(
            key=self.key, command=self.command, axes=dict(self.axes), verdict="pass", seconds=time.monotonic() - begun,
            worker=place.worker, attempts=place.attempt, created=timestamp(), evidence=hashes(place.folder),
        )  # fmt: skip
        write_cell(place.folder, record)
        return record


@dataclass
class Watched:
    """An executor, and when its first task ended."""

    executor: Executor
    first: float = 0.0

    def __enter__(self) -> Watched:
        self.executor.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.executor.__exit__(*exc)

    @property
    def slots(self) -> int:
        return self.executor.slots

    def submit(self, task: Task) -> None:
        self.executor.submit(task)

    def ended(self) -> Iterator:
        for done in self.executor.ended():
            self.first = self.first or time.monotonic()
            yield done


def cpu_of(words: Sequence[str]) -> float:
    """CPU seconds so far of the processes that this one has started and whose command line has one of these words."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().decode(errors="replace")
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and any(word in line for word in words):
            total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def memory_mb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def driver(folder: Path, cells: int, workers: int, megabytes: int) -> list[Row]:
    """A sweep of simulated cells on a Ray of this machine, with so many workers whether or not there are as many cores."""
    # Of a module that workers import, as the product's: what a script defines itself travels with each task.
    import fleet_scale
    import ray

    from assay.harness.sweep.on_ray import LOCAL, OnRay

    os.environ |= {"PYTHONPATH": python_path(), "FLEET_SCALE_MEGABYTES": str(megabytes)}
    ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    session.CellWork = fleet_scale.SimulatedCell  # type: ignore[misc, assignment]
    made = [
        SweepCell(f"{number:016x}", ("check", f"--seed={number}"), {"seed": str(number)}) for number in range(cells)
    ]
    plan = SweepPlan(tuple(Combination(cell.axes, (cell,)) for cell in made), {cell.key: cell for cell in made})
    spec = SweepSpec(stages=("check",), axes={"seed": tuple(range(cells))})
    swept = session.Sweep(session.SweepState(spec=spec, command="assay sweep"), plan, folder / "sweep")
    watched, before = Watched(OnRay(LOCAL)), memory_mb()

    ray_words = ("gcs_server", "raylet/raylet")
    begun, cpu, ray_cpu = time.monotonic(), time.process_time(), cpu_of(ray_words)
    result = swept.run(watched, ProgressDisplay(Console(quiet=True)))
    wall = time.monotonic() - begun
    cpu, ray_cpu = time.process_time() - cpu, cpu_of(ray_words) - ray_cpu
    passed = sum(cell.verdict == "pass" for cell in result.cells)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    evidence = sum(path.stat().st_size for path in (folder / "sweep" / "cells").rglob("*") if path.is_file())
    again = session.Sweep(session.SweepState(spec=spec, command="assay sweep"), plan, folder / "sweep")
    resumed = time.monotonic()
    left = len(again.load())
    resumed = time.monotonic() - resumed
    ray.shutdown()
    what = f"{cells} cells of {CELL_S} s, {workers} workers"
    return [
        Row("driver", f"{what}: passed, all on disk", f"{passed} of {cells}, {left} left", str(cells)),
        Row("driver", "driver's CPU per cell, writing its files included", f"{1000 * cpu / cells:.2f} ms", "<= 10 ms"),
        Row("driver", "raylet's and GCS's CPU per cell", f"{1000 * ray_cpu / cells:.2f} ms"),
        Row("driver", "memory of the driver: before, most", f"{before:.0f} MB, {peak:.0f} MB"),
        Row("driver", "time to the first result", f"{watched.first - begun:.1f} s"),
        Row("driver", "wall time, and that of the cells alone", f"{wall:.1f} s, {cells * CELL_S / workers:.1f} s"),
        Row("driver", "evidence that a cell sends back", f"{evidence / cells / 1e3:.1f} kB"),
        Row("driver", "to see what is left after a restart", f"{resumed:.2f} s"),
    ]


def speed_up(folder: Path, part: str, workers: Sequence[int], each: int, with_ray: bool) -> list[Row]:
    """Commands spread over workers of one thread, each with as much to do; all numbers of workers at once if cores suffice."""
    at_once = not with_ray and len(os.sched_getaffinity(0)) >= sum(
        workers
    )  # Ray's own workers are as many as there are cores
    outs = [folder / f"{part}-{count}" for count in workers]
    commands = [
        (*words_of(part, each * count), "--jobs", str(count), *(["--ray"] if with_ray else [])) for count in workers
    ]
    rows, first = [], dict[str, str]()
    with ThreadPoolExecutor(len(workers) if at_once else 1) as pool:
        for count, out, wall in zip(workers, outs, pool.map(timed, commands, outs), strict=True):
            ended = outcomes(part, out)
            first = first or {id: outcome for id, (outcome, _) in ended.items()}
            other = [id for id, (outcome, _) in ended.items() if first.get(id, outcome) != outcome]
            speed = sum(seconds for _, seconds in ended.values()) / wall
            what = f"{part}{' on Ray' if with_ray else ''}: {len(ended)} by {count} workers{', all at once' if at_once else ''}"
            figure = f"{wall:.1f} s, {speed:.2f} times as fast, efficiency {speed / count:.2f}"
            rows.append(Row(part, what, figure + ", OTHER RESULTS" * bool(other), ">= 0.80" if count == 8 else ""))
    return rows


def words_of(part: str, number: int) -> tuple[str, ...]:
    """A command that examines so many faults of the catalogue, or makes so many checks."""
    from assay.harness.bugs.catalogue import CATALOGUE  # not at the top: workers of `driver` would import PyTorch

    if part == "certify":
        ids = [*CATALOGUE][:number]
        return ("certify", "--device", "cpu", *(f"--fault={id}" for id in ids), "--time-limit", "600")
    axis = f"seed={','.join(map(str, range(number)))}"
    return ("sweep", "check", "--set", f"candidate={HONEST}", "--set", axis, "--set", "device=cpu")


def timed(words: Sequence[str], out: Path) -> float:
    """Run a command of assay into a folder; return its seconds."""
    begun = time.monotonic()
    assay(*words, "--quiet", "--out", str(out), env={"OMP_NUM_THREADS": "1"})
    return time.monotonic() - begun


def outcomes(part: str, out: Path) -> dict[str, tuple[str, float]]:
    """What each examination or check found, and its seconds."""
    if part == "certify":
        return {one.id: (one.outcome, one.seconds) for one in read_certificate(out / "certificate.json").examined}
    ended = [read_cell(path) for path in sorted((out / "cells").iterdir())]
    return {one.key: (one.verdict, one.seconds) for one in ended if one}


@dataclass(frozen=True)
class CardCell:
    """Work on the GPU of its place, whose card it names."""

    def __call__(self, place: Workplace) -> tuple[str, float, float, int]:
        environment = {**os.environ, **place.environment}
        begun = time.time()
        named = subprocess.run(
            [sys.executable, "-c", UUID], env=environment, capture_output=True, text=True, check=True
        )
        code = subprocess.run(
            [sys.executable, "-c", BUSY], env=environment, check=False, capture_output=True
        ).returncode
        return named.stdout.strip(), begun, time.time(), code


def cards(with_ray: bool) -> list[Row]:
    """Two cells at once, with a GPU each."""
    executors: list[tuple[str, Executor]] = [("this machine", ThisMachine(Needs(gpus=1), 2))]
    if with_ray:
        from assay.harness.sweep.on_ray import LOCAL, OnRay

        executors.append(("Ray", OnRay(LOCAL)))
    rows = []
    for name, executor in executors:
        with executor:
            for key in ("first", "second"):
                executor.submit(Task(key, CardCell(), None, Needs(gpus=1)))
            ended = {done.task.key: done for done in executor.ended()}
        found = []
        for key, done in sorted(ended.items()):
            if done.error is not None or done.value is None:
                rows.append(Row("cards", f"{name}: {key} cell", f"FAILED: {done.error}"))
                continue
            card, begun, until, code = done.value
            found.append((card, begun, until))
            rows.append(Row("cards", f"{name}: {key} cell", f"UUID and GPUs seen: {card}; exit {code}", "one GPU each"))
        if len(found) == 2:
            (card, begun, until), (other, also_begun, also_until) = found
            beside = min(until, also_until) - max(begun, also_begun)
            said = f"{'two cards' if card != other else 'ONE CARD'}, {beside:.1f} s side by side"
            rows.append(Row("cards", f"{name}: the two", said, "two cards, more than 0 s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--cells", type=int, default=10_000, help="of driver")
    parser.add_argument("--megabytes", type=int, default=0, help="of driver: evidence of a cell")
    parser.add_argument("--ray-workers", type=int, default=8, help="of driver; they sleep")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 14], help="of certify and checks")
    parser.add_argument("--each", type=int, default=6, help="faults or checks for each worker")
    parser.add_argument("--ray", action="store_true", help="certify, checks and cards: on a Ray of this machine")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="assay-fleet-") as made:
        if "driver" in args.only:
            rows += driver(Path(made), args.cells, args.ray_workers, args.megabytes)
        for part in ("certify", "checks"):
            if part in args.only:
                rows += speed_up(Path(made), part, args.workers, args.each, args.ray)
        if "cards" in args.only:
            rows += cards(args.ray)
    cores = len(os.sched_getaffinity(0))
    table = Table(
        "part", "what", "figure", "goal", title=f"{cores} cores; GPUs: {', '.join(gpus_here().values()) or 'none'}"
    )
    for row in rows:
        table.add_row(row.part, row.what, row.figure, row.goal)
    console.print(table)


if __name__ == "__main__":
    main()
