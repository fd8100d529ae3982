"""Every wrong use ends with its exit code, and with what was found, what was expected and what to do. Nothing is started.

The uses are in ``tests/data/wrong_uses.toml``; ``benchmarks/wrong_uses.py`` prints what each of them says.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.cli.app import COMMANDS
from assay.harness.files import LOCK

ROOT = Path(__file__).parents[3]
USES: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "data" / "wrong_uses.toml").read_text("utf-8"))["use"]
OF_THE_FILES = ("mine", "missing_import", "raises", "half_written", "ends")


@pytest.fixture(scope="module")
def wrong_uses() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("wrong_uses")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong_uses: ModuleType, jobs_here: None) -> Iterator[Path]:
    for name, value in wrong_uses.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("assay.harness.run.run.collect", lambda *_: pytest.fail("a server was started"))
    wrong_uses.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in OF_THE_FILES:  # the next folder has modules of the same names
        sys.modules.pop(name, None)


def below(folder: Path) -> set[str]:
    """Everything in a folder, except for what was imported, and the lock of a run's folder that is looked at."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts and path.name != LOCK]
    return {str(path.relative_to(folder)) for path in found}


@pytest.mark.parametrize("use", USES, ids=[use["assay"] for use in USES])
def test_a_wrong_use_says_what_was_found_what_was_expected_and_what_to_do(
    folder: Path, wrong_uses: ModuleType, use: dict[str, Any]
) -> None:
    before = below(folder)
    said = wrong_uses.run(use["assay"])
    everything = said.err + said.out
    assert said.exit_code == use["exit_code"], everything
    assert not [part for part in use["says"] if part not in everything], everything
    assert "What to do: " in everything
    assert "Traceback" not in everything
    assert "bug in assay" not in everything
    assert below(folder) == before, "nothing was started, so nothing was written"


def test_every_command_has_wrong_uses() -> None:
    used = {shlex.split(use["assay"])[0] for use in USES}
    assert set(COMMANDS) <= used


@pytest.mark.parametrize(("line", "code"), [("check raises:forward", 2), ("chek mine:forward", 2), ("bisect probe", 128)])
def test_the_process_exits_as_its_entry_point_says(
    python: Callable[..., subprocess.CompletedProcess[str]], folder: Path, line: str, code: int
) -> None:
    done = python("-m", "assay", *shlex.split(line), cwd=folder)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "What to do: " in done.stderr
