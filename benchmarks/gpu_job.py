"""All GPU measurements of docs/gpu.md, in one command and one table.

    python benchmarks/gpu_job.py            # --only STEP for one of them
    python benchmarks/gpu_job.py --backends # SGLang's own backends against triton; --only ROW for one of them
    python benchmarks/gpu_job.py --honours  # what these backends do with what a layer asks for, in bfloat16 at head_dim 128

With --side-by-side, each step or row gets a GPU of its own (two-ranks: two), and as many run at once as there are GPUs: for
verdicts, not for times.

Accuracy, greedy texts, logits and layers with the tiny model, which can answer; layers, layer bisection and latency with the shape
of an 8B model and random weights, since own error and time do not depend on what the weights say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from common import DUMMY_WEIGHTS, HERE, SHAPE_8B, assay, shaped_model
from faulty import LAYER
from rich.console import Console
from rich.table import Table

from assay.harness.engines.model import TINY_MODEL

CONSOLE = Console(width=200)
DUMMY = f"--engine-arg={DUMMY_WEIGHTS}"
DIFF = ("run", "--suites=layers,logits")
COMPILED = ["--engine-arg=--enable-torch-compile", "--engine-arg=--cuda-graph-max-bs-decode=4"]
SAGE = ["--candidate", "sage_attn", "--servers", "together"]
SHAPES = ["--latency-shapes", "short,long,shared,chunked,offline"]
OFFLINE = ["--latency-shapes", "offline", "--latency-concurrency", "1", "--latency-seconds", "60"]
RANKS = {"two-ranks": 2, "two-ranks-wrong": 2}
"""GPUs that a step needs, if not one."""
EQUAL = [f"equal-{n}" for n in range(5)]
"""Runs of the reference against itself, each with another order of the questions."""
Step = tuple[list[str], int, str, Callable[[dict[str, Any]], str]]
"""Arguments of assay, the expected exit code, the result file, and a function that summarises it."""


REFERENCE, BACKENDS, DTYPES = "triton", ("torch_native", "flex_attention", "fa3", "flashinfer"), ("float16", "bfloat16")
BACKEND_ROWS = {f"{backend}-{dtype}": (backend, dtype) for dtype in DTYPES for backend in BACKENDS}
BACKEND_COLUMNS = ("verdict", "exit", "s", "own error over bound", "envelope", "both were given", "attention kernels")
_NEEDED = {"fa3": ("sgl_kernel", "flash_ops*"), "flashinfer": ("flashinfer", "__init__.py")}
"""Package that a backend needs, and a file in it that a partial installation lacks."""


def why_not(backend: str) -> str:
    """Why a backend cannot be tried here; empty if it can."""
    if backend not in _NEEDED:
        return ""
    package, file = _NEEDED[backend]
    found = importlib.util.find_spec(package)
    places = [] if found is None else list(found.submodule_search_locations or ())
    if any(any(Path(place).rglob(file)) for place in places):
        return ""
    return f"not tried: {package} is {'not installed' if found is None else f'installed without {file}'}"


def of_backend(report: dict[str, Any]) -> list[str]:
    """The last four columns of a row of `BACKEND_COLUMNS`."""
    layers = [metric for suite in report["suites"] if suite["id"] == "layers" for metric in suite["metrics"]]
    worst = [metric["value"] for metric in layers if metric["bound"] == 1.0 and metric["value"] is not None]
    same = [check["found"] for check in report["checks"] if check["id"] == "same-servers"]
    given = sorted({word.rstrip(",") for found in same for word in found.split() if word.startswith("--")})
    known = {
        f"{one['phase']}: {kernel['name'][:60]}"
        for one in report.get("kernels", ())
        for kernel in one["kernels"]
        if one["role"] == "candidate" and kernel["of"] in ("candidate", "both")
    }
    return [
        f"{max(worst):.3g}" if worst else "not measured",
        (report.get("envelope") or {}).get("sentence", "not counted"),
        " ".join(given) or "nothing",
        "; ".join(sorted(known)) or "; ".join(report["reasons"][:1])[:300],
    ]


class Gpus:
    """Lends GPUs to steps that run side by side; without any, the steps run one after the other and see what this process sees."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.count, self.workers = len(gpus), max(1, len(gpus))
        self._free, self._changed = set(gpus), Condition()

    @contextmanager
    def lent(self, count: int) -> Iterator[dict[str, str]]:
        """The environment of a step that needs so many."""
        if self.count < count:
            yield {}
            return
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            mine = [self._free.pop() for _ in range(count)]
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        finally:
            with self._changed:
                self._free.update(mine)
                self._changed.notify_all()


def each(
    names: Sequence[str],
    gpus: Gpus,
    run: Callable[[str, dict[str, str]], list[str]],
    rows: dict[str, list[str]],
    file: Path,
) -> None:
    """Run what is named. The rows are written after each: the job takes more than half an hour, and a lent machine may be gone."""

    def one(name: str) -> None:
        with gpus.lent(RANKS.get(name, 1)) as env:
            rows[name] = run(name, env)
        file.write_text(json.dumps(dict(rows)))
        CONSOLE.print(f"{name}: {' | '.join(rows[name][:3])}", highlight=False)

    with ThreadPoolExecutor(gpus.workers) as pool:
        list(pool.map(one, names))


def do_backend(folder: Path, name: str, env: dict[str, str]) -> list[str]:
    """Run a row from its beginning; return its cells."""
    backend, dtype = BACKEND_ROWS[name]
    if reason := why_not(backend):
        return [reason, *[""] * (len(BACKEND_COLUMNS) - 1)]
    shutil.rmtree(folder / name, ignore_errors=True)
    begun = time.monotonic()
    roles = ["--reference", REFERENCE, "--candidate", backend]
    flags = [f"--engine-arg=--dtype={dtype}", "--startup-timeout=240"]
    code = assay("run", "--device", "cuda", *roles, *flags, "--out", str(folder / name), cwd=HERE, env=env)
    path = folder / name / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else None
    cells = of_backend(report) if report else [""] * 4
    verdict = report["verdict"] if report else "no report"
    return [verdict, str(code), f"{time.monotonic() - begun:.0f}", *cells]


def of_run(report: dict[str, Any]) -> str:
    parts = []
    for suite in report["suites"]:
        right = {tally["role"]: f"{tally['right']}/{tally['total']}" for tally in suite["tallies"]}
        parts.append(
            f"{suite['id']} {suite['verdict']}" + (f" {right['reference']} : {right['candidate']}" if right else "")
        )
    parts += [
        f"logits {row['condition']} KL {row['mean_kl']:.1e}" for suite in report["suites"] for row in suite["logits"]
    ]
    parts += [f"{finding['where']}: {finding['diagnosis']}" for finding in report["findings"][:1]]
    return "; ".join(parts + calls_of(report["candidate"]["calls"]))


def calls_of(counts: list[dict[str, Any]]) -> list[str]:
    return [
        f"{c['phase']} {c['kernel']} {c['calls']:,} ({c['calls_in_graphs']:,} in graphs, {c['calls_compiled']:,} compiled)"
        for c in counts
    ]


def of_bisect(result: dict[str, Any]) -> str:
    layers = [one["layer"] for one in result["restored"]]
    return f"layers {layers} ({LAYER} was seeded), {len(result['probes'])} probes"


def of_bench(result: dict[str, Any]) -> str:
    result = result["latency"]
    rows = [
        f"{row['shape']} x {row['concurrency']} {row['metric']} {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        for row in result["rows"]
    ]
    checks = [f"{check['id']}: {check['status']}" for check in result["checks"] if check["status"] != "ok"]
    return f"{result['verdict']}; " + "; ".join(rows + calls_of(result["candidate_calls"]) + checks)


def settings(folder: Path, **values: int) -> str:
    """Write an assay.toml into a folder, and return the flag that names it."""
    ((name, value),) = values.items()
    path = folder / f"{name}-{value}.toml"
    path.write_text(f"[run]\n{name} = {value}\n")
    return f"--config={path}"


def steps(folder: Path, model: str) -> dict[str, Step]:
    """The steps, by name."""
    cuda, itself, ranks = ["--device", "cuda"], ["--candidate", REFERENCE], "--engine-arg=--tp=2"
    large = [*cuda, "--model", model, DUMMY]
    return {
        "accuracy": (["run", *cuda, "--candidate", "sage_attn"], 0, "report.json", of_run),
        "accuracy-as-shipped": (["run", *cuda, "--candidate", "sage_attn_as_shipped"], 1, "report.json", of_run),
        **{
            name: (["run", *cuda, *itself, settings(folder, order_seed=n)], 0, "report.json", of_run)
            for n, name in enumerate(EQUAL)
        },
        "two-ranks": (["run", *cuda, "--candidate", "sage_attn", ranks], 0, "report.json", of_run),
        "two-ranks-wrong": ([*DIFF, *cuda, "--candidate", "faulty:second_rank", ranks], 1, "report.json", of_run),
        # Batches no larger than those that are compiled.
        "accuracy-compiled": (
            ["run", *cuda, "--candidate", "sage_attn", *COMPILED, settings(folder, concurrency=4)],
            0, "report.json", of_run,
        ),
        "layers": ([*DIFF, *large, "--candidate", "sage_attn"], 0, "report.json", of_run),
        "layers-as-shipped": ([*DIFF, *large, "--candidate", "sage_attn_as_shipped"], 1, "report.json", of_run),
        "bisect": (["bisect", "layers", *large, "--candidate", "faulty:one_layer"], 1, "bisect.json", of_bisect),
        "latency": (["bench", *large, *SAGE, *SHAPES], 1, "report.json", of_bench),  # time to first token
        "offline-compiled": (["bench", *large, *SAGE, *OFFLINE, *COMPILED], 1, "report.json", of_bench),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*steps(Path(), ""), *BACKEND_ROWS]
    parser.add_argument("--only", action="append", choices=choices, help="a step or a row; by default all")
    parser.add_argument(
        "--backends", action="store_true", help="SGLang's own backends against triton, in fp16 and bf16"
    )
    parser.add_argument(
        "--honours",
        action="store_true",
        help="what these backends honour, in bfloat16 at head_dim 128; no server is started",
    )
    parser.add_argument(
        "--out", type=Path, help="a folder to keep; steps and rows that ended there as expected are not repeated"
    )
    parser.add_argument("--side-by-side", action="store_true", help="each step or row on a GPU of its own")
    args = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    gpus = Gpus(every if args.side_by_side else [])
    with tempfile.TemporaryDirectory(prefix="assay-gpu-") as made:
        folder = (args.out or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if args.honours:
            honours_table(folder)
        elif args.backends:
            backend_table(folder, args.only, gpus)
        else:
            step_table(folder, args.only, gpus)


def step_table(folder: Path, only: list[str] | None, gpus: Gpus) -> None:
    """Run the steps, and print all that have ended."""
    ended = folder / "steps.json"
    rows: dict[str, list[str]] = json.loads(ended.read_text()) if ended.exists() else {}
    todo = steps(folder, str(shaped_model(folder / "8b")))
    names = only or [name for name in todo if name not in rows or rows[name][0] != rows[name][1]]
    each(names, gpus, lambda name, env: do(folder, name, todo[name], env), rows, ended)
    table = Table("step", "exit", "expected", "s", "result")
    for name in todo:
        if name in rows:
            table.add_row(name, *rows[name])
    CONSOLE.print(table)


def backend_table(folder: Path, only: list[str] | None, gpus: Gpus) -> None:
    """Run the rows of SGLang's own backends, and print all that have ended as a table in Markdown."""
    ended = folder / "backends.json"
    rows: dict[str, list[str]] = json.loads(ended.read_text()) if ended.exists() else {}
    names = only or [name for name in BACKEND_ROWS if name not in rows]
    each(names, gpus, lambda name, env: do_backend(folder, name, env), rows, ended)
    print(f"| candidate against {REFERENCE} | dtype | {' | '.join(BACKEND_COLUMNS)} |")
    print("|" + "---|" * (2 + len(BACKEND_COLUMNS)))
    for name in BACKEND_ROWS:
        if name in rows:
            print("| " + " | ".join(cell.replace("|", "/") for cell in (*BACKEND_ROWS[name], *rows[name])) + " |")


def honours_table(folder: Path) -> None:
    """Measure what the backends honour that can run here, and print a table in Markdown; ``honours.json`` has all of it."""
    model = shaped_model(folder / "8b-bf16", SHAPE_8B | {"dtype": "bfloat16"})
    shutil.copy(TINY_MODEL / "model.safetensors", model)  # a model without weights is refused, and none are read
    names, page = [name for name in (REFERENCE, *BACKENDS) if not why_not(name)], folder / "honours.json"
    with page.open("w") as printed:
        code = assay("backends", "--honours", *names, f"--model={model}", "--json", cwd=HERE, output=printed)
    if not page.stat().st_size:  # it said why
        return
    made = json.loads(page.read_text())
    print(f"exit code {code}; {made['device']}, torch {made['torch']}, SGLang {made['sglang']}")
    cells = {
        (of["attribute"], of["phase"], backend["backend"]): of
        for backend in made["backends"]
        for of in backend["measured"]
    }
    print(f"| asked for | phase | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for attribute, phase in dict.fromkeys((attribute, phase) for attribute, phase, _ in cells):
        states = [cells.get((attribute, phase, name), {"state": "", "says": ""}) for name in names]
        shown = [" ".join(filter(None, (of["state"], of["says"]))).replace("|", "/") for of in states]
        print(f"| {attribute} | {phase} | {' | '.join(shown)} |")
    shapes = sorted(
        {(shape["dtype"], shape["head_dim"], shape["keys"]) for of in cells.values() for shape in of["shapes"]}
    )
    print(f"Dtype, head_dim and most keys of the calls: {shapes}")
    for name in BACKENDS:
        if reason := why_not(name):
            print(f"{name}: {reason}")
    for backend in made["backends"]:
        if backend["problem"]:
            print(f"{backend['backend']}: {backend['problem']}")


def do(folder: Path, name: str, step: Step, env: dict[str, str]) -> list[str]:
    """Run a step from its beginning; return its row of the table."""
    command, expected, file, show = step
    shutil.rmtree(folder / name, ignore_errors=True)  # left by a step that was interrupted
    begun = time.monotonic()
    code = assay(*command, "--out", str(folder / name), cwd=HERE, env=env)
    path = folder / name / file
    shown = show(json.loads(path.read_text()) if path.is_file() else {}) if not file or path.is_file() else "no result"
    return [str(code), str(expected), f"{time.monotonic() - begun:.0f}", shown]


if __name__ == "__main__":
    main()
