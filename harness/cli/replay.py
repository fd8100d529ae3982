"""A kernel on recorded calls: ``assay replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import ReadOut, app, errors, handover, say
from assay.harness.cli.output import Json, deliver, progress

if TYPE_CHECKING:
    from assay.harness.verdict import Finding


@app.command()
def replay(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, recorded by `assay run`.")],
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
