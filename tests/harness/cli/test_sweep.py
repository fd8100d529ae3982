"""``assay sweep``: from the command line to the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.cli.app import load_command
from assay.harness.cli.sweep import _options_of
from assay.harness.drivers.sweep.spec import COMMANDS

KERNELS = """\
import time
from assay import declares

@declares(phases=("decode",))
def refuses(call):
    time.sleep(0.01)
    raise RuntimeError("never")
"""
FAST = ["--set", "case=no-case-has-this-name"]
"""A check of no case is a wrong use: a cell of a second or two, which is an error."""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_an_axis_but_those_of_its_place(command: str) -> None:
    options = _options_of(command, load_command(command).params)
    assert "candidate" in options
    assert not {"out", "json", "html", "junit", "quiet", "verbose", "help"} & set(options)
    assert {"run": "margin", "check": "head_dim", "replay": "pack", "bench": "latency_bound"}[command] in options


@pytest.mark.slow  # fast: drivers/sweep/test_run.py
def test_cells_are_shown_before_they_run_and_an_error_hides_nothing(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["sweep", "check", "--set", "candidate=kernels:refuses,kernels:not_there", *FAST, "--out", "swept"]
    assert call(*given, "--dry-run") == 0
    assert "2 cells, 2 to run." in capsys.readouterr().out
    assert not (tmp_path / "swept").exists()
    assert call(*given) == 3
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1].split()) == ("ERROR   2 cells: 2 error · exit 3", ["Report", "swept/index.html"])
    result = json.loads((tmp_path / "swept" / "report.json").read_text())
    assert (result["schema"], result["exit_code"]) == ("assay.sweep/4", 3)
    assert all(cell["problem"].startswith("Exit code 2: ") for cell in result["cells"])
    left = {path.name for path in (tmp_path / "swept").iterdir()}
    assert {"index.html", "report.md", "report.junit.xml", "cells"} <= left


@pytest.mark.slow
def test_a_driver_that_is_killed_loses_no_cell_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    mark = f"kernels{time.time_ns()}"
    (tmp_path / f"{mark}.py").write_text(
        "from kernels import refuses\n\n\ndef forward(call):\n    import time\n    time.sleep(600)\n"
    )
    words = ["check", "--set", f"candidate=kernels:refuses,{mark}:forward", "--set", "phase=decode", "--out", "swept"]
    with subprocess.Popen([sys.executable, "-m", "assay", "sweep", *words], cwd=tmp_path, stdout=subprocess.DEVNULL) as driver:
        until = time.monotonic() + 200
        while len(done := [*tmp_path.glob("swept/cells/*/cell.json")]) < 1 and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(3)
        os.kill(driver.pid, signal.SIGKILL)
    assert len(done) == 1
    first = done[0].read_bytes()
    until = time.monotonic() + 30
    while (left := running(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left
    command = [sys.executable, "-m", "assay", "sweep", *words, "--dry-run"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert "2 cells, 1 to run" in " ".join(again.stdout.split())
    assert done[0].read_bytes() == first


def running(mark: str) -> str:
    return subprocess.run(["pgrep", "-f", f"assay check.*{mark}"], capture_output=True, text=True, check=False).stdout
