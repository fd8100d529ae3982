"""Runs and their reports: ``assay run``, ``assay report``, ``assay backends``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, console
from assay.harness.cli.flags import Config, Out, spec_flags
from assay.harness.config import RUN_FLAGS, RunSpec, make_spec

if TYPE_CHECKING:
    from assay.harness.judge.report import Report


@app.command()
@spec_flags(RUN_FLAGS)
def run(flags: dict[str, Any], out: Out = None, config: Config = None) -> None:
    """Ask both servers the same questions, and say whether the candidate may be merged."""
    interpret_without_gpu()
    made, _ = measure(make_spec(flags, config), out)
    raise typer.Exit(made.exit_code)


def measure(spec: RunSpec, out: Path | None, baselines: bool = False) -> tuple[Report, Path]:
    """Run, write every report, show the verdict.

    Args:
        spec: what to run.
        out: the run's folder; None for a new one.
        baselines: whether it is held against the accepted baselines.

    Returns:
        The report, and the run's folder.
    """
    from assay.harness.baselines import attach
    from assay.harness.bench.suite import plan_latency, time_servers
    from assay.harness.collect.collect import collect
    from assay.harness.collect.plan import prepare
    from assay.harness.collect.run_folder import default_folder, open_folder
    from assay.harness.judge.build import build
    from assay.harness.progress import ProgressDisplay
    from assay.reports.run_terminal import render
    from assay.reports.write import write_all

    plan, timed = prepare(spec), plan_latency(spec)
    folder = open_folder(plan, out or default_folder(spec), "gate" if baselines else "run")
    with (
        ProgressDisplay(console) as display,
        suppress(KeyboardInterrupt),
    ):  # what was answered until then still makes a report
        display.say(f"Run {folder.path}: {spec.candidate} against {spec.reference}.")
        if baselines:
            status = attach(folder)
            display.say(f"Baselines: {', '.join(status.used.values()) or 'none that fits'}.")
        collect(plan, folder, display)
        time_servers(timed, folder, display)  # after the run's own servers have stopped
    report = build(folder)
    write_all(report, folder.path)
    render(report, console)
    console.print(f"Report: {folder.path / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    return report, folder.path


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Read a run's evidence again, and rewrite its reports."""
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.judge.build import build
    from assay.reports.run_terminal import render
    from assay.reports.write import write_all

    made = build(RunFolder(folder))
    write_all(made, folder)
    render(made, console)
    raise typer.Exit(made.exit_code)


@app.command()
def backends() -> None:
    """List the attention backends and kernels."""
    from assay.harness.attention import kernels
    from assay.harness.engines.catalog import sglang_backends

    console.print("Kernels (entry-point group assay.kernels):")
    for name, path in sorted(kernels.published().items()):
        declared = kernels.declaration(kernels.load(name))
        console.print(f"  {name}  {'+'.join(declared.phases)}  {path}  {declared.about}", markup=False, highlight=False)
    console.print("SGLang's own: " + ", ".join(sglang_backends()), markup=False, highlight=False)
