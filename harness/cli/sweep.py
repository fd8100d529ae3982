"""``assay sweep``: a command over axes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.cli.app import app, as_given, load_command
from assay.harness.cli.output import deliver, new_folder, progress, say
from assay.harness.config import BENCH_FLAGS, RUN_FLAGS, RUNS, expectation, make_spec
from assay.harness.errors import ExitCode, UsageError
from assay.harness.interruption import too_late
from assay.harness.text import counted

if TYPE_CHECKING:
    from assay.harness.drivers.sweep.cells import Option
    from assay.harness.drivers.sweep.spec import SweptCell

# Options that a sweep sets itself.
_OF_THE_SWEEP = ("out", "json", "html", "junit", "test", "all", "quiet", "verbose", "help")
# Arguments by command and name, with the name that other commands use for each.
_ALSO_CALLED = {("check", "kernel"): "candidate"}


@app.command()
def sweep(
    source: Annotated[
        str, typer.Argument(metavar="[SWEEP]", help="A sweep.toml; or check, replay, run or bench, with --set.")
    ] = "sweep.toml",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An axis with its values, as candidate=a,b; may be repeated. Replaces that axis of the file."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder; by default one named after its settings.", callback=new_folder),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Run on Ray: HOST:PORT, ray://HOST:PORT or auto; local starts Ray on this machine."
        ),
    ] = "",
    jobs: Annotated[
        int,
        typer.Option(
            help="Most cells at a time on this machine; by default one, or one for each set of GPUs that a cell needs.",
            min=0,
            show_default=False,
        ),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells without running them.")] = False,
) -> None:
    """Run a command over axes, such as kernels x models: each cell runs in a separate process.

    Run the same sweep in the same folder again to run only unfinished and failed cells. The exit code is the worst cell's.
    """
    from assay.harness.drivers.sweep.cells import cells_of
    from assay.harness.drivers.sweep.run import ended_in, gpus_here, run_sweep
    from assay.harness.drivers.sweep.spec import make_spec as sweep_spec

    spec = sweep_spec(source, set_ or ())
    if not ray and (spec.runtime_env or spec.limits.accelerator):
        raise UsageError(
            "The sweep has a [runtime_env], or limits.accelerator names a kind of GPU.",
            "a sweep on Ray, whose workers provide them",
            "add --ray ADDRESS, or leave it out",
        )
    command = load_command(spec.command)
    here = ", ".join(sorted({*gpus_here().values()})) if spec.limits.gpus and not ray else "any GPU"
    device = spec.limits.accelerator or (here if spec.limits.gpus else "CPU")
    cells = cells_of(spec, _options_of(spec.command, command.params), device)
    tried: set[tuple[str, str]] = set()
    for cell in cells:
        if not {*cell.axes.items()} <= tried:  # each value once
            tried |= {*cell.axes.items()}
            _try(command, cell, spec.command)
    digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:10]
    folder = out or RUNS / f"sweep-{digest}"
    if dry_run:
        left = [cell for cell in cells if ended_in(folder, cell.key) is None]
        for cell in cells:
            say(f"{'to run' if cell in left else 'has ended':<10} {cell.key}  assay {' '.join(cell.command)}")
        say(f"{counted(len(cells), 'cell')}, {len(left)} to run.")
        return
    with progress() as display:
        result = run_sweep(spec, cells, folder, as_given(), jobs, ray, display)
    raise typer.Exit(_report(result, folder))


def _options_of(name: str, params: Iterable[Any]) -> dict[str, Option]:
    """Return the options and arguments of a command that a sweep can set, by name of axis."""
    from assay.harness.drivers.sweep.cells import Option

    options: dict[str, Option] = {}
    for param in params:
        argument = param.param_type_name == "argument"
        long = next((word for word in param.opts if word.startswith("--")), "")
        called = param.name if argument else long.removeprefix("--").replace("-", "_")
        if called in _OF_THE_SWEEP or getattr(param, "hidden", False):
            continue
        switch, off = getattr(param, "is_flag", False), next(iter(getattr(param, "secondary_opts", ())), "")
        options[_ALSO_CALLED.get((name, called), called)] = Option("" if argument else long, switch, off)
    return options


def _try(command: Any, cell: SweptCell, name: str) -> None:
    """Parse a command line as the command itself would."""
    try:
        with command.make_context(name, [*cell.given[1:]]) as context:
            if name in ("run", "bench"):
                given = {flag: context.params.get(flag) for flag in (RUN_FLAGS if name == "run" else BENCH_FLAGS)}
                make_spec(
                    {flag: tuple(v) if isinstance(v, list) else v for flag, v in given.items()},
                    context.params["config"],
                )
    except UsageError as error:
        raise UsageError(f"assay {' '.join(cell.command)}: {error.found}", error.expected, error.do) from None
    except Exception as error:
        if getattr(error, "exit_code", 0) != ExitCode.USAGE:
            raise
        line, see = f"assay {' '.join(cell.command)}", f"see assay {name} -h"
        param = getattr(error, "param", None)
        if param is not None and "Missing" in type(error).__name__:
            axis = _ALSO_CALLED.get((name, param.name), param.name)
            raise UsageError(
                f"{line} names no {axis}.", f"{axis} as an axis", f"add --set {axis}=..., or {see}"
            ) from None
        wanted = expectation(str(getattr(error, "message", "")))
        message = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        raise UsageError(f"{line}: {message.partition(':')[0]}.", wanted, see) from None


def _report(result: Any, folder: Path) -> int:
    """Write the sweep's files, show its result, and return the exit code."""
    from assay.harness.files import write_whole
    from assay.reports.junit import to_junit
    from assay.reports.markdown import to_markdown
    from assay.reports.page import to_html
    from assay.reports.sweep import sweep_document

    page = folder / "index.html"
    document = sweep_document(result, page)
    with too_late():
        write_whole(page, to_html(document))
        write_whole(folder / "report.md", to_markdown(document))
        write_whole(folder / "report.junit.xml", to_junit(document))
        write_whole(folder / "report.json", document.json(result))
        return deliver(document)
