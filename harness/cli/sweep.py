"""A command over axes: ``assay sweep``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from assay.harness.cli.app import app, as_given, console, detail, load_command, say
from assay.harness.cli.flags import Ray, WithRay
from assay.harness.cli.output import Html, Json, Junit, deliver, new_folder, progress
from assay.harness.config import BENCH_FLAGS, RUN_FLAGS, RUNS, make_spec
from assay.harness.errors import ExitCode, UsageError
from assay.harness.extras import require
from assay.harness.interruption import too_late

if TYPE_CHECKING:
    from assay.harness.sweep.cells import Option, SweepPlan
    from assay.harness.sweep.executor import Executor
    from assay.harness.sweep.session import Sweep
    from assay.harness.sweep.spec import SweepSpec

_PAGE, _TEXT, _CASES, _RESULT = "index.html", "report.md", "report.junit.xml", "report.json"
"""Files of a sweep's folder, besides its cells."""
_OF_THE_SWEEP = ("out", "json", "html", "junit", "quiet", "verbose", "help")
"""Options of commands that a sweep sets itself."""
_ALSO_CALLED = {("check", "kernel"): "candidate"}
"""Arguments by command and name, and the name that other commands have for it."""


@app.command(cls=WithRay)
def sweep(
    source: Annotated[
        str,
        typer.Argument(metavar="[SWEEP]", help="A sweep.toml; or check, replay, run or bench, with --set."),
    ] = "sweep.toml",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An axis with its values, as candidate=a,b; may be repeated. It replaces that of the file."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The sweep's folder, by default one named after what it does.", callback=new_folder),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the sweep in --out, by default the newest in runs/, as it was given."
        ),
    ] = False,
    ray: Ray = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Most cells at a time; by default one, or one for each set of GPUs that a cell needs.", min=1
        ),
    ] = None,
    stop_after: Annotated[
        int, typer.Option(help="Run no further cell after so many regressions; 0 for never.", min=0)
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells and how long they will take, and run none.")
    ] = False,
    html: Html = None,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Run a command over axes, such as kernels x models: one cell after the other here, or on Ray.

    Each cell is a command of assay in a process of its own. The same sweep in the same folder runs only cells that have not ended,
    or ended in an error. The exit code is that of the worst cell.
    """
    require("reports", "assay sweep")
    from assay.harness.sweep.executors import executor_of, without_results
    from assay.harness.sweep.session import Sweep, SweepState, default_folder, latest_folder, needs_of, read_state
    from assay.harness.sweep.spec import DEVICE_AXIS
    from assay.harness.sweep.spec import make_spec as sweep_spec

    if resume:
        folder = out or latest_folder()
        state = read_state(folder)
    else:
        spec = sweep_spec(source, set_ or ())
        folder = out or default_folder(spec)
        state = SweepState(spec=spec, command=as_given())
    if state.spec.runtime_env and not ray:
        raise UsageError(
            "The sweep has a [runtime_env].", "workers of Ray, which have one", "add --ray, or leave it out"
        )
    if DEVICE_AXIS in state.spec.axes and not ray:
        raise UsageError(
            f"The sweep has the axis {DEVICE_AXIS}.",
            "workers of these kinds",
            f"add --ray ADDRESS, or name the kind of this machine's GPUs under [limits], as {DEVICE_AXIS}",
        )
    made = Sweep(state, _planned(state.spec, ray), folder, stop_after)
    workers = without_results(state.spec.runtime_env, RUNS, folder)
    executor = executor_of(needs_of(state.spec.limits), jobs, ray, workers, _said)
    if dry_run:
        _show_cells(made, jobs, executor)
        return
    with progress() as display:
        result = made.run(executor, display)
    raise typer.Exit(_report(result, folder, json, html, junit))


def _planned(spec: SweepSpec, ray: str | None) -> SweepPlan:
    """Make the plan of a sweep, each of whose values some command has accepted.

    Raises:
        UsageError: one is no value of its option.
    """
    from assay.harness.sweep.cells import commands_of, plan
    from assay.harness.sweep.identity import identify
    from assay.harness.sweep.this_machine import gpus_here

    commands = {name: load_command(name) for name in commands_of(spec)}
    options = {name: _options_of(name, command.params) for name, command in commands.items()}
    here = "any GPU" if ray else ", ".join(sorted({*gpus_here().values()}))
    device = spec.limits.accelerator or (here if spec.limits.gpus else "CPU")
    planned = plan(spec, options, identify(spec.runtime_env, device))
    tried: set[tuple[str, str, str]] = set()
    for cell in planned.cells.values():
        stage = cell.command[0]
        values = {(stage, name, value) for name, value in cell.axes.items()} or {(stage, "", "")}
        if not values <= tried:
            tried |= values
            _try(commands[stage], [*cell.command[1:], *(["pack"] if cell.pack or stage == "record" else [])], stage)
    return planned


def _options_of(name: str, params: Iterable[Any]) -> dict[str, Option]:
    """Return the options and arguments of a command that a sweep can set, by the name of an axis."""
    from assay.harness.sweep.cells import Option

    options: dict[str, Option] = {}
    for param in params:
        argument = param.param_type_name == "argument"
        long = next((word for word in param.opts if word.startswith("--")), "")
        called = param.name if argument else long.removeprefix("--").replace("-", "_")
        if called in _OF_THE_SWEEP or getattr(param, "hidden", False):
            continue
        kind: Literal["value", "switch", "repeated"]
        kind = "switch" if getattr(param, "is_flag", False) else "repeated" if param.multiple else "value"
        off = next(iter(getattr(param, "secondary_opts", ())), "")
        options[_ALSO_CALLED.get((name, called), called)] = Option("" if argument else long, kind, off, param.required)
    return options


def _try(command: Any, words: list[str], name: str) -> None:
    """Parse a command line as the command itself would.

    Raises:
        UsageError: it refuses it.
    """
    try:
        with command.make_context(name, [*words]) as context:
            if name in ("run", "bench"):
                given = {flag: context.params.get(flag) for flag in (RUN_FLAGS if name == "run" else BENCH_FLAGS)}
                make_spec(
                    {flag: tuple(v) if isinstance(v, list) else v for flag, v in given.items()},
                    context.params["config"],
                )
    except UsageError as error:
        raise UsageError(f"assay {name} {' '.join(words)}: {error.found}", error.expected, error.do) from None
    except Exception as error:
        if getattr(error, "exit_code", 0) != ExitCode.USAGE:
            raise
        message = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        raise UsageError(
            f"assay {name} {' '.join(words)}: {message}.",
            f"options and values that assay {name} takes",
            f"see assay {name} -h",
        ) from None


def _said(key: str, line: str) -> None:
    """Show what a cell says, if the user asked for it."""
    if detail.verbose and not console.quiet:
        console.print(f"  {key}: {line}", markup=False, highlight=False, soft_wrap=True)


def _show_cells(made: Sweep, jobs: int | None, executor: Executor) -> None:
    """Show the cells of a sweep, and an estimate."""
    from assay.harness.progress import duration
    from assay.harness.sweep.session import estimate
    from assay.harness.text import counted

    with executor:
        slots = executor.slots
    seconds, known = estimate(made, slots)
    result = made.result()
    for cell in result.cells:
        say(f"{cell.verdict or 'to run':<12} {cell.key}  assay {' '.join(cell.command)}")
    left = sum(cell.verdict is None for cell in result.cells)
    of_earlier = f"about {duration(seconds)} ({known} of them by earlier durations)"
    guess = of_earlier if known else "no duration is known yet"
    say(f"{counted(len(result.cells), 'cell')}, {left} to run, {slots} at a time: {guess}.")


def _report(result: Any, folder: Path, json: bool, html: Path | None, junit: Path | None) -> int:
    """Write the sweep's files, and show its result; return the exit code."""
    from assay.harness.files import write_whole
    from assay.reports.junit import to_junit
    from assay.reports.markdown import to_markdown
    from assay.reports.page import to_html
    from assay.reports.sweep import sweep_document

    document = sweep_document(result, folder / _PAGE)
    with too_late():
        files: Mapping[str, str] = {
            _PAGE: to_html(document), _TEXT: to_markdown(document), _CASES: to_junit(document), _RESULT: document.json(result),
        }  # fmt: skip
        for name, text in files.items():
            write_whole(folder / name, text)
        return deliver(document, json, html, junit)
