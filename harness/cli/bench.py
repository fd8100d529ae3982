"""Latency: ``assay bench`` of two servers, ``assay bench kernel`` of two kernels on recorded calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, as_given
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import Json, deliver, new_file, new_folder, progress
from assay.harness.config import BENCH_FLAGS, flag, make_spec
from assay.harness.errors import UsageError
from assay.harness.extras import require
from assay.harness.files import write_whole

bench_app = typer.Typer(invoke_without_command=True, add_completion=False)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
@spec_flags(BENCH_FLAGS, "latency_", hidden=("servers",))  # it needs both at the same time
def bench(
    flags: dict[str, Any],
    context: typer.Context,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of their order.", min=0)] = 0,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            help="Let both servers capture CUDA graphs; by default unless a kernel of the contract computes decode.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for the timings.", callback=new_folder)] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Time both servers side by side and judge the ratio of their times; `assay bench kernel` does so for two kernels."""
    if context.invoked_subcommand:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [_spelled(name) for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        if given:
            raise UsageError(
                f"Before {context.invoked_subcommand}, {', '.join(given)} would apply to a bench of two servers.",
                f"the flags of {context.invoked_subcommand}, after the word {context.invoked_subcommand}",
                f"see assay bench {context.invoked_subcommand} --help",
            )
        return
    require("serve", "assay bench")

    from assay.harness.collect.run_folder import default_folder
    from assay.harness.run import bench_servers
    from assay.reports.bench_report import bench_document

    spec = make_spec(flags, config)
    folder = out or Path(f"{default_folder(spec.candidate.backend)}-bench")
    with progress() as display:
        result = bench_servers(spec, folder, seed=seed, cuda_graphs=cuda_graphs, display=display)
    write_whole(folder / "bench.json", result.model_dump_json(indent=2) + "\n")
    raise typer.Exit(deliver(bench_document(result), json, folder / "bench.html"))


def _spelled(name: str) -> str:
    return flag(name.removeprefix("short_latency_"))


@bench_app.command()
@spec_flags(("latency_bound", "alpha"), "latency_")
def kernel(
    flags: dict[str, Any],
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, recorded by `assay record` or `assay diff`.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    reference: Annotated[
        str | None,
        typer.Option(help="The kernel to compare with; by default PyTorch's scaled_dot_product_attention."),
    ] = None,
    latency_seconds: Annotated[float, typer.Option(help="Seconds of timing.", min=0.1)] = 20.0,
    seconds: Annotated[float | None, typer.Option(help="As --latency-seconds.", min=0.1, hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(help="A file for the result as JSON.", callback=new_file)] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Time a kernel and another one on recorded calls, and show its own error on the same calls."""
    policy = make_spec(flags, config).policy
    interpret_without_gpu()
    from assay.harness.attention import kernels
    from assay.harness.attention.sdpa import TORCH_SDPA
    from assay.harness.offline.timing import calls_of, time_kernels
    from assay.reports.kernel_timing import timing_document

    reference, bound = reference or TORCH_SDPA, policy.latency_bound
    loaded = [kernels.find("--candidate", candidate), kernels.find("--reference", reference)]
    names = (candidate, reference)
    with kernels.exits_raised():
        result = time_kernels(
            loaded[0], loaded[1], calls_of(pack), bound, policy.alpha, seconds or latency_seconds, as_given(), names
        )
    if out:
        write_whole(out, result.model_dump_json(indent=2) + "\n")
    raise typer.Exit(deliver(timing_document(result), json))
