"""Looking inside: ``assay diff``, ``assay record``, ``assay replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.harness.cli.app import app, console, flag, interpret_without_gpu
from assay.harness.config import RunSpec, make_spec
from assay.harness.engines.backend import Backend
from assay.harness.errors import UsageError

_CONFIG = typer.Option(help="An assay.toml; by default the one in this folder, if any.")


def _spec(flags: dict[str, Any], config: Path | None) -> RunSpec:
    """A spec of two backends that can be looked into.

    Raises:
        UsageError: one of them is a URL.
    """
    if flags.get("engine_arg") is not None:
        flags["engine_arg"] = tuple(flags["engine_arg"])
    interpret_without_gpu()
    spec = make_spec(flags, config)
    for name, backend in (("--reference", spec.reference), ("--candidate", spec.candidate)):
        if Backend.parse(backend).is_url:
            raise UsageError(
                f"{name} is the URL {backend}.", "a backend or kernel, to look into", "name one; see assay backends"
            )
    return spec


@app.command()
def diff(
    device: Annotated[str | None, flag("device")] = None,
    reference: Annotated[str | None, flag("reference")] = None,
    candidate: Annotated[str | None, flag("candidate")] = None,
    model: Annotated[str | None, flag("model")] = None,
    data: Annotated[str | None, flag("data")] = None,
    engine_arg: Annotated[list[str] | None, flag("engine_arg")] = None,
    suites: Annotated[str, typer.Option(help="layers, or layers,logits.")] = "layers,logits",
    greedy_prompts: Annotated[
        int | None, typer.Option(help="Number of prompts whose logits are compared, 16 at most.", show_default=False)
    ] = None,
    budget_mb: Annotated[int | None, flag("budget_mb")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; what is unfinished in it is gone on with.")] = None,
    config: Annotated[Path | None, _CONFIG] = None,
) -> None:
    """Run the candidate in the shadow of the reference: its own error by layer, head and condition, and the bug's name."""
    from assay.harness.cli.run import measure

    flags = {key: value for key, value in locals().items() if key in RunSpec.model_fields}
    spec = _spec(flags, config)
    if not {"layers"} <= set(spec.suites) <= {"layers", "logits"}:
        raise UsageError(f"--suites is {suites}.", "layers, or layers,logits", "ask for answers with assay run")
    made, _ = measure(spec, out)
    raise typer.Exit(made.exit_code)


@app.command()
def record(
    pack: Annotated[Path, typer.Argument(help="A new folder for the replay pack.")],
    device: Annotated[str | None, flag("device")] = None,
    reference: Annotated[str | None, flag("reference")] = None,
    candidate: Annotated[
        str | None, typer.Option(help="A backend whose worst calls are kept too; by default that of the profile.")
    ] = None,
    model: Annotated[str | None, flag("model")] = None,
    data: Annotated[str | None, flag("data")] = None,
    engine_arg: Annotated[list[str] | None, flag("engine_arg")] = None,
    budget_mb: Annotated[int | None, flag("budget_mb")] = None,
    config: Annotated[Path | None, _CONFIG] = None,
) -> None:
    """Record a replay pack: q, k, v and the reference's output of chosen calls, to run kernels on without a server."""
    from assay.harness.collect.plan import prepare
    from assay.harness.collect.record import record_pack
    from assay.harness.progress import ProgressDisplay
    from assay.reports.replay_terminal import render_pack

    flags = {key: value for key, value in locals().items() if key in RunSpec.model_fields}
    spec = _spec(flags | {"suites": "layers"}, config)
    with ProgressDisplay(console) as display:
        manifest = record_pack(prepare(spec), pack, display)
    render_pack(manifest, pack, console)


@app.command()
def replay(
    pack: Annotated[
        Path, typer.Argument(help="Folder of a replay pack, as `assay record` or `assay diff` leaves one.")
    ],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, or module:function.")],
) -> None:
    """Run a kernel over recorded calls, with no server and no model, and name what is wrong with it."""
    from assay.harness.attention.call import KernelRefused
    from assay.harness.offline import replay as replaying
    from assay.reports.replay_terminal import render_replay

    interpret_without_gpu()
    told = lambda found: console.print(f"First: {found[0].where}: {found[0].diagnosis}", markup=False, soft_wrap=True)  # noqa: E731
    try:
        result = replaying.replay(pack, candidate, f"assay replay {pack} --candidate {candidate}", told)
    except KernelRefused as error:
        raise UsageError(f"--candidate: {error}.", "a kernel", "see assay backends") from None
    raise typer.Exit(render_replay(result, console))
