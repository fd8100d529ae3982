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
@spec_flags(BENCH_FLAGS, hidden=("servers",))  # it needs both at the same time
def bench(
    flags: dict[str, Any],
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
        result = bench_servers(spec, folder, display=display)
    document = bench_document(result)
    write_whole(folder / "bench.json", document.json(result) + "\n")
    raise typer.Exit(deliver(document, json, folder / "bench.html"))
