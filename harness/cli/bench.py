"""Latency: ``assay bench`` of two servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, spec_flags
from assay.harness.cli.output import Json, deliver, new_folder, progress
from assay.harness.config import BENCH_FLAGS, make_spec
from assay.harness.extras import require
from assay.harness.files import write_whole


@app.command()
@spec_flags(BENCH_FLAGS, "latency_", hidden=("servers",))  # it needs both at the same time
def bench(
    flags: dict[str, Any],
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
    """Time both servers side by side and judge the ratio of their times."""
    require("serve", "assay bench")

    from assay.harness.run.run import bench_servers
    from assay.harness.run.run_folder import default_folder
    from assay.reports.bench_report import bench_document

    spec = make_spec(flags, config)
    folder = out or Path(f"{default_folder(spec.candidate.backend)}-bench")
    with progress() as display:
        result = bench_servers(spec, folder, seed=seed, cuda_graphs=cuda_graphs, display=display)
    write_whole(folder / "bench.json", result.model_dump_json(indent=2) + "\n")
    raise typer.Exit(deliver(bench_document(result), json, folder / "bench.html"))
