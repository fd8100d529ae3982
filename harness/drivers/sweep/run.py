"""Running the cells of a sweep, each in a separate process, on a pool of this machine or as Ray tasks.

``<sweep>/cells/<key>/cell.json`` is written last, and is the only state: however this process ends, the same sweep in the
same folder resumes from there.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from assay.harness.drivers.sweep.spec import (
    CELL,
    CELLS,
    LOG,
    OUT,
    RESULT,
    Limits,
    SweepResult,
    SweepSpec,
    SweptCell,
)
from assay.harness.errors import EvidenceError, ExitCode, UsageError
from assay.harness.extras import require
from assay.harness.files import is_unused, lock_folder, timestamp, write_whole
from assay.harness.progress import ProgressDisplay
from assay.harness.schema import read_json
from assay.harness.sides import hide
from assay.harness.text import how_ended, one_line
from assay.harness.verdict import WORST_FIRST, Verdict, exit_code_of
from assay.worker import run_command

# Commands with an evidence folder, in which they resume.
_KEEPS = ("run", "bench")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Times that Ray restarts a cell whose worker or node was lost: more than preemption explains.
_RETRIES = 8


def run_sweep(
    spec: SweepSpec,
    cells: Sequence[SweptCell],
    folder: Path,
    command: str,
    jobs: int,
    ray: str,
    display: ProgressDisplay,
) -> SweepResult:
    """Run the cells that are unfinished or ended in an error. An interruption is part of the result.

    Args:
        cells: from `assay.harness.drivers.sweep.cells.cells_of`.
        jobs: most cells at a time on this machine; 0 for one, or one for each set of GPUs that a cell needs.
        ray: address of a cluster, "local" to start Ray here, or empty to use a pool of this machine.

    Raises:
        UsageError: the folder holds something else, another process sweeps there, or the cells need something missing here.
    """
    if not (folder / CELLS).exists() and not is_unused(folder):
        expected = "a new folder, or the folder of a sweep"
        raise UsageError(f"{folder} exists and is not the folder of a sweep.", expected, "name another one with --out")
    begun, lock, interrupted = time.monotonic(), lock_folder(folder), False
    ended = {cell.key: done for cell in cells if (done := ended_in(folder, cell.key)) is not None}
    left = [cell for cell in cells if cell.key not in ended]
    try:
        running = _on_ray(left, spec, folder, ray) if ray else _here(left, spec.limits, folder, jobs)
        for number, cell in enumerate(running, 1):
            ended[cell.key] = cell
            display.say(f"{cell.verdict}: {' '.join(cell.command)}{cell.problem and ': ' + cell.problem}", stays=True)
            display.count("cells", number, len(left))
    except KeyboardInterrupt:
        interrupted = True
    del lock
    shown = tuple(ended.get(cell.key, cell) for cell in cells)
    worst = min((cell.verdict or "inconclusive" for cell in shown), key=WORST_FIRST.index, default="inconclusive")
    return SweepResult(
        verdict=worst, command=command, folder=str(folder), created=timestamp(), seconds=time.monotonic() - begun,
        axes={name: tuple(dict.fromkeys(cell.axes[name] for cell in cells)) for name in spec.axes},
        cells=shown, interrupted=interrupted,
    )  # fmt: skip


def ended_in(folder: Path, key: str) -> SweptCell | None:
    """Return a finished cell from the folder of a sweep, or None if it has to run: a failed one may work the next time."""
    try:
        cell = read_json(folder / CELLS / key / CELL, SweptCell, "run the sweep again")
    except EvidenceError:
        return None
    return cell if cell.key == key and cell.verdict != "error" else None


def gpus_here() -> dict[str, str]:
    """Return the GPUs of this machine that this process may use, as name by index, numbered as in ``CUDA_VISIBLE_DEVICES``."""
    query = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    named = dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
    visible = os.environ.get(_VISIBLE)
    return named if visible is None else {i: named.get(i, "GPU") for i in visible.split(",") if i.strip()}


def _here(cells: Sequence[SweptCell], limits: Limits, folder: Path, jobs: int) -> Iterator[SweptCell]:
    """Run cells on this machine, each with its own GPUs, and yield them as they end."""
    gpus = [*gpus_here()] if limits.gpus else []
    if len(gpus) < limits.gpus:
        problem = f"A cell needs {limits.gpus} GPUs, and this machine has {len(gpus)}."
        do = "change [limits], or run the cells elsewhere with --ray ADDRESS"
        raise UsageError(problem, "limits that this machine meets", do)
    fit = len(gpus) // limits.gpus if limits.gpus else jobs or 1
    slots, free, stop = min(jobs or fit, fit), queue.SimpleQueue[str](), threading.Event()
    for slot in range(slots):
        free.put(",".join(gpus[slot * limits.gpus : (slot + 1) * limits.gpus]))
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // slots))} if slots > 1 else {}

    def work(cell: SweptCell) -> SweptCell:
        visible = free.get()
        try:
            return run_cell(cell, folder / CELLS / cell.key, limits.minutes, {**threads, _VISIBLE: visible}, stop)
        finally:
            free.put(visible)

    pool = ThreadPoolExecutor(slots)
    try:
        for future in as_completed([pool.submit(work, cell) for cell in cells]):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _on_ray(cells: Sequence[SweptCell], spec: SweepSpec, folder: Path, address: str) -> Iterator[SweptCell]:
    """Run cells as Ray tasks, which Ray places and restarts if a worker is lost; yield them as they end."""
    require("ray", "--ray")
    import ray

    code = dict(spec.runtime_env)
    if "working_dir" in code:  # Ray sends it to the workers, which do not need the results, and refuses 512 MiB
        code["excludes"] = [*code.get("excludes", ()), "/runs/", f"/{folder.name}/"]
    try:
        ray.init(address, runtime_env=code, log_to_driver=False, include_dashboard=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise UsageError(
            f"--ray {address}: {one_line(str(error), 400)}",
            "local, or the address of a Ray cluster that runs; and a [runtime_env] that Ray can send to its workers",
            "see ray status, or leave folders out with the key excludes",
        ) from None
    try:
        needs = {"num_cpus": spec.limits.cpus, "num_gpus": spec.limits.gpus}
        kind = spec.limits.accelerator or None
        task = ray.remote(**needs, accelerator_type=kind, max_retries=_RETRIES)(_away)
        waiting: dict[Any, SweptCell] = {}
        for cell in cells:
            waiting[task.remote(cell, spec.limits.minutes)] = cell
        while waiting:
            (done,), _ = ray.wait([*waiting], num_returns=1)
            cell = waiting.pop(done)
            try:
                yield _kept(ray.get(done), folder / CELLS / cell.key)
            except ray.exceptions.RayError as error:
                why = f"It could not run on a worker: {one_line(str(error).strip().splitlines()[-1], 300)}"
                yield cell.model_copy(update={"verdict": "error", "problem": why})
    finally:
        ray.shutdown()


def _away(cell: SweptCell, minutes: float) -> dict[str, bytes]:
    """Run a cell on a worker, and return the files of its folder, so that no shared file system is needed."""
    with TemporaryDirectory(prefix="assay-cell-") as made:
        folder = Path(made)
        run_cell(cell, folder, minutes, {}, threading.Event())
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _kept(files: Mapping[str, bytes], folder: Path) -> SweptCell:
    """Write the files of a cell that a worker returned."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return read_json(folder / CELL, SweptCell, "run the sweep again")


def run_cell(
    cell: SweptCell, folder: Path, minutes: float, variables: Mapping[str, str], stop: threading.Event
) -> SweptCell:
    """Run the command of a cell in a separate process, and write the cell's record as the last of its files.

    A run resumes what an earlier attempt left in the folder; other commands start again. A cell that was ended by `stop`
    has no verdict.
    """
    begun, name = time.monotonic(), cell.command[0]
    (folder / CELL).unlink(missing_ok=True)
    if name not in _KEEPS:
        shutil.rmtree(folder / OUT, ignore_errors=True)
    out = ["--out", str((folder / OUT).resolve())] if name in _KEEPS else []
    status = run_command(
        [sys.executable, "-m", "assay", *cell.given, *out, "--json"], Path.cwd(), log=folder / LOG, seconds=minutes * 60,
        environment={**os.environ, **variables}, output=folder / RESULT, stop=stop,
    )  # fmt: skip
    if stop.is_set():
        return cell
    verdict, text = _outcome(folder, status, minutes)
    told = {"verdict": verdict, ("problem" if verdict == "error" else "headline"): hide("", text)}
    done = cell.model_copy(update={**told, "seconds": time.monotonic() - begun})
    write_whole(folder / CELL, done.model_dump_json(indent=1))
    return done


def _outcome(folder: Path, status: int | None, minutes: float) -> tuple[Verdict, str]:
    """Return the verdict and the result as a sentence: a verdict counts only if exit code and result agree."""
    if status is None:
        return "error", f"It was ended: it did not finish within {minutes:g} min."
    lines = [line for line in (folder / LOG).read_text(errors="replace").split("\n") if line.strip()]
    last = one_line(lines[-1] if lines else "", 400)
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads((folder / RESULT).read_bytes())
        verdict: Verdict = document["verdict"]
        if verdict in get_args(Verdict) and status == exit_code_of(verdict):
            return verdict, one_line(str(document.get("headline") or last.partition("): ")[2] or last), 400)
    if status == ExitCode.PASS:
        return "error", f"It exited with 0, but its result does not say that it passed: {last}"
    how = f"Exit code {status}" if status in (*ExitCode,) else f"Its process {how_ended(status)}"
    return "error", f"{how}: {last}"
