"""The certificate: ``assay certify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import app, errors, say
from assay.harness.cli.flags import Jobs, Ray, WithRay
from assay.harness.cli.output import Json, deliver, new_folder, progress
from assay.harness.errors import UsageError

if TYPE_CHECKING:
    from assay.harness.certify.session import Trial
    from assay.harness.certify.spread import Spread
    from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope
    from assay.harness.progress import ProgressDisplay

MATRIX = "certificate.md"
_LEVELS = ("op", "server")


@app.command(cls=WithRay)
def certify(
    out: Annotated[
        Path, typer.Option(help="Folder of the results; a repeated command resumes there.", callback=new_folder)
    ] = Path("certificate"),
    level: Annotated[str, typer.Option(help="op: the op-level matrix; server: a pair of running servers.")] = "op",
    device: Annotated[
        str | None, typer.Option(help="Device to run on; by default a GPU, if there is one.", show_default=False)
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            help="Kernel in whose output faults are seeded: a published name, or module:function; by default PyTorch's attention, "
            "which only rounds. A run cites a certificate of the noise family that its candidate declares.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model folder or hub name; tiny is the model that ships with assay.")
    ] = "tiny",
    fault: Annotated[
        list[str] | None, typer.Option(help="Only the fault with this id; may be repeated.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the op-level matrix and of its data.", min=0)] = 0,
    read_out: Annotated[
        bool,
        typer.Option("--read-out", help="At the op level: also read what each kernel computes whose fault was caught."),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Longest examination of one fault, in seconds; by default 120, or 1,200 with servers, which may have to start.",
            min=1,
            show_default=False,
        ),
    ] = None,
    ray: Ray = None,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Seed a catalogue of faults, and certify which of them are caught, named and pinned.

    Exit codes: 0 if every fault was caught that shows and that the candidate's declared noise does not hide, and there was no false
    alarm; 1 if not; 3 if something was not examined.
    """
    interpret_without_gpu()
    if level not in _LEVELS:
        raise UsageError(f"The level is {level!r}.", f"one of {', '.join(_LEVELS)}", "choose another --level")
    if read_out and level != "op":
        raise UsageError("--read-out was given with --level server.", "--level op", "leave one of them out")
    from assay.harness.certify.kernel import certified_kernel
    from assay.harness.files import write_whole
    from assay.harness.offline.kernel_matrix import checked_device
    from assay.reports.fault_matrix import certificate_document
    from assay.reports.markdown import to_markdown

    display, device, kernel = progress(errors), checked_device(device), certified_kernel(candidate)
    spread = None
    if jobs or ray:
        words = {"level": level, "candidate": candidate, "model": model, "seed": seed, "time-limit": time_limit}
        given = [f"--{word}={value}" for word, value in words.items() if value is not None]
        spread = _spread([*given, *(["--read-out"] if read_out else [])], device, level, jobs, ray)
    if level == "op":
        from assay.harness.certify.op_level import OpLevel, checked, read
        from assay.harness.certify.op_tasks import op_envelope, op_tasks

        matrix = OpLevel(device, seed, kernel)
        known = [task.id for task in op_tasks(matrix)]
        tasks, envelope = op_tasks(matrix, fault or (), read if read_out else checked), op_envelope(matrix, read_out)
        with display:
            certificate = _run(spread, tasks, envelope, out, display, time_limit or 120, known)
    else:
        from assay.harness.certify import server_level as servers
        from assay.harness.extras import require

        require("serve", "assay certify --level server")
        spec = servers.certified_spec(device, model, kernel)
        with display, servers.ServerLevel(spec, out / "run", display, kernel) as pair:
            tasks, known = servers.server_tasks(pair, fault or ()), [task.id for task in servers.server_tasks(pair)]
            envelope = servers.server_envelope(pair)
            certificate = _run(spread, tasks, envelope, out, display, time_limit or 1200, known)
    document = certificate_document(certificate)
    write_whole(out / MATRIX, to_markdown(document))
    say(f"Written: {out / MATRIX}, {out / 'certificate.json'}")
    raise typer.Exit(deliver(document, json))


def _spread(words: list[str], device: str, level: str, jobs: int | None, ray: str | None) -> Spread:
    """Make what spreads the examinations over workers, each with a GPU of its own if they run on one."""
    from assay.harness.certify.spread import Spread
    from assay.harness.sweep.executor import Needs
    from assay.harness.sweep.executors import executor_of

    kind = device.partition(":")[0]
    needs = Needs(gpus=1.0 if kind == "cuda" else 0.0)
    return Spread(executor_of(needs, jobs, ray), needs, [f"--device={kind}", *words], even=level == "server")


def _run(
    spread: Spread | None, tasks: Sequence[Trial], envelope: CertifiedEnvelope, out: Path, display: ProgressDisplay,
    time_limit: float, known: Sequence[str],
) -> Certificate:  # fmt: skip
    """Examine in this process, or where the examinations are spread."""
    if spread is not None:
        return spread.certify([task.id for task in tasks], envelope, out, display, known)
    from assay.harness.certify.session import certify as run

    return run(tasks, envelope, out, display, time_limit, known)
