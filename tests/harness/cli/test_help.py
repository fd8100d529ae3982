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
REFUSES_URLS = ("diff", "record", "bisect layers")


def paths(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, one in getattr(command, "commands", {}).items():
        yield from paths(one, (*words, name))


EVERY = [words for name in COMMANDS for words in paths(load_command(name), (name,))]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, flag: str = "-h") -> str:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(sys, "argv", ["assay", *words, flag])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


@cache
def command_at(words: tuple[str, ...]) -> Any:
    command = load_command(words[0])
    for word in words[1:]:
        command = command.commands[word]
    return command


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_fits_a_terminal_and_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    text = shown(monkeypatch, capsys, *words)
    assert text == shown(monkeypatch, capsys, *words, flag="--help")
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert not re.search(r"…|\x1b|[│╭]", text), "something was cut off, or a pipe got a box"
    plain = " ".join(text.split())
    for param in command_at(words).params:
        if not getattr(param, "hidden", False):
            assert param.help, f"{words} {param.name}"
            for sentence in param.help.split("  "):
                assert " ".join(sentence.split()) in plain
    for name, one in getattr(command_at(words), "commands", {}).items():
        assert f"{name} {' '.join(one.help.splitlines()[0].split())}" in plain


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_an_option_is_required_or_optional_or_has_a_default_that_is_shown(words: tuple[str, ...]) -> None:
    for param in command_at(words).params:
        if getattr(param, "hidden", False) or param.required or getattr(param, "is_flag", False):
            continue
        told = "default" in (param.help or "") or (param.show_default and param.default is not None)
        assert told or param.default in (None, "", False) or param.multiple, f"{words} {param.name}"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_is_in_sentences(words: tuple[str, ...]) -> None:
    for param in command_at(words).params:
        if not getattr(param, "hidden", False):
            assert re.search(r"[.?](  \[default: [^]]+\])?$", param.help or ""), f"{words} {param.name}"


@pytest.mark.parametrize("command", REFUSES_URLS)
def test_a_command_that_refuses_urls_offers_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "URL" not in shown(monkeypatch, capsys, *command.split())


def test_what_all_commands_share_says_the_same_everywhere() -> None:
    for option in ("--json", "--html", "--junit", "--config", "--quiet", "--verbose", "--help", "--baselines"):
        said = {
            re.sub(r"(; by default .*\.|\.  \[default: .*\])$", ".", param.help)
            for words in EVERY
            for param in command_at(words).params
            if option in param.opts and not param.hidden
        }
        assert len(said) <= 1, said
