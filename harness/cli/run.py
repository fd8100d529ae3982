"""Commands that run servers or show past runs: ``assay run``, ``bench``, ``report``, ``runs``, ``backends``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.harness.cli.app import app
from assay.harness.cli.flags import Config, Out, instrumented_spec, spec_flags
from assay.harness.cli.output import deliver, new_folder, progress, say, write_asked
from assay.harness.config import BENCH_FLAGS, RUN_FLAGS, RUNS, RunSpec, make_spec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.extras import require
from assay.harness.files import LOCK, lock_folder
from assay.harness.interruption import too_late
from assay.harness.sides import BUILTIN_MODEL, Engine
from assay.harness.text import did_you_mean

if TYPE_CHECKING:
    from assay.harness.judge.report import Report


@app.command()
@spec_flags(RUN_FLAGS)
def run(
    flags: dict[str, Any],
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="PACK",
            help="Only record a replay pack into this new folder: q, k, v and outputs of selected calls of a short workload, "
            "for running kernels without a server.",
            callback=new_folder,
        ),
    ] = None,
    out: Out = None,
    config: Config = None,
) -> None:
    """Ask both servers the same questions, and decide if the candidate may be merged."""
    if record:
        _record(flags, record, config)
        return
    spec = make_spec(flags, config)
    if (
        {"layers"} <= set(spec.workload.suites) <= {"layers", "logits"}
    ):  # the layers are visible only in a server that assay starts
        spec = instrumented_spec(flags, config)
    raise typer.Exit(run_and_report(spec, out).exit_code)


def _record(flags: dict[str, Any], pack: Path, config: Path | None) -> None:
    """Record a replay pack, without a verdict."""
    from assay.harness.run.plan import prepare
    from assay.harness.run.run import record_pack
    from assay.reports.check import pack_document

    spec = instrumented_spec(flags | {"suites": "layers"}, config)
    with progress() as display:
        manifest = record_pack(prepare(spec), pack, display)
    deliver(pack_document(manifest, pack))


def run_and_report(spec: RunSpec, out: Path | None, *, gate: bool = False) -> Report:
    """Run, write every report into the run's folder, and show the verdict."""
    from assay.harness.run.run import run
    from assay.harness.run.run_folder import default_folder

    folder = out or default_folder(spec.candidate.backend)
    with progress() as display:
        made = run(spec, folder, gate=gate, display=display)
    interrupted = made.failure is not None and made.failure.kind == "interrupted"
    _show(made, folder, interrupted=f" after {display.ran() or 'nothing was asked'}" * interrupted)
    return made


def _show(made: Report, folder: Path, interrupted: str = "") -> None:
    """Write every report of a run and show the verdict; if just interrupted, say when and how to resume."""
    from assay.harness.judge.history import PAGE
    from assay.reports.run_report import run_document
    from assay.reports.write import write_reports

    with too_late():
        write_reports(made, folder)
        document = run_document(made, folder / PAGE)
        if not interrupted:
            deliver(document)
            return
    assert made.failure is not None
    say(f"Interrupted{interrupted}. There is no verdict, so this is not a pass. What was measured is in {folder}.")
    say(f"{made.failure.do[0].upper()}{made.failure.do[1:]}")
    write_asked(document)


@app.command()
@spec_flags(BENCH_FLAGS, hidden=("servers",))  # it needs both servers at the same time
def bench(
    flags: dict[str, Any],
    out: Out = None,
    config: Config = None,
) -> None:
    """Time both servers side by side and judge the ratio of their times: a run of the suite latency alone."""
    require("serve", "assay bench")
    raise typer.Exit(run_and_report(make_spec(flags, config).changed(suites=("latency",)), out).exit_code)


@app.command()
def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help=f"A run's folder, a report.json, or the start of a name in {RUNS}; by default the newest run there.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Judge a run's evidence again, rewrite the reports in its folder, and show the report; show a report.json as it is."""
    from assay.harness.cli.invariance import show_features
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.evidence.invariance import InvarianceFolder, compares_features
    from assay.harness.judge.history import MANIFEST, PAGE, check_run, find_run, report_of
    from assay.harness.judge.invariance import judge_invariance
    from assay.reports.run_report import run_document

    path = find_run(Path(run) if run else None, RUNS)
    if compares_features(path):
        raise typer.Exit(show_features(judge_invariance(InvarianceFolder(path)), path))
    if (path / MANIFEST).is_file():
        from assay.harness.judge.build import build

        _refuse_running(path)
        made = build(RunFolder(path))
        _show(made, path)
        raise typer.Exit(made.exit_code)
    if path.is_file() and path.suffix != ".json":
        check_run(path)
    document = run_document(report_of(path), (path if path.is_dir() else path.parent) / PAGE)
    raise typer.Exit(deliver(document))


def _refuse_running(run: Path) -> None:
    """Refuse to judge a run that still gathers evidence. Raises UsageError."""
    if not (run / LOCK).exists():
        return
    try:
        with suppress(EvidenceError):  # a folder that cannot be written
            lock_folder(run).release()
    except UsageError as error:
        raise UsageError(
            error.found, "a run that has ended", "wait until it has ended, and repeat this command"
        ) from None


@app.command()
def runs(folder: Annotated[Path, typer.Argument(help="A folder of runs.")] = RUNS) -> None:
    """List the runs in a folder: verdict, treatment, date, worst own error, and the history of each suite."""
    from assay.harness.judge.history import list_runs
    from assay.reports.runs import runs_document

    deliver(runs_document(list_runs(folder)))


@app.command()
def backends(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[BACKEND]...", help="With --honours: the backends to test; by default all."),
    ] = None,
    honours: Annotated[
        bool,
        typer.Option(
            "--honours",
            help="Run an engine's backends with every feature that a layer can ask for; show what each ignores.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="With --honours: use this model's dtype and head_dim; by default two of each."),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="With --honours: the engine.")] = "sglang",
    python: Annotated[str, typer.Option("--python", help="With --honours: the Python that has the engine.")] = "",
) -> None:
    """List the attention backends and kernels, or find the model features that an engine's backends silently ignore."""
    if honours:
        raise typer.Exit(_honours(names, model, engine, python))
    if names or model or python or engine != "sglang":
        raise UsageError(
            "Backends, --model, --engine and --python have no effect without --honours.",
            "them with --honours",
            "add --honours, or leave them out",
        )
    from assay.harness.attention import kernels
    from assay.harness.attention.call import KernelRefused
    from assay.harness.attention.declaration import declaration
    from assay.harness.engines.registry import backends
    from assay.harness.sides import ENGINES

    listed: list[dict[str, Any]] = []
    for name, path in sorted(kernels.published().items()):
        try:
            declared = declaration(kernels.load(name))
            about = {"phases": declared.phases, "about": declared.about, "noise": declared.noise}
        except KernelRefused as error:
            about = {"problem": str(error)}
        listed.append({"name": name, "path": path, **about})
    own: dict[Engine, tuple[str, ...]] = dict.fromkeys(ENGINES, ())
    problems: dict[Engine, str] = {}
    for engine in ENGINES:
        try:
            own[engine] = backends(engine)
        except UsageError as error:
            problems[engine] = str(error)
    from assay.reports.honours import list_document

    deliver(list_document(listed, own, problems))


def _honours(names: list[str] | None, model: str | None, engine: Engine, python: str) -> int:
    """Test which model features an engine's backends honour, and return the exit code."""
    from assay.harness.attention.call import default_device
    from assay.harness.checks.honours import measure
    from assay.harness.engines.environments import python_of
    from assay.harness.engines.model import resolve_model
    from assay.harness.engines.registry import backends
    from assay.harness.run.preflight import served_in
    from assay.harness.sides import Side, profile_of
    from assay.reports.honours import honours_document

    known = backends(engine)
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(
            f"{profile_of(engine).title} has no attention backend {unknown[0]!r}.", f"one of {', '.join(known)}",
            did_you_mean(unknown[0], known) or "name one of these",
        )  # fmt: skip
    side = Side(engine=engine, backend=known[0], model=model or BUILTIN_MODEL, interpreter=python)
    shape = served_in(resolve_model(model), side, default_device()) if model else None
    with progress() as display:
        result = measure(
            names or known, note=lambda backend: display.say(f"measuring {backend}"), model=shape, engine=engine,
            python=python_of(side),
        )  # fmt: skip
    return deliver(honours_document(result))
