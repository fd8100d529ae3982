"""``sweep.toml`` and ``--set``."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.drivers.sweep.spec import make_spec
from assay.harness.errors import UsageError

GOOD = 'command = "check"\n[axes]\ncandidate = ["a:f", "b:f"]\nhead-dim = ["64", "128"]\n'


@pytest.fixture
def write(tmp_path: Path) -> object:
    def made(text: str) -> str:
        (tmp_path / "sweep.toml").write_text(text)
        return str(tmp_path / "sweep.toml")

    return made


def test_a_file_and_flags_make_a_sweep(write) -> None:  # type: ignore[no-untyped-def]
    spec = make_spec(write(GOOD + 'size = "full"\n[limits]\ngpus = 1\nminutes = 5\n'), ["candidate=c:f", "seed=1,2"])
    assert spec.command == "check"
    assert spec.axes == {"candidate": ("c:f",), "head_dim": ("64", "128"), "size": ("full",), "seed": ("1", "2")}
    assert (spec.limits.gpus, spec.limits.minutes) == (1, 5)


def test_an_axis_of_a_flag_replaces_that_of_the_file(write) -> None:  # type: ignore[no-untyped-def]
    assert make_spec(write(GOOD), ["head-dim=32"]).axes == {"candidate": ("a:f", "b:f"), "head_dim": ("32",)}


def test_a_command_needs_no_file() -> None:
    assert make_spec("run", ["candidate=a,b"]).axes == {"candidate": ("a", "b")}


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ('[axes]\na = ["1"]', "has no command", "command"),
        ('command = "check"\n[axes]', "has no axis", "at least one axis"),
        ('command = "serve"\n[axes]\na = ["1"]', "command is 'serve'", "'check', 'replay', 'run' or 'bench'"),
        ('command = "check"\ncolour = "red"\n[axes]\na = ["1"]', "the key 'colour' is unknown", "one of command, axes"),
        ('command = "check"\n[axes]\na = []', "contradicts itself", "the axis a with at least one value"),
        ('command = "check"\n[axes]\na = ["1", "1"]', "contradicts itself", "each value once"),
        ('command = "check"\n[axes]\na = ["1"]\n[limits]\nhours = 1', "the key 'limits.hours' is unknown", "minutes"),
        ('command = "check"\n[axes]\na = ["1"]\n[limits]\ngpus = -1', "limits.gpus is -1", "greater than or equal to 0"),
        ('command = "check"\n[axes]\na = ["1"]\n[limits]\ngpus = true', "limits.gpus is True", "a value, not true or false"),
        ('command = "check"\n[axes', "cannot be read", "a TOML file"),
        ('command = "check"\naxes = 3', "is not a sweep", ""),
    ],
)
def test_what_is_wrong_is_named(write, text: str, found: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as error:
        make_spec(write(text), [])
    assert found in error.value.found
    assert expected in error.value.expected
    assert error.value.do


@pytest.mark.parametrize("word", ["candidate", "=a", "candidate=", "candidate=a,,b"])
def test_an_axis_of_a_flag_has_values(word: str) -> None:
    with pytest.raises(UsageError, match="--set is"):
        make_spec("check", [word])


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="The file chek does not exist") as error:
        make_spec("chek", [])
    assert "check" in error.value.do
