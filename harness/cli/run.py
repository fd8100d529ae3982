"""Runs and their reports: ``assay run``, ``assay report``, ``assay backends``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.cli.app import app, console, flag, interpret_without_gpu
from assay.harness.config import RunSpec, make_spec

if TYPE_CHECKING:
    from assay.harness.judge.report import Report


@app.command()
def run(
    device: Annotated[str | None, flag("device")] = None,
    reference: Annotated[str | None, flag("reference")] = None,
    candidate: Annotated[str | None, flag("candidate")] = None,
    model: Annotated[str | None, flag("model")] = None,
    data: Annotated[str | None, flag("data")] = None,
    questions: Annotated[int | None, flag("questions")] = None,
    margin: Annotated[float | None, flag("margin")] = None,
    alpha: Annotated[float | None, flag("alpha", panel="Fine print")] = None,
    greedy_prompts: Annotated[int | None, flag("greedy_prompts")] = None,
    greedy_margin: Annotated[float | None, flag("greedy_margin", panel="Fine print")] = None,
    concurrency: Annotated[int | None, flag("concurrency", panel="Fine print")] = None,
    max_tokens: Annotated[int | None, flag("max_tokens", panel="Fine print")] = None,
    engine_arg: Annotated[list[str] | None, flag("engine_arg")] = None,
    suites: Annotated[str | None, flag("suites")] = None,
    require: Annotated[str | None, flag("require", panel="Fine print")] = None,
    latency_shapes: Annotated[str | None, flag("latency_shapes", panel="Latency")] = None,
    latency_concurrency: Annotated[str | None, flag("latency_concurrency", panel="Latency")] = None,
    latency_seconds: Annotated[float | None, flag("latency_seconds", panel="Latency")] = None,
    latency_bound: Annotated[float | None, flag("latency_bound", panel="Latency")] = None,
    budget_mb: Annotated[int | None, flag("budget_mb", panel="Fine print")] = None,
    servers: Annotated[str | None, flag("servers", panel="Fine print")] = None,
    startup_timeout: Annotated[float | None, flag("startup_timeout", panel="Fine print")] = None,
    request_timeout: Annotated[float | None, flag("request_timeout", panel="Fine print")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; an unfinished run in it is gone on with.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="An assay.toml; by default the one in this folder, if any.")
    ] = None,
) -> None:
    """Start both servers, ask both the same, and say whether the candidate may be merged."""
    flags = {key: value for key, value in locals().items() if key in RunSpec.model_fields}
    if engine_arg is not None:
        flags["engine_arg"] = tuple(engine_arg)
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
    """Read a run's evidence again, and write its reports anew."""
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
    """List the attention backends and kernels that can be named."""
    from assay.harness.attention import kernels
    from assay.harness.engines.catalog import sglang_backends

    console.print("Kernels (entry-point group assay.kernels):")
    for name, path in sorted(kernels.published().items()):
        declared = kernels.declaration(kernels.load(name))
        console.print(f"  {name}  {'+'.join(declared.phases)}  {path}  {declared.about}", markup=False, highlight=False)
    console.print("SGLang's own: " + ", ".join(sglang_backends()), markup=False, highlight=False)
