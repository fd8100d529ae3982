"""Before the first run: set up a repository (``assay init``), and check what a run needs (``assay doctor``)."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import deliver, progress, say
from assay.harness.config import SERVER_FLAGS, is_candidate_named, make_spec
from assay.harness.extras import DISTRIBUTION, REPOSITORY
from assay.harness.policy import Policy

if TYPE_CHECKING:
    from assay.harness.run.doctor import Examination
    from assay.reports.document import Document


@app.command()
def init(
    candidate: Annotated[
        str,
        typer.Argument(
            help="A kernel as module:function or by its published name, or an attention backend of SGLang, such as flashinfer.",
            show_default=False,
        ),
    ],
) -> None:
    """Write an assay.toml and a CI workflow for the repository in this folder, and a test for a kernel."""
    interpret_without_gpu()

    root = Path.cwd()
    is_kernel = Backend.parse(candidate).is_kernel
    if is_kernel:
        from assay.harness.attention.kernels import find

        find("", candidate)
    else:
        from assay.harness.engines.registry import checked_backend
        from assay.harness.sides import Side

        checked_backend(Side.model_fields["engine"].default, "CANDIDATE", candidate)
    is_package = any((root / file).exists() for file in ("pyproject.toml", "setup.py"))
    origin = _installed_from()
    files = _starter_files(candidate, is_kernel, origin or f"{DISTRIBUTION} @ git+{REPOSITORY}", is_package)
    for path, text in files.items():
        say(f"{'wrote' if _write(root / path, text) else 'kept '}  {path}")
    if not origin:
        say(f"No package index has assay: in the workflow, replace {REPOSITORY} by the URL of your clone.")
    say(
        f"Next: {f'assay check {candidate}, and python -m pytest {_TEST_FILE}' if is_kernel else 'assay doctor, and assay run'}"
    )


def _write(path: Path, text: str) -> bool:
    """Write a new file, or append the missing line to a .gitignore. Return False, and write nothing, if `path` has it already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.name == ".gitignore":
        lines = path.read_text(encoding="utf-8")
        if text.strip() in lines.split():
            return False
        text = lines + "\n" * (not lines.endswith("\n")) + text
    elif path.exists():
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _installed_from() -> str:
    """Return the URL and commit that pip installed this assay from (PEP 610), or an empty string if unknown."""
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    vcs = origin.get("vcs_info", {})
    return f"{DISTRIBUTION} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs.get("commit_id") else ""


# The backend that servers use already: SGLang's usual one on a GPU.
_REFERENCE = "triton"
_TEST_FILE = "tests/test_assay.py"
_TOML = Template("""\
# What `assay run` and `assay gate` do in this folder. Flags of the same names override it; `assay run --help` lists them all.

[run]
$sides

[policy]
margin = $margin # largest loss of accuracy that still passes: the default
""")
_KERNEL = """candidate = "{}"
device = "cpu" # "cuda" on a machine with a GPU"""
_SERVERS = f"""reference = "{_REFERENCE}" # the attention backend that you serve with
candidate = "{{}}" # the one to judge; see `assay backends`
device = "cuda"
# model = "meta-llama/Llama-3.1-8B-Instruct" # the default is a tiny model that needs no download"""
_TEST = Template('''\
"""The attention kernel against assay's oracle, on calls of all kinds: prefill, cached prefixes, decode, odd lengths."""


def test_$name(assay):
    assay.check("$kernel")
''')
_WORKFLOW = Template("""\
# $about Written by `assay init`.
# Exit code 0: pass, 1: regression, 2: usage error, 3: no verdict. All but 0 fail the job, whose summary has the report.
name: assay

on:
  push:
$on
permissions:
  contents: read

env:
  ASSAY: $install

jobs:
  assay:
    runs-on: $machine
    timeout-minutes: $minutes
    steps:
      - uses: actions/checkout@v4
$steps      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: assay
          path: |
            $files
""")
_CHECK = Template("""\
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      # PyTorch's CPU build: its default is larger by some 4 GB, for GPUs.
      - run: python -m pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: python -m pip install "$$ASSAY"
$package      - run: assay check $kernel --html assay.html --junit assay.xml
""")
_GATE = """\
      # Only on a push: a fork's code would run on your own machine.
      - run: python3 -m venv "$RUNNER_TEMP/assay" && "$RUNNER_TEMP/assay/bin/pip" install "$ASSAY"
      # The run's folder is outside the checkout and new in every job: a run found there would be resumed.
      - run: rm -rf "$RUNNER_TEMP/run" && "$RUNNER_TEMP/assay/bin/assay" gate --out "$RUNNER_TEMP/run"
"""
_PACKAGE = "      - run: python -m pip install -e .\n"


def _starter_files(candidate: str, is_kernel: bool, install: str, is_package: bool) -> Mapping[str, str]:
    """Make the first files for a repository that starts to use assay, by path.

    Args:
        candidate: the kernel, or the backend of servers, to judge.
        is_kernel: whether it is a kernel, judged by a test and a check without servers.
        install: what pip installs as assay in CI.
        is_package: whether the repository itself is installable.
    """
    sides, margin = (_KERNEL if is_kernel else _SERVERS).format(candidate), Policy.model_fields["margin"].default
    files = {"assay.toml": _TOML.substitute(sides=sides, margin=margin), ".gitignore": "runs/\n"}
    workflow = ".github/workflows/assay.yml"
    if not is_kernel:
        files[workflow] = _WORKFLOW.substitute(
            about="Compares both servers on every push, on your own machine with a GPU.", on="", steps=_GATE, minutes=60,
            install=install.replace(DISTRIBUTION, f"{DISTRIBUTION}[serve]", 1), machine="[self-hosted, gpu]",
            files="${{ runner.temp }}/run",
        )  # fmt: skip
        return files
    name = "".join(letter if letter.isalnum() else "_" for letter in candidate.rpartition(":")[2]).strip("_")
    steps = _CHECK.substitute(kernel=candidate, package=_PACKAGE if is_package else "")
    files[_TEST_FILE] = _TEST.substitute(kernel=candidate, name=f"{name}_is_correct")
    files[workflow] = _WORKFLOW.substitute(
        about="Checks the kernel on every push: no GPU, no model and no server.", on="  pull_request:\n", steps=steps, minutes=15,
        install=install, machine="ubuntu-latest", files="assay.html\n            assay.xml",
    )  # fmt: skip
    return files


@app.command()
@spec_flags(SERVER_FLAGS)
def doctor(
    flags: dict[str, Any],
    config: Config = None,
) -> None:
    """Check this environment: what a run needs, what is installed, and how to get the rest."""
    interpret_without_gpu()

    from assay.harness.run.doctor import Examination, examine

    spec, examined = make_spec(flags, config), list[Any]()
    # Suppress what imports print and warn of, so that the answer comes first. The last step calls a kernel, which may hang.
    with (
        progress() as display,
        display.waiting("examining", lambda: f"the last step was {examined[-1].id}" if examined else ""),
        redirect_stdout(sys.stderr),
        _unwarned(),
    ):
        for shown in examine(spec, is_candidate_named(flags, config)):
            examined.append(shown)
    raise typer.Exit(deliver(_document(Examination(device=spec.device, examined=tuple(examined)))))


@contextmanager
def _unwarned() -> Iterator[None]:
    """Silence warnings: other packages warn of devices that are not here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_SIGNS = {"ok": "ok     ", "missing": "MISSING", "not needed": "-      "}


def _document(made: Examination) -> Document:
    """List everything that a run needs, one line each, and how to get what is missing."""
    from assay.reports.document import Block, Cell, Document, Line

    lines: list[Block] = []
    for examined in made.examined:
        lines.append(Line((Cell(_SIGNS[examined.status], examined.status), f" {examined.id:<10}  {examined.found}")))
        lines += [Line(f"  {'':<10}  What to do: {examined.do}")] if examined.do else []
    missing = [examined.id for examined in made.examined if examined.status == "missing"]
    fails = f"A run on {made.device} would fail: {', '.join(missing)}."
    return Document(
        command="doctor",
        title=made.device,
        verdict=None,
        exit_code=int(made.exit_code),
        headline=fails if missing else f"Everything that a run on {made.device} needs is here.",
        body=lines,
        result=made,
    )
