"""The help of every command: complete, and readable in a terminal of 80 columns."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from assay.harness import cli
from assay.harness.cli.app import COMMANDS, load_command

WIDTH = 80


def paths(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, one in getattr(command, "commands", {}).items():
        yield from paths(one, (*words, name))


@cache
def every() -> dict[tuple[str, ...], Any]:
    """All commands, by their words."""
    return {words: command_at(words) for name in COMMANDS for words in paths(load_command(name), (name,))}


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, flag: str = "-h") -> str:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(sys, "argv", ["assay", *words, flag])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def command_at(words: tuple[str, ...]) -> Any:
    command = load_command(words[0])
    for word in words[1:]:
        command = command.commands[word]
    return command


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_help_fits_a_terminal_and_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    for words, command in list(every().items())[::step]:
        text = shown(monkeypatch, capsys, *words)
        assert [line for line in text.splitlines() if len(line) > WIDTH] == [], words
        assert not re.search(r"…|\x1b|[│╭]", text), f"{words}: something was cut off, or a pipe got a box"
        plain = "".join(text.split())
        for param in command.params:
            if not getattr(param, "hidden", False):
                assert param.help, f"{words} {param.name}"
                for sentence in param.help.split("  "):
                    assert "".join(sentence.split()) in plain, f"{words} {param.name}"
        for name, one in getattr(command, "commands", {}).items():
            assert name + "".join(one.help.splitlines()[0].split()) in plain, words
    assert text == shown(monkeypatch, capsys, *words, flag="--help")


def test_the_list_of_commands_fits_one_screen_and_names_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys).splitlines()
    assert len(lines) <= 32
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]


def test_an_option_is_required_or_optional_or_has_a_default_that_is_shown_and_its_help_is_sentences() -> None:
    for words, command in every().items():
        for param in command.params:
            if getattr(param, "hidden", False):
                continue
            assert re.search(r"[.?](  \[default: [^]]+\])?$", param.help or ""), f"{words} {param.name}"
            if param.required or getattr(param, "is_flag", False):
                continue
            shown = "default" in (param.help or "") or (param.show_default and param.default is not None)
            assert shown or param.default in (None, "", False) or param.multiple, f"{words} {param.name}"


def test_what_all_commands_share_says_the_same_everywhere() -> None:
    for option in ("--json", "--html", "--junit", "--config", "--quiet", "--verbose", "--help"):
        said = {
            re.sub(r"(; by default .*\.|\.  \[default: .*\])$", ".", param.help)
            for command in every().values()
            for param in command.params
            if option in param.opts and not param.hidden
        }
        assert len(said) <= 1, said
