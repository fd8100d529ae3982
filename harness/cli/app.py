"""What all commands share: the application, its consoles, options named as fields, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from assay import __version__
from assay.harness.attention.interpreter import interpret_without_gpu as interpret_without_gpu
from assay.harness.config import RunSpec
from assay.harness.errors import AssayError, ExitCode

app = typer.Typer(
    name="assay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compare a candidate attention backend with a reference inside the same serving engine.\n\n"
    "Exit codes: 0 pass, 1 regression, 2 wrong use, 3 no verdict (the report says why).",
)
console = Console()
errors = Console(stderr=True)


def flag(name: str, *, panel: str | None = None) -> Any:
    """An option named and described as the field of `RunSpec`."""
    described = RunSpec.model_fields[name].description
    return typer.Option(f"--{name.replace('_', '-')}", help=described, rich_help_panel=panel, show_default=False)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Say the version.", is_eager=True)] = False,
) -> None:
    if version:
        console.print(f"assay {__version__}", highlight=False)
        raise typer.Exit


def main() -> None:
    """Entry point: errors become a sentence and an exit code."""
    sys.path.append(str(Path.cwd()))  # a kernel named module:function may lie there, for this process as for a server
    try:
        app()
    except AssayError as error:
        errors.print(f"assay: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        errors.print(f"assay: {error.strerror or error}: {error.filename or ''}", markup=False, soft_wrap=True)
        sys.exit(ExitCode.NO_VERDICT)
    except Exception:
        # A bug of assay's is no regression of the candidate's: never exit with 1.
        errors.print_exception()
        errors.print("assay: this is a bug in assay; there is no verdict.", markup=False)
        sys.exit(ExitCode.NO_VERDICT)
    finally:
        _flush()


def _flush() -> None:
    """Do not die of a reader that went away (``assay run | head``)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
