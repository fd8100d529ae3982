"""Kills workers, nodes and the driver of a sweep on Ray at random moments: is a cell lost, doubled, or without evidence?

    python benchmarks/sweep_kills.py [--kills 30] [--between 4 14] [--nodes 3] [--cores 2] [--cells 48]
    python benchmarks/sweep_kills.py --servers --kills 3 --between 0 10 --nodes 1 --cores 1 --cells 1

The cluster is real (`ray.cluster_utils.Cluster`: a process for each node), as are assay, its guardians, files and requests. Cells
are runs with two servers each, which are stand-ins for SGLang (``tests/stand_ins/engine``). One sweep goes on while every few
seconds something is killed with SIGKILL, in turn: a worker, a node (and another one joins), the driver (and ``--resume`` follows).
Then a hostile cell is run beside a good one: it fills the disk, forks, and never ends. With ``--servers``, SGLang
itself serves, and before each kill the cells have got answers that they had not at the last one.

- lost: cells without a record at the end, or whose record is an error.
- doubled: cells that were run again although they had ended, and answers that a cell has twice.
- without evidence: cells with a verdict whose evidence is not that of the record.
- left: processes that had been started by what was killed, and that live 20 s later; and those that are left at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from assay.harness.evidence.cell import CellRecord, read_cell
from assay.harness.sweep.cell_process import finished

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "tests" / "stand_ins" / "engine"
KERNELS = ROOT / "examples" / "nightly" / "kernels.py"
GONE_S = 20.0
MARK = "SWEEP_KILLS"
"""Environment variable of everything that is started here."""
RUNS = """\
command = "run"
[axes]
questions = [{questions}]
[set]
candidate = "{candidate}"
reference = "torch_native"
suites = "accuracy,greedy"
greedy_prompts = 16
[limits]
minutes = 30
[runtime_env]
working_dir = "."
"""
HOSTILE = """\
import os, subprocess, sys, time

def forward(call):
    folder = os.environ["TMPDIR"]
    for number in range(30):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"], start_new_session=True)
    number = 0
    while True:
        with open(os.path.join(folder, f"{number}"), "wb") as file:
            file.write(b"x" * 10**7)
        number += 1
        time.sleep(0.01)
"""


@dataclass
class Campaign:
    """A sweep that things are killed of.

    Attributes:
        cluster: the nodes; workers have the cores, the head has none.
        place: holds the sweep.
        between_s: fewest and most seconds between two kills.
        servers: whether the engines are real, and a kill waits until they have answered.
        doubled: keys of cells that ran again although they had ended.
        left: processes that outlived what had started them.
    """

    cluster: Any
    place: Path
    cores: int
    random: random.Random
    console: Console
    between_s: tuple[float, float]
    servers: bool = False
    nodes: list[Any] = field(default_factory=list)
    driver: subprocess.Popen[bytes] | None = None
    doubled: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    ended: dict[str, CellRecord] = field(default_factory=dict)

    @property
    def sweep(self) -> Path:
        """The folder of the sweep."""
        return self.place / "swept"

    def start(self, *words: str) -> None:
        """Start the driver."""
        command = [
            sys.executable,
            "-m",
            "assay",
            "sweep",
            *words,
            "--out",
            str(self.sweep),
            "--ray",
            self.cluster.address,
        ]
        with (self.place / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(command, cwd=self.place, stdout=log, stderr=log, start_new_session=True)

    def add_node(self) -> None:
        """Have another node join. Ray gives up on one after 30 seconds, which on a busy machine says nothing."""
        for left in reversed(range(5)):
            try:
                self.nodes.append(self.cluster.add_node(num_cpus=self.cores))
                return
            except Exception:
                if not left:
                    raise

    def look(self) -> None:
        """Note the cells that have ended, and those that ended once more."""
        for path in self.sweep.glob("cells/*"):
            record = read_cell(path)
            if record is None or record.verdict == "error":
                continue
            if self.ended.setdefault(record.key, record) != record:
                self.doubled.add(record.key)

    def answers(self) -> int:
        """Count the answers that the driver's machine has."""
        return sum(path.read_bytes().count(b"\n") for path in self.sweep.glob("cells/*/out/records.jsonl"))

    def kill(self, what: str) -> str:
        """Kill a worker, a node or the driver; return what, in words."""
        if what == "worker":
            working: list[psutil.Process] = []
            while not working and self.driver and self.driver.poll() is None:  # one with a cell
                working = [
                    process for process in mine() if title(process).startswith("ray::attempt") and below(process)
                ]
            if not working:
                return "no worker was working"
            victim = self.random.choice(working)
            family = below(victim)
            victim.kill()
            self.gone(family)
            return f"worker {victim.pid} with {len(family)} processes"
        if what == "node":
            node = self.nodes.pop(self.random.randrange(len(self.nodes)))
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            family = below(raylet)
            self.cluster.remove_node(node, allow_graceful=False)
            self.gone(family)
            self.add_node()
            return f"node with {len(family)} processes"
        assert self.driver is not None
        working = [process for process in mine() if title(process).startswith("ray::attempt")]
        family = [process for worker in working for process in below(worker)]
        os.kill(self.driver.pid, signal.SIGKILL)
        self.driver.wait()
        self.gone(family)
        self.start("--resume")
        return f"driver, with {len(family)} processes of its cells"

    def gone(self, family: Iterable[psutil.Process]) -> None:
        """Wait until processes are gone; note those that are not."""
        _, living = psutil.wait_procs([*family], timeout=GONE_S)
        self.left += [
            title(process) for process in living if process.is_running() and status(process) != psutil.STATUS_ZOMBIE
        ]

    def run(self, kills: int) -> int:
        """Kill at most so many times, let the sweep come to its end, and return how often something was killed."""
        made = answers = 0
        for number in range(kills):
            while self.servers and self.answers() <= answers and self.driver and self.driver.poll() is None:
                self.look()
                time.sleep(0.1)
            pause = time.monotonic() + self.random.uniform(*self.between_s)
            while time.monotonic() < pause:
                self.look()
                time.sleep(0.1)
            assert self.driver is not None
            if self.driver.poll() is not None:
                self.console.print(f"The sweep had ended before kill {number + 1}: give it more --cells.")
                break
            done, answers = len(self.ended), self.answers()
            told = self.kill(("worker", "node", "driver")[number % 3])
            made += 1
            self.console.print(f"{made}: {told}; {done} cells had ended, {answers} answers had come back")
        assert self.driver is not None
        while self.driver.poll() is None:
            self.look()
            time.sleep(0.2)
        self.look()
        return made


def mine() -> list[psutil.Process]:
    """List the living processes that were started here, but this one."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == os.environ[MARK] and status(process) != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return [process for process in processes if process.pid != os.getpid()]


def below(process: psutil.Process) -> list[psutil.Process]:
    """List the descendants of a process."""
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return ""


def status(process: psutil.Process) -> str:
    """Return the state of a process, as psutil calls it."""
    try:
        return str(process.status())
    except psutil.Error:
        return str(psutil.STATUS_ZOMBIE)


def of_cells() -> list[str]:
    """List the living processes of cells: not those of Ray itself."""
    until = time.monotonic() + GONE_S
    belongs: Callable[[str], bool] = lambda words: "assay" in words and "ray" not in Path(words.split()[0]).name  # noqa: E731
    while True:
        living = [
            words
            for words in map(title, mine())
            if "ray::" not in words and belongs(words or "x") and "/ray/" not in words
        ]
        if not living or time.monotonic() > until:
            return living
        time.sleep(0.5)


def answers_twice(folder: Path) -> int:
    """Count the answers that a cell has more than once, and those that it lacks."""
    records = folder / "out" / "records.jsonl"
    if not records.exists():
        return 0
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    times = Counter((line["suite"], line["role"], line["item"], line["repeat"]) for line in lines)
    items = [json.loads(line) for line in (folder / "out" / "items.jsonl").read_text().splitlines()]
    lacking = {(role, item["suite"], item["id"]) for item in items for role in ("reference", "candidate")}
    lacking -= {(line["role"], line["suite"], line["item"]) for line in lines}
    return sum(number > 1 for number in times.values()) + len(lacking)


def hostile(campaign: Campaign) -> dict[str, str]:
    """Run a hostile cell beside a good one; return what became of each."""
    folder = campaign.place / "hostile"
    folder.mkdir()
    (folder / "hostile.py").write_text(HOSTILE)
    shutil.copy(KERNELS, folder)
    (folder / "sweep.toml").write_text(
        'command = "check"\n[axes]\ncandidate = ["hostile:forward", "kernels:right"]\n[set]\nphase = "decode"\ndtype = "float32"\n'
        'calls = 0\n[limits]\nminutes = 5\ndisk_gb = 0.3\n[runtime_env]\nworking_dir = "."\n'
    )
    command = [sys.executable, "-m", "assay", "sweep", "--out", "swept", "--ray", campaign.cluster.address]
    with (campaign.place / "hostile.log").open("ab") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=False)
    records = [record for path in folder.glob("swept/cells/*") if (record := read_cell(path))]
    return {record.axes["candidate"]: f"{record.verdict}: {record.problem or record.headline}" for record in records}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--cells", type=int, default=48)
    parser.add_argument("--between", type=float, nargs=2, default=(4.0, 14.0), metavar="SECONDS")
    parser.add_argument("--servers", action="store_true", help="SGLang's own servers, in place of stand-ins")
    parser.add_argument("--seed", type=int, default=0)
    given, console = parser.parse_args(), Console(width=160)
    from ray.cluster_utils import Cluster

    place = Path(tempfile.mkdtemp(prefix="sweep-kills-"))
    ours = {
        "PYTHONPATH": str(ROOT) if given.servers else f"{ENGINE}:{ROOT}",
        "RAY_AUTH_MODE": "disabled", MARK: place.name, "STAND_IN_PACE_S": "0.08",
        "RAY_health_check_failure_threshold": "3", "RAY_health_check_period_ms": "1000",
    }  # fmt: skip
    os.environ.update(ours)
    (place / "sweep.toml").write_text(
        RUNS.format(
            questions=", ".join(str(64 + 2 * number) for number in range(given.cells)),
            candidate="kernels:right" if given.servers else "triton",
        )
    )
    shutil.copy(KERNELS, place)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    campaign = Campaign(
        cluster, place, given.cores, random.Random(given.seed), console, tuple(given.between), given.servers
    )
    begun = time.monotonic()
    try:
        for _ in range(given.nodes):
            campaign.add_node()
        campaign.start("sweep.toml")
        kills = campaign.run(given.kills)
        seconds = time.monotonic() - begun
        left = [*campaign.left, *of_cells()]
        became = hostile(campaign)
        left += of_cells()
    finally:
        cluster.shutdown()
        left_of_ray = [title(process) for process in mine()]
        for process in mine():
            process.kill()
    folders = [*campaign.sweep.glob("cells/*")]
    records = {path: record for path in folders if (record := read_cell(path))}
    errors = [record.problem for record in records.values() if record.verdict == "error"]
    naked = [path for path, record in records.items() if record.verdict != "error" and not finished(path, record.key)]
    numbers = {
        "kills": kills,
        "cells": given.cells,
        "cells lost": given.cells - len(records) + len(errors),
        "cells doubled": len(campaign.doubled),
        "answers doubled or lacking": sum(map(answers_twice, folders)),
        "verdicts without evidence": len(naked),
        "processes left": len(left),
        "processes left by Ray itself": len(left_of_ray),
        "attempts": sum(record.attempts for record in records.values()),
        "seconds": round(seconds),
    }
    table = Table("what", "number")
    for name, number in numbers.items():
        table.add_row(name, str(number))
    for candidate, verdict in sorted(became.items()):
        table.add_row(f"beside each other: {candidate}", verdict)
    console.print(table)
    for what in [*errors, *left, *left_of_ray]:
        console.print(what, markup=False)
    wrong = sum(
        numbers[name]
        for name in ("cells lost", "cells doubled", "answers doubled or lacking", "verdicts without evidence")
    )
    if wrong or left:
        console.print(f"Kept: {place}")
        sys.exit(1)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
