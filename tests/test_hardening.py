"""Whole runs on stand-ins for SGLang, which misbehave: nothing of it passes, hangs, or leaves anything behind."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

QUICK = {"STAND_IN_PACE_S": "0.01"}


@pytest.fixture
def trial(random_kills: ModuleType, tmp_path: Path) -> Any:
    """A run on stand-ins, not started."""
    return random_kills.Trial(tmp_path)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def await_answers(trial: Any) -> None:
    """Wait until a run has recorded an answer."""
    deadline = time.monotonic() + 60
    while not trial.records():
        assert time.monotonic() < deadline, "nothing is answered"
        time.sleep(0.01)


def report(trial: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((trial.run / "report.json").read_text())
    return made


FAILURES = {
    "dies-starting": "exited with status 2 during start-up",
    "dies-loading": "exited with status 3 during start-up",
    "child-ends": "failed during start-up: its process sglang::scheduler 2 exited with status 0",
    "dies-answering": "was killed by SIGKILL after it was ready",
    "dies-flushing": "was killed by SIGKILL after it was ready",
    "dies-idle": "exited with status 4 after it was ready",
    "slow": "for 4 s",
    "reset": "did not answer",
    "truncated": "did not answer",
    "malformed": "sent something other than a chat completion",
    "keyless": "answers requests without the key that it was given",
}


AT_ONCE = {"keyless", "dies-flushing", "child-ends"}
"""Failures that are always tested: nothing else shows that they are noticed."""


@pytest.mark.parametrize("failure", [pytest.param(name, marks=[] if name in AT_ONCE else pytest.mark.slow) for name in FAILURES])
def test_a_server_that_fails_ends_the_run_with_an_error_and_nothing_is_left(trial: Any, failure: str) -> None:
    role = "reference" if failure in ("dies-loading", "reset") else "candidate"
    trial.place.mkdir(exist_ok=True)
    (trial.place / "assay.toml").write_text("[run]\ngreedy_prompts = 16\nrequest_timeout = 4\n")
    code, said = finish(trial.start("--startup-timeout=30", STAND_IN_FAILS=f"{role}:{failure}", **QUICK))
    assert code == 3, said
    made = report(trial)
    assert made["verdict"] == "error"
    assert FAILURES[failure] in made["headline"] + made["failure"]["details"]
    assert f"the {role} server" in made["headline"]
    assert trial.left_over() == []
    everywhere = "".join(path.read_text() for path in trial.run.glob("report.*")) + said
    assert "\x1b[31m" not in everywhere, "an escape sequence that a server sent"
    secret = (trial.run / f"{role}.log").read_text().partition("api_key='")[2].partition("'")[0]
    assert len(secret) >= 32
    assert secret not in everywhere


def test_a_run_says_why_its_server_failed_on_the_first_line_of_everything_it_writes(trial: Any) -> None:
    log = Path(__file__).parent / "data" / "server_failures" / "memory_share_gpu.log"
    code, said = finish(trial.start(STAND_IN_FAILS="reference:says", STAND_IN_SAYS=str(log), **QUICK))
    assert code == 3
    cause = "the reference server (torch_native) failed during start-up: ValueError: Loaded weights leave no GPU memory"
    headline = f"No verdict: {cause}"
    assert headline in said
    assert "SGLang ended its own processes during start-up." in said
    assert "was killed by SIGKILL" not in said
    made = report(trial)
    assert (made["failure"]["cause"], made["headline"][: len(headline)]) == ("memory-share", headline)
    assert "--engine-arg=--mem-fraction-static=0.45" in made["reasons"][0]
    assert not [check for check in made["checks"] if check["status"] != "ok"]
    junit = (trial.run / "report.junit.xml").read_text()
    assert junit.count("<error") == 1


@pytest.mark.slow
def test_a_run_whose_server_died_is_resumed(trial: Any) -> None:
    finish(trial.start(STAND_IN_FAILS="candidate:dies-answering", **QUICK))
    before = trial.records()
    assert 0 < len(before) < 230
    finish(trial.start(**QUICK))
    checks = {check["id"]: check for check in report(trial)["checks"]}
    assert [checks[id_]["status"] for id_ in ("all-answered", "calls-reconciled")] == ["ok", "ok"]
    assert trial.records()[: len(before)] == before
    assert len(set(trial.records())) == len(trial.records())


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGHUP, signal.SIGINT))]
)
def test_a_cancelled_run_has_a_report_and_stops_its_servers(trial: Any, number: signal.Signals) -> None:
    process = trial.start()
    await_answers(trial)
    process.send_signal(number)
    code, said = finish(process)
    assert code == 3
    *_, interrupted, resume = said.splitlines()
    assert interrupted.startswith("Interrupted after ")
    assert interrupted.endswith(f" There is no verdict, so this is not a pass. What was measured is in {trial.run}.")
    assert resume.startswith("To resume it: assay run ")
    assert resume.endswith(" --out=run"), "a path below the working directory is relative"
    assert "resolve" not in said
    made = report(trial)
    assert (made["verdict"], "interrupted" in made["headline"]) == ("error", True)
    assert trial.left_over() == []


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(trial: Any) -> None:
    first = trial.start(STAND_IN_PACE_S="0.5")
    await_answers(trial)
    code, said = finish(trial.start())
    assert code == 2
    assert f"is in use by another run (process {first.pid})" in said
    reading = [sys.executable, "-m", "assay", "report", str(trial.run)]
    done = subprocess.run(reading, capture_output=True, timeout=60, check=False, text=True)
    assert (done.returncode, "wait until it has ended" in done.stderr) == (2, True), "half of its evidence is not judged"
    assert first.poll() is None, "it goes on"
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 3
    assert len(set(trial.records())) == len(trial.records())


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_it_is_resumed(trial: Any) -> None:
    process = trial.start()
    await_answers(trial)
    # No file of assay may grow beyond the limit: writing fails in the middle of a record, as on a full disk.
    limit = (trial.run / "records.jsonl").stat().st_size + 5000
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    code, said = finish(process)
    assert (code, "cannot be written: File too large" in said) == (3, True), said
    assert trial.left_over() == []
    finish(trial.start(**QUICK))
    checks = {check["id"]: check["status"] for check in report(trial)["checks"]}
    assert [checks[id_] for id_ in ("all-answered", "calls-reconciled")] == ["ok", "ok"]


def test_a_folder_that_cannot_be_written_is_an_error(trial: Any) -> None:
    code, said = finish(trial.start("--out=/proc/run"))  # where not even root may write
    assert (code, said.count("/proc/run cannot be written")) == (3, 1), said
    assert trial.left_over() == []


@pytest.mark.slow
def test_runs_that_were_killed_at_random_moments_are_resumed(random_kills: ModuleType, tmp_path: Path) -> None:
    from rich.console import Console

    counts = random_kills.campaign(tmp_path, 6, seed=1, console=Console(stderr=True))
    assert counts["wrong"] == 0
