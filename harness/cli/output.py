"""Everything that commands print: streams, consoles, errors, options such as ``--json``, progress, and results."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup

from assay.harness.errors import AssayError, UsageError
from assay.harness.files import write_whole
from assay.harness.text import visible

if TYPE_CHECKING:
    from assay.harness.progress import ProgressDisplay
    from assay.reports.document import Document

console = Console()
errors = Console(stderr=True)
# Everything that a command prints or writes in addition to its result; ``--quiet`` silences `console`.
detail = SimpleNamespace(verbose=False, json=False, html=None, junit=None, all=False)
# Seconds between two lines of progress if the output is not a terminal.
_LINES_S, _VERBOSE_LINES_S = 30.0, 1.0


def say(text: str) -> None:
    """Print text unchanged, without markup or highlighting; see `assay.reports.terminal.say`."""
    from assay.reports.terminal import say as print_text

    print_text(console, text)


def report_error(error: Exception) -> None:
    """Print the message of an error, with its traceback only if the user asked for one."""
    trace(error)
    from assay.reports.terminal import say as print_text

    print_text(errors, f"assay: {error}")


def trace(error: Exception) -> None:
    """Print the traceback of an error and of its causes, if the user asked for it."""
    if detail.verbose:
        lines = traceback.format_exception(error)
        errors.print(visible("".join(lines)), markup=False, highlight=False, soft_wrap=True)


def _to_write(kind: str, exists_as_another: Callable[[Path], bool], do: str) -> Callable[..., Path | None]:
    """Make the callback of an option that names an output path; it checks the path before anything is computed."""

    def check(param: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is None:
            return None
        path, name = path.expanduser(), param.opts[0] if param.opts[0].startswith("-") else str(param.name)
        there = next(part for part in (path, *path.absolute().parents) if part.exists())
        other = "folder" if there.is_dir() else "file"
        if there == path and exists_as_another(path):
            raise UsageError(f"{name}: {path} is a {other}.", kind, do.format(path=path))
        if there != path and not there.is_dir():
            problem = f"{name} {path}: {there.name} is a file."
            raise UsageError(problem, "a folder in its place", "name another folder")
        if not os.access(there, os.W_OK):
            raise UsageError(f"{name}: {there} is not writable.", "a writable place", "name another one")
        return path

    return check


# Callbacks for an output file and an output folder; a ``~`` is the home folder.
new_file = _to_write("a file to write", Path.is_dir, "name a file in it: {path}/NAME")
new_folder = _to_write("a folder (created if missing)", Path.is_file, "name a folder")


def print_json(document: str) -> None:
    """Print a result as JSON, unchanged."""
    sys.stdout.write(document.rstrip("\n") + "\n")


def deliver(document: Document, page: Path | None = None) -> int:
    """Print a document, the answer first, and write the files that were asked for.

    Args:
        document: the command's result.
        page: the command's own page, in addition to the file of ``--html``.

    Returns:
        The exit code.
    """
    from assay.reports.terminal import render

    render(document, console, detail.all)
    write_asked(document, page)
    if document.page:
        file_row("Report", document.page)
    if document.answer and console.quiet and not console.stderr:  # --quiet keeps the answer
        sys.stdout.write(document.answer + "\n")
    return document.code


def write_asked(document: Document, page: Path | None = None) -> None:
    """Print or write the outputs of ``--json``, ``--junit``, ``--html`` and GitHub Actions, and the command's own page."""
    if detail.json and document.result is not None:
        print_json(document.json(document.result))
    if detail.junit:
        from assay.reports.junit import to_junit

        write_whole(detail.junit, to_junit(document))
        file_row("JUnit", detail.junit)
    for file in filter(None, (page, detail.html)):
        from assay.reports.page import to_html

        write_whole(file, to_html(document))
        file_row("Report", file)
    if not {"GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"}.isdisjoint(os.environ):
        from assay.reports.github import write_for_actions

        write_for_actions(document, sys.stderr if detail.json else sys.stdout)


def file_row(label: str, path: Path | str) -> None:
    """Print a row that names a file just written."""
    from assay.reports.document import Row
    from assay.reports.terminal import rows

    rows(console, [Row(label, str(path))])


def progress() -> ProgressDisplay:
    """Make a display of the command's progress on standard error; ``--quiet`` silences it."""
    from assay.harness.progress import ProgressDisplay

    shown = Console(quiet=True) if console.quiet else errors
    return ProgressDisplay(shown, _VERBOSE_LINES_S if detail.verbose else _LINES_S)


_flags = typer.Typer(add_completion=False)
# Commands whose result is a set of files, a page of text, or git's exit code.
_WITHOUT_RESULT = ("accept", "probe", "explain")


@_flags.command()
def _output(
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result as JSON on standard output, and everything else on standard error."
        ),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write the result to this file, as an HTML page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the result to this file, as JUnit XML.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Print everything, not only the first screen.")] = False,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", help="Print only the verdict, if any, and errors.", is_eager=True),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v", "--verbose", help="Print the traceback of an error, and progress every second.", is_eager=True
        ),
    ] = False,
) -> None:
    """Declare the flags for `add_output_flags`, so that Typer makes them like all others."""


def add_output_flags(command: Any) -> None:
    """Give a loaded command, or each command of a group, ``--quiet`` and ``--verbose``, and output formats if it has a result."""
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            add_output_flags(each)
        if not command.invoke_without_command:
            return
    shared = [flag for flag in typer.main.get_command(_flags).params if flag.name in _output.__annotations__]
    for flag in shared[4:] if command.name in _WITHOUT_RESULT else shared:
        flag.expose_value, flag.callback = False, _set
        command.params.append(flag)


def _set(context: Any, param: Any, given: Any) -> None:
    if given:
        value = new_file(param, given) if isinstance(given, Path) else True
        setattr(console if param.name == "quiet" else detail, param.name, value)
    if given and param.name == "json":
        console.stderr = True  # everything meant for people: standard output has only the JSON


_READER_GONE = (errno.EPIPE, errno.ECONNRESET)


def keep_open() -> None:
    """Replace both streams, for everything that writes to them: this package, Typer, Rich, and a kernel that prints.

    A stream whose reader goes away (``assay run | head -1``) falls silent, and so does one closed from the start (``>&-``).
    Without this, Typer and Rich end the command with exit code 1, which means that the candidate regressed. Characters that a
    stream's encoding lacks are escaped. Standard output on a full disk raises an AssayError.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


class _Outliving(io.FileIO):
    """A file descriptor that discards everything after its first failed write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and error.errno not in _READER_GONE:
                raise AssayError(
                    f"standard output could not be written: {error.strerror}.",
                    "a terminal, a pipe or a file with room",
                    "write it elsewhere; files that a command writes are not affected",
                ) from None
            return memoryview(data).nbytes


def _outliving(stream: TextIO | None) -> TextIO:
    if stream is None:  # take the stream's number, the lowest free one, so that no later file gets it
        return open(os.devnull, "w")
    raw = io.BufferedWriter(_Outliving(stream.fileno(), "wb", closefd=False))
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
    )
