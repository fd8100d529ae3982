"""A repository that begins with assay: ``assay init``."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, say
from assay.harness.cli.starter import starter_files, the_kernel
from assay.harness.errors import EvidenceError
from assay.harness.extras import DISTRIBUTION, REPOSITORY
from assay.harness.policy import Policy


@app.command()
def init(
    kernel: Annotated[
        str | None,
        typer.Argument(help="A kernel: module:function, or a published name; by default the only one in this folder."),
    ] = None,
    install: Annotated[
        str | None,
        typer.Option(
            metavar="REQUIREMENT", help="What pip installs as assay in CI, for example 'assay-harness @ git+URL'."
        ),
    ] = None,
) -> None:
    """Write an assay.toml, a test and a CI workflow for the repository in this folder."""
    interpret_without_gpu()

    from assay.harness.attention.kernels import find

    root = Path.cwd()
    name = kernel or the_kernel(root)
    find("", name)
    is_package = any((root / file).exists() for file in ("pyproject.toml", "setup.py"))
    origin = install or _installed_from()
    requirement = origin or f"{DISTRIBUTION} @ git+{REPOSITORY}"
    files = starter_files(name, Policy.model_fields["margin"].default, requirement, is_package)
    for path, text in files.items():
        say(f"{'wrote' if _write(root / path, text) else 'kept '}  {path}")
    if not origin:
        say(f"No package index has assay: in the workflow, replace {REPOSITORY} by the URL of your clone.")
    say(f"Next: assay check {name}, and python -m pytest tests/test_assay.py")


def _write(path: Path, text: str) -> bool:
    """Write a new file. Whatever is at `path` already stays as it is; then the result is False.

    Raises:
        EvidenceError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror}.", "a folder that can be written", "work in another folder"
        ) from None
    return True


def _installed_from() -> str:
    """Return the URL and commit from which pip installed this assay (PEP 610), to install it elsewhere; else empty."""
    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    vcs = origin.get("vcs_info", {})
    return f"{DISTRIBUTION} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs.get("commit_id") else ""
