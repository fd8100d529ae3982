"""What becomes of the output never changes an exit code: real processes and pipes, closed at once, after a line, or never open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
import typer

from assay.harness.cli.app import main

app_module = sys.modules["assay.harness.cli.app"]  # the package has a function of this name

DATA = Path(__file__).parents[2] / "data"
KERNEL = "import torch\ndef wrong(call):\n    print('computing', flush=True)\n    return torch.zeros_like(call.q)\n"
RESULTS = DATA / "results"
REGRESSION = ["compare", str(RESULTS / "lm_eval_a"), str(RESULTS / "lm_eval_b")]
INGEST = ["ingest", str(DATA / "sglang_log" / "seed.log")]
SETTLED = [
    pytest.param(REGRESSION, 1, id="compare"),
    pytest.param(["--version"], 0, id="version"),
    pytest.param(["check", "noisy_kernel:wrong", "--case", "1+16-", "--read-out", "0"], 1, id="check"),
    pytest.param(["report", "nowhere"], 2, id="report"),
]


def closed_at_once(folder: Path, arguments: Sequence[str], stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Exit code and standard error of a command whose reader goes away before it starts to write.

    Args:
        folder: the working directory.
        arguments: the command's.
        stderr: where its standard error goes; STDOUT closes it, too.
    """
    (folder / "noisy_kernel.py").write_text(KERNEL)
    command = [sys.executable, "-m", "assay", *arguments]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        said = process.stderr.read() if process.stderr is not None else ""
    return process.returncode, said


@pytest.mark.few(1)
@pytest.mark.parametrize(("arguments", "code"), SETTLED)
def test_a_pipe_that_is_closed_leaves_the_exit_code(tmp_path: Path, arguments: list[str], code: int) -> None:
    ended, said = closed_at_once(tmp_path, arguments)
    assert ended == code, said
    assert "Traceback" not in said
    assert "sys.exit" not in said


@pytest.mark.few(1)
@pytest.mark.parametrize(("arguments", "code"), [(["run", "--help"], 0), (REGRESSION, 1), (INGEST, 1)])
def test_a_reader_may_leave_after_the_first_line(tmp_path: Path, arguments: list[str], code: int) -> None:
    line = '"$0" -m assay "$@" | head -1; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, ""), arguments
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(("arguments", "code"), [(["report", "nowhere"], 2), (REGRESSION, 1), (["--version"], 0)])
@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_were_never_open_leave_the_exit_code(tmp_path: Path, closing: str, arguments: list[str], code: int) -> None:
    line = ["bash", "-c", f'"$0" -m assay "$@" {closing}', sys.executable, *arguments]
    assert subprocess.run(line, cwd=tmp_path, capture_output=True, check=False).returncode == code, arguments


@pytest.mark.slow  # fast: test_a_pipe_that_is_closed_leaves_the_exit_code
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_no_verdict_and_says_so(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "assay", *REGRESSION]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("assay: standard output could not be written: No space left on device")


def test_what_an_encoding_lacks_is_written_as_an_escape(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from assay.harness.cli.output import keep_open; keep_open(); print('gr\\u00f6\\u00dfe')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, rb"gr\xf6\xdfe" + b"\n"), done.stderr


def test_ctrl_c_outside_of_a_command_is_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:  # as Typer ends where a module is being imported
        sys.exit(app_module._CTRL_C)

    monkeypatch.setattr(app_module, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert "interrupted; there is no verdict" in capsys.readouterr().err


def test_a_question_that_nobody_answers_is_no_regression(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> None:
        typer.confirm("Write?")

    monkeypatch.setattr("assay.harness.engines.sglang.catalog.backends", ask)
    monkeypatch.setattr("sys.stdin", StringIO())
    monkeypatch.setattr("sys.argv", ["assay", "backends"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert "assay: not confirmed, so nothing was done.\nWhat to do: answer y, or add --yes" in said
