"""Kills `assay run` with SIGKILL at random moments, and resumes it: is a question lost or asked twice, is anything left behind?

    python benchmarks/random_kills.py [--kills 60] [--seed 0]

The servers are stand-ins for SGLang (``tests/stand_ins/engine``) that start within a second, so a trial takes seconds. Assay, its
guardians, files and requests are real. After each kill:

- no process, no shared memory and no temporary file of the run may be left;
- the run is repeated with the same ``--out``. It must end with exactly the answers of a run that nobody killed, each once;
- what had been recorded before the kill must not be asked again, by the servers' own logs;
- the counted calls must agree with the admitted requests (check ``calls-reconciled``), and no unfinished file may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "tests" / "stand_ins" / "engine"
FLAGS = ("--reference=torch_native", "--candidate=triton", "--questions=96", "--suites=accuracy,greedy")
SETTINGS = "[run]\ngreedy_prompts = 16\n"
"""What no flag sets."""
PACE_S = 0.08
GONE_S = 20.0

Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Trial:
    """A run in a folder of its own, with its own temporary folder.

    Attributes:
        place: holds the run's folder, the temporary folder and the servers' log.
    """

    place: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.place / "run"

    @property
    def temporary(self) -> Path:
        """The temporary folder of assay and its servers."""
        return self.place / "tmp"

    def start(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``assay run`` on stand-ins; `flags` follow `FLAGS`."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        settings = self.place / "assay.toml"
        if not settings.exists():
            settings.write_text(SETTINGS)
        ours = {
            "PYTHONPATH": f"{ENGINE}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(self.temporary),
            "STAND_IN_LOG": str(self.place / "asked"),
            "STAND_IN_PACE_S": str(PACE_S),
        }
        command = [sys.executable, "-m", "assay", "run", "--out", str(self.run), *FLAGS, *flags]
        return subprocess.Popen(
            command,
            cwd=self.place,
            env={**os.environ, **ours, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def records(self) -> list[Key]:
        """Keys of the recorded answers, in order; a last line that was cut off does not count."""
        path = self.run / "records.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(line["suite"], line["role"], line["item"], line["repeat"]) for line in lines]

    def prompts(self) -> dict[tuple[str, str], str]:
        """Hash of the prompt of each item, by suite and id."""
        lines = [json.loads(line) for line in (self.run / "items.jsonl").read_text().splitlines()]
        return {(line["suite"], line["id"]): line["prompt_hash"] for line in lines}

    def asked(self) -> list[tuple[str, str]]:
        """Role and prompt hash of each request that a server received."""
        path = self.place / "asked"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(role, prompt) for role, _, prompt, what in lines if what == "asked"]

    def left_over(self) -> list[str]:
        """What is left of the run's servers besides its folder, after waiting for it to go."""
        deadline = time.monotonic() + GONE_S
        while (left := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left_now(self) -> list[str]:
        left = [f"process {pid}: {name}" for pid, name in _processes_of(self.place).items()]
        left += [f"temporary {path.name}" for path in self.temporary.iterdir()]
        listed = self.place / "asked.shared"
        shared = listed.read_text().split() if listed.exists() else []
        return left + [path for path in shared if Path(path).exists()]


def _processes_of(place: Path) -> dict[int, str]:
    """Living processes that were started for a run in `place`."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            mine = f"{environment.get('ASSAY_EVIDENCE', '')}:{environment.get('STAND_IN_LOG', '')}"
            if str(place) in mine and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())[:80]
        except psutil.Error:
            continue
    return found


def kill_and_resume(trial: Trial, after_s: float, expected: set[Key], *, while_asking: bool) -> tuple[int, list[str]]:
    """Kill a run after some seconds, and repeat it.

    Args:
        trial: the run, not started.
        after_s: seconds to the kill.
        while_asking: whether they are counted from the first answer; otherwise from the start.
        expected: keys of all answers.

    Returns:
        How many answers had been recorded at the kill, and what went wrong, in words.
    """
    with trial.start() as process:
        while while_asking and not trial.records() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
    wrong = [f"left after the kill: {one}" for one in trial.left_over()]
    before, asked_before = trial.records(), len(trial.asked())
    with trial.start() as process:
        said, _ = process.communicate()
    if process.returncode not in (0, 1, 3):
        return len(before), [*wrong, f"resuming ended with {process.returncode}: {said[-500:]}"]
    wrong += [f"left after the end: {one}" for one in trial.left_over()]
    wrong += [f"unfinished: {path}" for path in trial.run.rglob(".*.part")]
    wrong += _answers_wrong(trial, before, asked_before, expected)
    checks = {check["id"]: check for check in json.loads((trial.run / "report.json").read_text())["checks"]}
    wrong += [
        f"{id_}: {checks[id_]['found']}"
        for id_ in ("calls-reconciled", "all-answered", "answers-parsed", "same-servers")
        if checks[id_]["status"] != "ok"
    ]
    return len(before), wrong


def _answers_wrong(trial: Trial, before: list[Key], asked_before: int, expected: set[Key]) -> list[str]:
    records = trial.records()
    wrong = [f"recorded {times} times: {key}" for key, times in Counter(records).items() if times > 1]
    wrong += [f"lost: {key}" for key in expected - set(records)] + [f"more: {key}" for key in set(records) - expected]
    if records[: len(before)] != before:
        wrong.append("the records before the kill changed")
    prompts = trial.prompts()
    new = Counter((role, prompts[suite, item]) for suite, role, item, _ in records[len(before) :])
    known = {(role, prompts[suite, item]) for suite, role, item, _ in records}
    asked = Counter(one for one in trial.asked()[asked_before:] if one in known)
    return wrong + [
        f"asked {asked[one]} times for {new[one]} answers: {one}" for one in asked if asked[one] != new[one]
    ]


def undisturbed(trial: Trial) -> tuple[float, float, set[Key]]:
    """Seconds of a run that nobody kills, seconds from its first answer on, and its answers."""
    begun = first = time.monotonic()
    with trial.start() as process:
        while not trial.records() and process.poll() is None:
            first = time.monotonic()
            time.sleep(0.005)
        process.communicate()
    end = time.monotonic()
    return end - begun, end - first, set(trial.records())


def campaign(place: Path, kills: int, seed: int, console: Console) -> Mapping[str, int]:
    """Kill and resume as often as asked; counts of trials, of those with something wrong, and of answers saved from the kills."""
    seconds, asking_s, expected = undisturbed(Trial(place / "undisturbed"))
    console.print(f"Undisturbed: {seconds:.1f} s, {asking_s:.1f} s from the first of {len(expected)} answers on.")
    moments, bad, saved = random.Random(seed), 0, 0
    for number in range(kills):
        while_asking = number % 3 > 0  # most of a run is its start, which has less to lose
        after_s = moments.uniform(0, asking_s if while_asking else seconds)
        recorded, wrong = kill_and_resume(Trial(place / str(number)), after_s, expected, while_asking=while_asking)
        saved, bad = saved + recorded, bad + bool(wrong)
        console.print(f"{number + 1}: killed after {after_s:.2f} s with {recorded} answers: {'; '.join(wrong) or 'ok'}")
    return {"kills": kills, "wrong": bad, "answers saved": saved}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given, console = parser.parse_args(), Console()
    with tempfile.TemporaryDirectory(prefix="random-kills-") as place:
        counts = campaign(Path(place), given.kills, given.seed, console)
    console.print(counts)
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
