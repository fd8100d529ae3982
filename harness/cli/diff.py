"""The layer diff and what it records: ``assay diff``, ``assay record``, ``assay replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.cli.app import ReadOut, app, errors, report_error, say
from assay.harness.cli.flags import STARTED, Config, Out, instrumented_spec, spec_flags
from assay.harness.cli.output import Json, deliver, new_folder, progress
from assay.harness.config import SERVER_FLAGS
from assay.harness.errors import UsageError
from assay.worker import Event

if TYPE_CHECKING:
    pass


@app.command()
@spec_flags((*SERVER_FLAGS, "data", "logits_prompts", "budget_mb"), about=STARTED)
def diff(
    flags: dict[str, Any],
    suites: Annotated[str, typer.Option(help="Suites to run: layers, or layers,logits.")] = "layers,logits",
    out: Out = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Run the candidate in the shadow of the reference: show its own error by layer, head and condition, and name the bug."""
    from assay.harness.cli.run import run_and_report

    spec = instrumented_spec(flags | {"suites": suites}, config)
    if not {"layers"} <= set(spec.workload.suites) <= {"layers", "logits"}:
        raise UsageError(f"--suites is {suites}.", "layers, or layers,logits", "use assay run for the other suites")
    made = run_and_report(spec, out, json=json)
    raise typer.Exit(made.exit_code)


@app.command()
@spec_flags((*SERVER_FLAGS, "data", "budget_mb"), about=STARTED)
def record(
    flags: dict[str, Any],
    pack: Annotated[Path, typer.Argument(help="A new folder for the replay pack.", callback=new_folder)],
    config: Config = None,
    json: Json = False,
) -> None:
    """Record a replay pack: q, k, v and outputs of chosen calls, to run kernels on without a server."""
    from assay.harness.collect.plan import prepare
    from assay.harness.collect.record_pack import record_pack
    from assay.reports.recorded_calls import pack_document

    spec = instrumented_spec(flags | {"suites": "layers"}, config)
    with progress() as display:
        manifest = record_pack(prepare(spec), pack, display)
    deliver(pack_document(manifest, pack), json)


@app.command()
def replay(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, recorded by `assay record` or `assay diff`.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    read_out: ReadOut = 30.0,
    json: Json = False,
) -> None:
    """Run a kernel on recorded calls, without a server or a model, and name what is wrong with it."""
    from assay.harness.offline.jobs import ended_early
    from assay.harness.offline.jobs import replay as run
    from assay.reports.recorded_calls import replay_document

    with progress(errors) as display:

        def show(event: Event) -> None:
            if event["event"] == "first":
                say(f"First: {event['says']}")
            elif event["event"] == "runs":
                display.count(f"{candidate}: runs on recorded calls", event["done"], event["total"])

        result = run(pack, candidate, read_out=read_out, on_event=show)
    if result.not_run:
        report_error(ended_early(result.not_run, "what it had found is below"))
    raise typer.Exit(deliver(replay_document(result), json))
