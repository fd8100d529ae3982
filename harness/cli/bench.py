"""Latency: ``assay bench`` of two servers, ``assay bench kernel`` of two kernels on recorded calls."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.harness.cli.app import app, console, flag, interpret_without_gpu
from assay.harness.config import RunSpec, make_spec
from assay.harness.errors import UsageError

bench_app = typer.Typer(invoke_without_command=True, add_completion=False)
app.add_typer(bench_app, name="bench")


def _flag(name: str) -> Any:
    """An option for a field of timing, by its name in `RunSpec` and, since here all is timing, by its last word."""
    short = name.removeprefix("latency_")
    described = RunSpec.model_fields[name].description
    return typer.Option(f"--{short}", f"--latency-{short}", help=described, show_default=False)


@bench_app.callback()
def bench(
    context: typer.Context,
    device: Annotated[str | None, flag("device")] = None,
    reference: Annotated[str | None, flag("reference")] = None,
    candidate: Annotated[str | None, flag("candidate")] = None,
    model: Annotated[str | None, flag("model")] = None,
    engine_arg: Annotated[list[str] | None, flag("engine_arg")] = None,
    shapes: Annotated[str | None, _flag("latency_shapes")] = None,
    concurrency: Annotated[str | None, _flag("latency_concurrency")] = None,
    bound: Annotated[float | None, _flag("latency_bound")] = None,
    seconds: Annotated[float | None, _flag("latency_seconds")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and order.", min=0)] = 0,
    servers: Annotated[str | None, flag("servers")] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            help="Let both servers capture CUDA graphs; by default where no kernel of the contract computes decode.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the timings.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="An assay.toml; by default the one in this folder, if any.")
    ] = None,
) -> None:
    """Time both servers side by side, and decide on the ratio of their times; with KERNEL, time two kernels without a server."""
    if context.invoked_subcommand:
        given = [f"--{name.replace('_', '-')}" for name, value in context.params.items() if value]
        if given:
            raise UsageError(
                f"{', '.join(given)} before {context.invoked_subcommand} is of the bench of two servers.",
                f"flags of {context.invoked_subcommand} after it",
                f"see assay bench {context.invoked_subcommand} --help",
            )
        return
    from assay.harness.bench import drive
    from assay.harness.bench.evidence import BenchFolder
    from assay.harness.bench.plan import plan_bench, timed_spec
    from assay.harness.bench.policy import make_policy
    from assay.harness.collect.plan import prepare
    from assay.harness.collect.run_folder import default_folder
    from assay.harness.judge.bench import judge_bench
    from assay.harness.progress import ProgressDisplay
    from assay.reports.bench_page import write_bench
    from assay.reports.latency_terminal import build_latency, render_latency

    flags: dict[str, Any] = {"device": device, "reference": reference, "candidate": candidate, "model": model}
    flags |= {"engine_arg": tuple(engine_arg) if engine_arg is not None else None}
    flags |= {"latency_shapes": shapes, "latency_concurrency": concurrency}
    flags |= {"latency_bound": bound, "latency_seconds": seconds, "servers": servers}
    spec = timed_spec(make_spec(flags, config))
    plan = plan_bench(prepare(spec), make_policy(spec, seed), cuda_graphs)
    path = out or default_folder(spec).with_name(f"{default_folder(spec).name}-bench")
    folder = BenchFolder.new(path)
    with ProgressDisplay(console) as display:
        drive.bench(plan, folder, display, again())
    result = build_latency(judge_bench(folder))
    page = write_bench(result, path)
    render_latency(result, console)
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(result.exit_code)


@bench_app.command()
def kernel(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, as `assay diff` leaves one.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, or module:function.")],
    reference: Annotated[
        str, typer.Option(help="A kernel to compare with.")
    ] = "assay.harness.offline.timing:torch_sdpa",
    bound: Annotated[float, typer.Option(help="Largest ratio of times that passes.", min=1)] = RunSpec.model_fields[
        "latency_bound"
    ].default,
    seconds: Annotated[float, typer.Option(help="Seconds of timing.", min=0.1)] = 20.0,
    out: Annotated[Path | None, typer.Option(help="A file for the result as JSON.")] = None,
) -> None:
    """Time a kernel on recorded calls beside another kernel, with its own error on the same calls."""
    interpret_without_gpu()
    from assay.harness.attention import kernels
    from assay.harness.attention.call import KernelRefused
    from assay.harness.offline.timing import calls_of, time_kernels
    from assay.reports.kernel_timing_terminal import build_timing, render_timing, write_timing

    loaded = []
    for name, given in (("--candidate", candidate), ("--reference", reference)):
        try:
            loaded.append(kernels.load(given))
        except KernelRefused as error:
            raise UsageError(f"{name}: {error}.", "a kernel", "see assay backends") from None
    timing = time_kernels(loaded[0], loaded[1], calls_of(pack), bound, 0.05, seconds, again())
    result = build_timing(timing, candidate, reference, bound)
    if out:
        write_timing(result, out)
    render_timing(result, console)
    raise typer.Exit(result.exit_code)


def again() -> str:
    """The command as it was given, less its folder, which would not be new."""
    given = iter(sys.argv[1:])
    kept: list[str] = []
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["assay", *kept])
