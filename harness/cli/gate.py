"""Commands for CI: ``assay gate``, and ``assay gate accept``, which accepts the reference of a run as a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, Out, RunFolderArgument, refuse_flags_before, spec_flags
from assay.harness.cli.output import say
from assay.harness.config import FLAGS, make_spec

_gate_app = typer.Typer(invoke_without_command=True, add_completion=False)
app.add_typer(_gate_app, name="gate")


@_gate_app.callback()
@spec_flags(FLAGS)
def gate(
    flags: dict[str, Any],
    context: typer.Context,
    out: Out = None,
    config: Config = None,
) -> None:
    """Run in CI: require every suite that the policy names, or else all four, and exit with the verdict."""
    if context.invoked_subcommand:
        refuse_flags_before(context)
        return
    from assay.harness.cli.run import run_and_report

    raise typer.Exit(run_and_report(make_spec(flags, config), out, gate=True).exit_code)


@_gate_app.command()
def accept(
    run: RunFolderArgument,
    baselines: Annotated[Path, typer.Option("--baselines", help="Folder of the accepted baselines.")] = Path(
        "baselines"
    ),
) -> None:
    """Accept the reference of a run as a baseline, which --reference then names instead of a server."""
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.judge.baselines import accept as accept_reference
    from assay.harness.judge.build import build
    from assay.reports.run_report import run_document

    folder = RunFolder(run)
    report = build(folder)
    say(run_document(report).answer)
    say(f"Accepted the reference: {accept_reference(folder, report.verdict, baselines)}")
