"""Commands for CI: ``assay gate``, and ``assay gate accept``, which accepts the results of a run as baselines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, Out, RunFolderArgument, existing, refuse_flags_before, spec_flags
from assay.harness.cli.output import console, say
from assay.harness.config import FLAGS, make_spec
from assay.harness.errors import ExitCode

if TYPE_CHECKING:
    from assay.harness.judge.baselines import Proposal

_gate_app = typer.Typer(invoke_without_command=True, add_completion=False)
app.add_typer(_gate_app, name="gate")

_BASELINES = typer.Option(
    "--baselines", help="Folder of the accepted baselines; by default the one in assay.toml, or baselines."
)


@_gate_app.callback()
@spec_flags(FLAGS)
def gate(
    flags: dict[str, Any],
    context: typer.Context,
    out: Out = None,
    config: Config = None,
) -> None:
    """Run in CI: apply the policy, compare with the accepted baselines, and exit with the verdict."""
    if context.invoked_subcommand:
        refuse_flags_before(context)
        return
    from assay.harness.cli.run import run_and_report

    existing("a folder of accepted baselines")(Path(flags["baselines"]) if "baselines" in flags else None)
    raise typer.Exit(run_and_report(make_spec(flags, config), out, baselines=True).exit_code)


@_gate_app.command()
def accept(
    run: RunFolderArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Accept without confirmation.")] = False,
    widen: Annotated[
        str,
        typer.Option(metavar="REASON", help="Reason to accept a regression, or numbers worse than the accepted ones."),
    ] = "",
    baselines: Annotated[Path | None, _BASELINES] = None,
    config: Config = None,
) -> None:
    """Accept the results of a run as baselines."""
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.judge import baselines as accepted
    from assay.harness.judge.build import build
    from assay.reports.run_report import run_document

    folder = RunFolder(run)
    root = baselines or Path(make_spec({}, config).policy.baselines)
    report = build(folder)
    say(run_document(report).answer)
    proposals = accepted.propose(folder, report.verdict, root, widen)
    for proposal in proposals:
        console.print(_table(proposal))
    accepted.refuse_worse(proposals)
    if not (yes or typer.confirm(f"Write to {root}?", default=False)):
        raise typer.Exit(ExitCode.NO_VERDICT)
    for written in accepted.accept(folder, proposals, root):
        say(f"Accepted: {written}")


def _table(proposal: Proposal) -> Table:
    title = (
        f"{proposal.role}: {proposal.now.key.backend} as {proposal.now.key.name}{'' if proposal.before else ' (new)'}"
    )
    table = Table("number", "accepted", "now", "", title=title, title_justify="left")
    for change in proposal.changes:
        before, now = ("" if number is None else f"{number:.4g}" for number in (change.before, change.now))
        if before != now:
            table.add_row(change.name, before, now, "worse" if change.worse else "")
    if not table.row_count:
        table.add_row("nothing changed", "", "", "")
    return table
