"""The layer diff and what it records: ``assay diff``, ``assay record``, ``assay replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import ReadOut, app, errors, handover, say
from assay.harness.cli.flags import STARTED, Config, Out, instrumented_spec, spec_flags
from assay.harness.cli.output import Json, deliver, new_folder, progress
from assay.harness.config import SERVER_FLAGS
from assay.harness.errors import UsageError

if TYPE_CHECKING:
    from assay.harness.verdict import Finding


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
    from assay.harness.evidence.cause import ReplayResult
    from assay.harness.offline import replay as replaying
    from assay.harness.offline.interrupted import interrupted_replay
    from assay.reports.recorded_calls import replay_document

    interpret_without_gpu()

    def show_first(findings: Sequence[Finding]) -> None:
        say(f"First: {findings[0].sentence}")

    if (left := handover.known()) and isinstance(left.result, ReplayResult):
        result = interrupted_replay(left.result, left)
    else:
        with progress(errors) as display:
            result = replaying.replay(
                pack,
                candidate,
                on_first=show_first,
                read_out=read_out,
                progress=lambda done, total: display.count(f"{candidate}: runs on recorded calls", done, total),
                watcher=handover.put,
            )
    raise typer.Exit(deliver(replay_document(result), json))
