"""Before the first run: a repository that begins with assay (``assay init``), and what a run needs (``assay doctor``)."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import deliver, progress, say
from assay.harness.config import SERVER_FLAGS, make_spec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.extras import DISTRIBUTION, REPOSITORY
from assay.harness.policy import Policy
from assay.harness.reading import whole_file

if TYPE_CHECKING:
    from assay.harness.run.doctor import Examination
    from assay.reports.document import Document


@app.command()
def init(
    kernel: Annotated[
        str | None,
        typer.Argument(help="A kernel: module:function, or a published name; by default the only one in this folder."),
    ] = None,
) -> None:
    """Write an assay.toml, a test and a CI workflow for the repository in this folder."""
    interpret_without_gpu()

    from assay.harness.attention.kernels import find

    root = Path.cwd()
    name = kernel or _the_kernel(root)
    find("", name)
    is_package = any((root / file).exists() for file in ("pyproject.toml", "setup.py"))
    origin = _installed_from()
    requirement = origin or f"{DISTRIBUTION} @ git+{REPOSITORY}"
    files = _starter_files(name, Policy.model_fields["margin"].default, requirement, is_package)
    for path, text in files.items():
        say(f"{'wrote' if _write(root / path, text) else 'kept '}  {path}")
    if not origin:
        say(f"No package index has assay: in the workflow, replace {REPOSITORY} by the URL of your clone.")
    say(f"Next: assay check {name}, and python -m pytest tests/test_assay.py")


def _write(path: Path, text: str) -> bool:
    """Write a new file. Whatever is at `path` already stays as it is; then the result is False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _installed_from() -> str:
    """Return the URL and commit from which pip installed this assay (PEP 610), to install it elsewhere; else empty."""
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    vcs = origin.get("vcs_info", {})
    return f"{DISTRIBUTION} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs.get("commit_id") else ""


_SKIPPED = {"build", "dist", "node_modules", "site-packages", "test", "tests", "venv", "env", "__pycache__"}
_SHOWN = 8

_TOML = Template("""\
# What `assay run` and `assay gate` do in this folder. Flags of the same names override it; `assay run --help` lists them all.

[run]
candidate = "$kernel"
device = "cpu" # "cuda" on a machine with a GPU

[policy]
margin = $margin # largest loss of accuracy that still passes: the default
""")
_TEST = Template('''\
"""The attention kernel against assay's oracle, on calls of all kinds: prefill, cached prefixes, decode, odd lengths."""


def test_$name(assay):
    assay.check("$kernel")
''')
_WORKFLOW = Template("""\
# Checks the kernel on every push: no GPU, no model and no server. Written by `assay init`.
name: assay

on:
  push:
  pull_request:

permissions:
  contents: read

env:
  ASSAY: $install

jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      # PyTorch's CPU build: its default is larger by some 4 GB, for GPUs.
      - run: python -m pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: python -m pip install "$$ASSAY"
$package      # Exit code 0: correct, 1: wrong, 2: usage error, 3: no verdict. All but 0 fail the job.
      - run: assay check $kernel
      - run: python -m pytest $test
""")
_PACKAGE = "      - run: python -m pip install -e .\n"


def _starter_files(kernel: str, margin: float, install: str, is_package: bool) -> Mapping[str, str]:
    """Make the files of a repository that begins with assay, by their paths.

    Args:
        install: what pip installs as assay in CI.
        is_package: whether the repository itself can be installed.
    """
    test = "tests/test_assay.py"
    name = "".join(letter if letter.isalnum() else "_" for letter in kernel.rpartition(":")[2]).strip("_")
    package = _PACKAGE if is_package else ""
    return {
        "assay.toml": _TOML.substitute(kernel=kernel, margin=margin),
        test: _TEST.substitute(kernel=kernel, name=f"{name}_is_correct"),
        ".github/workflows/assay.yml": _WORKFLOW.substitute(kernel=kernel, test=test, install=install, package=package),
    }


def _the_kernel(root: Path) -> str:
    """Find the only kernel in a repository, without importing anything.

    That is a public function of one argument which is annotated as AttentionCall, or which is not annotated, and whose q, k and v
    the function reads.

    Raises:
        UsageError: there is none, or several.
    """
    names = sorted(_kernels(root))
    if len(names) == 1:
        return names[0]
    shown = f": {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}" if names else ""
    raise UsageError(
        f"{len(names) or 'No'} kernel{'s were' if len(names) > 1 else ' was'} found in {root}{shown}.",
        "one function of one argument that is annotated as AttentionCall or whose q, k and v it reads, or the name of one",
        f"name it, as in assay init {names[0] if names else 'mypackage.attention:forward'}",
    )


def _kernels(root: Path) -> Iterator[str]:
    for path in _sources(root):
        try:
            tree = ast.parse(whole_file(path))
        except (SyntaxError, ValueError, OSError, RecursionError, EvidenceError):
            continue
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts[parts[0] == "src" :] if part != "__init__")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _takes_a_call(node):
                yield f"{module}:{node.name}"


def _sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository, without its tests and what was installed or built into it."""
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if not any(folder in _SKIPPED or folder.startswith(".") for folder in folders):
            yield path


def _takes_a_call(node: ast.FunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args]
    if len(arguments) - len(node.args.defaults) != 1:
        return False
    if (annotation := arguments[0].annotation) is not None:
        return ast.unparse(annotation).strip("'\"").rpartition(".")[2] == "AttentionCall"
    read = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == arguments[0].arg
    }
    return {"q", "k", "v"} <= read


@app.command()
@spec_flags(SERVER_FLAGS)
def doctor(
    flags: dict[str, Any],
    config: Config = None,
) -> None:
    """Examine this environment: what a run needs, what is here, and what to do about the rest."""
    interpret_without_gpu()

    from assay.harness.run.doctor import Examination, examine

    spec, examined = make_spec(flags, config), list[Any]()
    with progress() as display, display.waiting("examining", lambda: f"after {examined[-1].id}" if examined else ""):
        for shown in examine(spec):  # the last of them calls a kernel, which may hang
            examined.append(shown)
    raise typer.Exit(deliver(_document(Examination(device=spec.device, examined=tuple(examined)))))


_SIGNS = {"ok": "ok     ", "missing": "MISSING", "not needed": "-      "}


def _document(made: Examination) -> Document:
    """A line for each thing that a run needs, and what to do where it is missing."""
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
