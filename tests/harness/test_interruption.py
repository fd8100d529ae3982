"""Signals, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.harness.cli import run as cli_run
from assay.harness.config import RunSpec
from assay.harness.interruption import like_ctrl_c
from assay.harness.run.run import OpenRun, run
from assay.reports import write as write_module

CODE = """
import signal, sys, time
from assay.harness.interruption import like_ctrl_c
if "ignored" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with like_ctrl_c():
    try:
        print("ready", flush=True)
        time.sleep(120)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        time.sleep(0.5)
        print("cleaned up", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", CODE, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_interrupts_and_a_second_one_does_not_cut_the_cleaning_up_short(number: signal.Signals) -> None:
    with start() as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        for again in (signal.SIGTERM, signal.SIGHUP)[: 2 if number != signal.SIGINT else 0]:
            process.send_signal(again)
        assert process.stdout.readline() == "cleaned up\n"
    assert process.returncode == 0


def test_an_ignored_signal_stays_ignored() -> None:
    with start("ignored") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[0] == "interrupted\ncleaned up\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_interrupted_does_not_exit_as_if_the_candidate_regressed(number: signal.Signals) -> None:
    code = (
        "import importlib, sys, time\napp = importlib.import_module('assay.harness.cli.app')\n"
        "def slow(name):\n    print('ready', flush=True)\n    time.sleep(20)\n"
        "app.load_command = slow\nsys.argv = ['assay', 'backends']\napp.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=15)
    assert (process.returncode, said) == (3, "assay: interrupted; there is no verdict, so this is not a pass.\n")


IN_DESTRUCTOR = """
import os, signal, sys, time
from assay.harness.interruption import like_ctrl_c
class Slow:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0.01)
with like_ctrl_c():
    try:
        one = Slow()
        del one
        time.sleep(120)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_is_not_lost(number: signal.Signals) -> None:
    """Python ignores what a destructor raises."""
    command = [sys.executable, "-c", IN_DESTRUCTOR, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_report_is_made_does_not_prevent_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Opened:
        def collect(self, display: object) -> None: ...

        def end(self) -> None:
            os.kill(os.getpid(), number)

        def report(self) -> str:
            os.kill(os.getpid(), number)
            return "the report"

    monkeypatch.setattr(OpenRun, "open", lambda *_, **__: Opened())
    assert run(RunSpec.of(reference="torch_native", candidate="triton"), tmp_path) == "the report"

    written: list[object] = []

    def write(made: object, folder: Path) -> None:
        os.kill(os.getpid(), number)
        written.append(made)

    monkeypatch.setattr(write_module, "write_reports", write)
    monkeypatch.setattr("assay.reports.run_report.run_document", lambda made, page: made)
    monkeypatch.setattr(cli_run, "deliver", lambda document: 0)
    with like_ctrl_c():
        cli_run._show("the report", tmp_path)  # type: ignore[arg-type]
    assert written == ["the report"]
