"""What every renderer for a terminal shares: lines that are too long for it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from assay.reports.terminal import _copy, say

LONG = "  - " + "worst own error 3613 %, 14 million times its bound of 0.00026 %; " * 3 + "the end"
COMMAND = "  $ assay replay " + "a-folder-with-a-long-name/" * 4 + " --candidate mine:forward"


def printed(text: str | Text, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system="truecolor" if terminal else None)
    say(console, text)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_whole_words_below_their_beginning() -> None:
    lines = printed(LONG, terminal=True).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(LONG.split()), "no word or number is broken"


@pytest.mark.parametrize("width", [40, 57, 80])
def test_a_number_stays_with_its_per_cent_and_its_name(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    say(console, LONG + " p = 0.01")
    assert isinstance(console.file, io.StringIO)
    assert not [line for line in console.file.getvalue().splitlines() if line.lstrip().startswith(("%", "=", "0.01"))]


def test_a_pipe_gets_one_line() -> None:
    assert printed(LONG, terminal=False) == LONG + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_and_code_are_never_broken(terminal: bool) -> None:
    assert printed(COMMAND, terminal=terminal) == COMMAND + "\n"
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    _copy(console, LONG)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == LONG + "\n"


def test_colours_and_short_lines_stay() -> None:
    text = Text.assemble("short\n", (LONG, "red"))
    shown = printed(text, terminal=True)
    assert shown.startswith("short\n")
    assert shown.count("\x1b[31m") == len(shown.splitlines()) - 1
