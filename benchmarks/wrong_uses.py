"""Wrong uses of the command line: what is said, and with which exit code?

    python benchmarks/wrong_uses.py [--only WORD]

Runs each use of ``tests/data/wrong_uses.toml`` through the entry point of ``assay``, in a new folder with the files that are listed
there, and prints a Markdown table: the command, its exit code, and what it said. Nothing may be started, so all of them take
seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "tests" / "data"
USES: dict[str, Any] = tomllib.loads((DATA / "wrong_uses.toml").read_text(encoding="utf-8"))
ENVIRONMENT = {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""No download may decide what is said."""


@dataclass(frozen=True)
class Said:
    """What a command said.

    Attributes:
        exit_code: what it exited with.
        out, err: standard output, standard error.
    """

    exit_code: int
    out: str
    err: str


def make_folder(folder: Path, uses: Mapping[str, Any] = USES) -> None:
    """Write the files that the uses name into a new folder, with a link to the data of assay's own tests."""
    for name in uses["folders"]:
        (folder / name).mkdir()
    for name, text in uses["files"].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "data").symlink_to(DATA)
    (folder / "old").symlink_to(DATA / "results")


def run(line: str) -> Said:
    """Run ``assay`` with the words of a line, in this process and in the working directory."""
    from assay.harness import cli

    arguments, path = sys.argv, sys.path[:]
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["assay", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as exit_:
        return Said(int(exit_.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv, sys.path[:] = arguments, path
    raise AssertionError("assay did not exit")


def row(line: str, said: Said) -> str:
    """A row of the table."""
    text = " ".join((said.err.strip() or said.out.strip()).removeprefix("assay: ").split())
    shown = text if len(text) <= 320 else f"{text[:200]} … {text[-119:]}"
    cells = (f"`assay {line}`", str(said.exit_code), shown)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only commands that contain this")
    only = parser.parse_args().only
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:
        make_folder(Path(folder))
        with contextlib.chdir(folder):
            print("| command | exit code | said |\n|---|---|---|")
            for use in USES["use"]:
                if only in use["assay"]:
                    print(row(use["assay"], run(use["assay"])), flush=True)


if __name__ == "__main__":
    main()
