"""What all commands offer for their output, and the words that they share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.harness.cli.app import COMMANDS, load_command

WITHOUT_RESULT = {"accept", "probe", "explain"}
"""Commands that end in a file, a page, a window, or git's exit code."""


def leaves(command: Any) -> Iterator[Any]:
    for one in getattr(command, "commands", {}).values():
        yield from leaves(one)
    if not getattr(command, "commands", {}) or command.invoke_without_command:
        yield command


def flags(command: Any) -> dict[str, Any]:
    return {name: param for param in command.params for name in param.opts if name.startswith("-")}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_same_flags_for_its_output(name: str) -> None:
    for command in leaves(load_command(name)):
        offered = flags(command)
        assert {"-q", "--quiet", "-v", "--verbose"} <= offered.keys()
        if command.name not in WITHOUT_RESULT:
            assert offered["--json"].is_flag, "one meaning everywhere: it prints, and takes no file"
            assert {"--html", "--junit"} <= offered.keys()
        else:
            assert not {"--json", "--html", "--junit"} & offered.keys()


def test_help_shows_the_defaults_of_a_run() -> None:
    shown = {option: (param.help or "").partition("[default: ")[2] for option, param in flags(load_command("run")).items()}
    assert (shown["--margin"], shown["--questions"], shown["--suites"]) == ("0.02]", "4096]", "accuracy,greedy,logits,layers]")
    assert shown["--reference"] == "torch_native with --device cpu, triton with --device cuda]"


def test_verbose_shows_the_traceback_of_an_error(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call("runs", str(tmp_path / "nowhere"), "-v") == 2
    assert "Traceback" in capsys.readouterr().err
    assert call("runs", str(tmp_path / "nowhere")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_shell_completes_commands_and_their_flags() -> None:
    for words, expected in (("assay ru", "runs"), ("assay run --cand", "--candidate")):
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.argv = ['assay']; from assay.harness.cli import main; main()"],
            env={"_ASSAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "PATH": "",
                 "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert expected in done.stdout.split(), done.stderr
