"""Looking inside: ``assay diff``, ``assay replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.app import app, console, flag, interpret_without_gpu
from harness.config import make_spec
from harness.errors import ExitCode, UsageError


@app.command()
def diff(
    device: Annotated[str | None, flag("device")] = None,
    reference: Annotated[str | None, flag("reference")] = None,
    candidate: Annotated[str | None, flag("candidate")] = None,
    model: Annotated[str | None, flag("model")] = None,
    engine_arg: Annotated[list[str] | None, flag("engine_arg")] = None,
    budget_mb: Annotated[int, typer.Option(help="Size of the replay pack that is recorded.", min=1)] = 256,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the server's log, the errors and the pack.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="An assay.toml; by default the one in this folder, if any.")
    ] = None,
) -> None:
    """Run the candidate in the shadow of the reference: its own error by layer, head and condition, and the bug's name."""
    from harness import diff as shadowing
    from harness.attention import kernels
    from harness.engines.catalog import is_url
    from harness.progress import Watch
    from harness.run import default_folder, prepare
    from reports.own_error import render_cells, render_replay

    flags: dict[str, Any] = {"device": device, "reference": reference, "candidate": candidate, "model": model}
    flags |= {"engine_arg": tuple(engine_arg) if engine_arg is not None else None, "greedy_prompts": 0}
    interpret_without_gpu()
    spec = make_spec(flags | {"questions": shadowing.COLD + shadowing.WARM}, config)
    for name, backend in (("--reference", spec.reference), ("--candidate", spec.candidate)):
        if is_url(backend):
            raise UsageError(
                f"{name} is the URL {backend}.", "a backend or kernel, to look into", "name one; see assay backends"
            )
    plan = prepare(spec)
    folder = out or default_folder(spec)
    with Watch(console) as watch:
        cells = shadowing.shadow(plan, folder, budget_mb * 2**20, watch)
    code = render_cells(cells, spec.candidate, console)
    pack = shadowing.pack_of(folder)
    if not (kernels.is_path(spec.candidate) or spec.candidate in kernels.published()):
        # Without a replay no bound was applied, and numbers that nothing was held against are no pass.
        console.print(
            f"No verdict: {spec.candidate} is no kernel that can be replayed, so it was held against no bound.",
            markup=False,
            soft_wrap=True,
        )
        code = ExitCode.NO_VERDICT
    else:
        again = f"assay replay {pack} --candidate {spec.candidate}"
        code = max(code, render_replay(shadowing.replay(pack, spec.candidate, again), console), key=_worse)
    console.print(f"Replay pack: {pack}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


@app.command()
def replay(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, as `assay diff` leaves one.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, or module:function.")],
) -> None:
    """Run a kernel over recorded calls, with no server and no model, and name what is wrong with it."""
    from harness import diff as shadowing
    from harness.attention.call import KernelRefused
    from reports.own_error import render_replay

    interpret_without_gpu()
    try:
        result = shadowing.replay(pack, candidate, f"assay replay {pack} --candidate {candidate}")
    except KernelRefused as error:
        raise UsageError(f"--candidate: {error}.", "a kernel", "see assay backends") from None
    raise typer.Exit(render_replay(result, console))


def _worse(code: int) -> int:
    """Orders exit codes: a regression is worse than no verdict, and that than a pass."""
    return [ExitCode.PASS, ExitCode.NO_VERDICT, ExitCode.REGRESSION].index(ExitCode(code))
