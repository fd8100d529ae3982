"""Runs and their reports: ``assay run``, ``assay report``, ``assay backends``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.cli.app import app, console, say
from assay.harness.cli.flags import Config, Out, spec_flags
from assay.harness.config import RUN_FLAGS, RunSpec, make_spec
from assay.harness.errors import UsageError

if TYPE_CHECKING:
    from assay.harness.judge.report import Report


@app.command()
@spec_flags(RUN_FLAGS)
def run(flags: dict[str, Any], out: Out = None, config: Config = None) -> None:
    """Ask both servers the same questions, and say whether the candidate may be merged."""
    raise typer.Exit(run_and_report(make_spec(flags, config), out).exit_code)


def run_and_report(spec: RunSpec, out: Path | None, *, baselines: bool = False) -> Report:
    """Run, write every report into the run's folder, and show the verdict.

    Args:
        spec: what to run.
        out: the run's folder; None for a new one.
        baselines: whether to compare the run with the accepted baselines.
    """
    from assay.harness.collect.run_folder import default_folder
    from assay.harness.progress import ProgressDisplay
    from assay.harness.run import run

    folder = out or default_folder(spec)
    with ProgressDisplay(console) as display:
        made = run(spec, folder, baselines=baselines, display=display)
    if made.failure and made.failure.kind == "interrupted":
        _show_interrupted(made, folder)
    else:
        _show(made, folder)
    return made


def _show_interrupted(made: Report, folder: Path) -> None:
    """Two lines: who presses Ctrl-C knows why there is no verdict."""
    from assay.reports.write import write_reports

    write_reports(made, folder)
    assert made.failure is not None
    say(f"Interrupted; there is no verdict. What was measured is in {folder}.")
    say(f"{made.failure.do[0].upper()}{made.failure.do[1:]}")


def _show(made: Report, folder: Path) -> None:
    from assay.reports.run_terminal import render
    from assay.reports.write import write_reports

    write_reports(made, folder)
    render(made, console)
    say(f"Report: {folder / 'report.html'}")


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Rebuild a run's report from its evidence, and rewrite its files."""
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.judge.build import build

    made = build(RunFolder(folder))
    _show(made, folder)
    raise typer.Exit(made.exit_code)


@app.command()
def backends() -> None:
    """List the attention backends and kernels."""
    from assay.harness.attention import kernels
    from assay.harness.attention.call import KernelRefused
    from assay.harness.engines import catalog

    say("Kernels (entry-point group assay.kernels):")
    for name, path in sorted(kernels.published().items()):
        try:
            declared = kernels.declaration(kernels.load(name))
        except KernelRefused as error:
            say(f"  {name}  {error}")
        else:
            say(f"  {name}  {'+'.join(declared.phases)}  {path}  {declared.about}")
    try:
        say("SGLang's own: " + ", ".join(catalog.sglang_backends()))
    except UsageError as error:
        say(f"SGLang's own: {error}")
