"""``assay bisect commits`` and, for ``git bisect run``, ``assay bisect probe``."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.cli.app import console, errors, report_error, say
from assay.harness.cli.bisect import bisect_app
from assay.harness.errors import AssayError, ExitCode, UsageError

GOOD, BAD, SKIP, ABORT = 0, 1, 125, 128
"""Exit codes of ``git bisect run``."""
RUNS = Path("runs")

Kernel = Annotated[str, typer.Option(help="The kernel, as module:function; the module is the commit's own.")]
Build = Annotated[str, typer.Option(help="Shell command that builds a commit, run at the top of its tree.")]
Pack = Annotated[Path | None, typer.Option(help="Use the recorded calls of this replay pack.")]
Condition = Annotated[
    list[str] | None,
    typer.Option(
        help="axis=value, for example phase=extend or prefix=128: use only calls that meet it; may be repeated."
    ),
]
Calls = Annotated[int, typer.Option(help="Maximum number of calls; 0 for all. An interpreted kernel is slow.", min=0)]
Source = Annotated[
    list[str] | None,
    typer.Option(help="Folder of the tree to import modules from; by default . and src."),
]
Raises = Annotated[
    Literal["skip", "bad"], typer.Option(help="How to classify a commit whose kernel raises, dies or hangs on a call.")
]


@bisect_app.command()
def commits(
    repo: Annotated[Path, typer.Option(help="A folder of the repository. Its checkout is never touched.")] = Path("."),
    good: Annotated[str, typer.Option(help="A revision whose kernel is good.", show_default=False)] = "",
    bad: Annotated[str, typer.Option(help="A later revision whose kernel is bad.", show_default=False)] = "",
    kernel: Kernel = "",
    build: Build = "",
    pack: Pack = None,
    condition: Condition = None,
    calls: Calls = 0,
    source: Source = None,
    judge: Annotated[
        Literal["replay", "accuracy"],
        typer.Option("--with", help="Classify commits by own error on calls, or by an assay run per commit."),
    ] = "replay",
    against: Annotated[
        Literal["bound", "good"],
        typer.Option(help="Compare each call's own error with its bound, or with that of the good revision."),
    ] = "bound",
    times: Annotated[
        float, typer.Option(help="With --against good: the largest acceptable multiple of its error.", min=1)
    ] = 2.0,
    raises: Raises = "skip",
    first_parent: Annotated[bool, typer.Option("--first-parent", help="Follow first parents only.")] = False,
    repeats: Annotated[int, typer.Option(help="Probes of each end before the search, if they agree.", min=1)] = 3,
    confidence: Annotated[
        float, typer.Option(help="Probability at which a commit is named.", min=0.51, max=0.9999)
    ] = 0.99,
    scan: Annotated[
        int | None,
        typer.Option(
            help="Further commits to probe after the culprit is named, for the error profile; by default 8.", min=0
        ),
    ] = None,
    keep_build: Annotated[
        bool, typer.Option("--keep-build", help="Keep the files that git ignores from commit to commit.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Time limit of a probe, in seconds.", min=0.1)] = None,
    build_timeout: Annotated[float, typer.Option(help="Time limit of a build, in seconds.", min=0.1)] = 1800.0,
    run_arg: Annotated[
        list[str] | None, typer.Option(help="With --with accuracy: a further argument of assay run; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the op-level calls.")] = 0,
    status: Annotated[
        bool, typer.Option("--status", help="Show the progress of a bisection without changing it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The bisection's folder; by default one named after its settings.")
    ] = None,
) -> None:
    """Find the commit that made a kernel worse. The same command resumes a bisection that was stopped.

    Exit codes: 0 a commit is named, 2 usage error (also if a stated end turns out otherwise), 3 no commit could be named.

    """
    from assay.harness.bisect.commits import session, ui
    from assay.harness.bisect.commits.repo import Repository
    from assay.harness.bisect.commits.state import BisectFolder, BisectSpec

    if status and (out or not kernel):
        ui.render(BisectFolder(out or _latest()).read(), console)
        return
    for name, value in (("--good", good), ("--bad", bad), ("--kernel", kernel)):
        if not value:
            raise UsageError(f"{name} is missing.", "--good, --bad and --kernel", "see assay bisect commits --help")
    _check_kernel(kernel)
    if judge == "accuracy" and (pack or condition or calls or against == "good"):
        raise UsageError(
            "--with accuracy was given with --pack, --condition, --calls or --against.",
            "an accuracy run per commit, or a replay of calls",
            "remove one of them",
        )
    repository = Repository(repo)
    spec = BisectSpec(
        repo=str(repository.path), good=repository.resolve(good), bad=repository.resolve(bad), kernel=kernel, build=build,
        sources=tuple(source) if source else BisectSpec.model_fields["sources"].default, first_parent=first_parent,
        judge=judge, against=against, times=times, pack=str(pack.resolve()) if pack else "",
        conditions=tuple(condition or ()), calls=calls, seed=seed, raises=raises, repeats=repeats, confidence=confidence,
        scan=scan if scan is not None else 0 if judge == "accuracy" else 8, keep_build=keep_build,
        timeout=timeout or (7200.0 if judge == "accuracy" else 300.0), build_timeout=build_timeout,
        run_args=tuple(run_arg or ()),
    )  # fmt: skip
    folder = BisectFolder(out or RUNS / f"bisect-{spec.digest}")
    if status:
        ui.render(folder.read(), console)
        return
    with folder.locked():
        if folder.state_file.exists():
            state = folder.read()
            if state.spec != spec:
                raise UsageError(f"{folder.path} holds another bisection.", "the same one", "use another --out")
        else:
            state = session.new_state(spec, repository, shlex.join(["assay", *sys.argv[1:]]))
            folder.write(state)
        if state.result is None:
            state = _bisect(folder, state, repository)
        _report(folder, state)
    assert state.result is not None
    raise typer.Exit(session.exit_code(state.result))


def _bisect(folder: Any, state: Any, repository: Any) -> Any:
    from assay.harness.bisect.commits import session, ui
    from assay.harness.bisect.commits.executor import AccuracyProber, Builder, Forks, ReplayProber

    spec = state.spec
    interpret_without_gpu()  # before the process that probes are forked from imports Triton
    calls = None if spec.judge == "accuracy" else _calls(folder.path, spec)
    say(f"Bisecting {len(state.history)} commits in {folder.path}; {len(state.probes)} probes are already done.")
    with _stoppable(), repository.worktree() as tree, ui.ProgressView(console) as view:
        replay = ReplayProber(spec, Builder(spec, tree), tree.path, calls, Forks())
        prober = replay if spec.judge == "replay" else AccuracyProber(spec, replay, tree.path)
        return session.Session(folder, state, prober, repository, view).run()


def _calls(folder: Path, spec: Any) -> Path:
    """The file of the calls, written once so that every commit computes the same ones."""
    from assay.harness.bisect.commits import probe_calls
    from assay.harness.evidence.pack import read_pack
    from assay.harness.offline.replay import choose

    file = (folder / probe_calls.FILE).resolve()
    if not file.exists():
        if spec.pack:
            found = probe_calls.recorded_calls([one.call for one in choose(read_pack(Path(spec.pack)))])
        else:
            found = probe_calls.matrix_calls(spec.seed)
        probe_calls.write_calls(file, probe_calls.choose_calls(found, spec.conditions, spec.calls))
    return file


def _report(folder: Any, state: Any) -> None:
    from assay.harness.bisect.commits import ui
    from assay.reports.commit_bisect_page import write_reports

    ui.render(state, console)
    written = write_reports(state, folder)
    say(f"Report: {written}")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end a bisection with its worktree removed and a message."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise AssayError("The bisection was stopped.", do="run the same command again to resume it") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _latest() -> Path:
    found = sorted(RUNS.glob("bisect-*/state.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError("There is no bisection in runs/.", "at least one", "give its folder with --out")
    return found[-1].parent


def _check_kernel(kernel: str) -> None:
    from assay.harness.attention.kernels import is_path

    if not is_path(kernel):
        raise UsageError(
            f"--kernel {kernel} is not of the form module:function.",
            "a function of the repository",
            "name it as module:function",
        )


class _ForGit(TyperCommand):
    """A command that exits with 128 on a usage error: the usual 2 would mean a bad commit to ``git bisect run``."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            # click's UsageError or typer's own copy of it, depending on the version
            if getattr(error, "exit_code", 0) != ExitCode.USAGE:
                raise
            report_error(error)
            sys.exit(ABORT)


@bisect_app.command(cls=_ForGit)
def probe(
    kernel: Kernel,
    repo: Annotated[Path, typer.Option(help="The checkout to probe.")] = Path("."),
    build: Build = "",
    pack: Pack = None,
    condition: Condition = None,
    calls: Calls = 0,
    source: Source = None,
    raises: Raises = "skip",
    timeout: Annotated[float, typer.Option(help="Time limit of the probe, in seconds.", min=0.1)] = 300.0,
    build_timeout: Annotated[float, typer.Option(help="Time limit of the build, in seconds.", min=0.1)] = 1800.0,
    seed: Annotated[int, typer.Option(help="Seed of the op-level calls.")] = 0,
) -> None:
    """Probe the kernel of a checkout as it is, for git bisect run.

    Exit codes are git's: 0 good, 1 bad, 125 skip, 128 for a broken environment or a usage error, which stops git.

    """
    try:
        code = _probe_here(kernel, repo, build, pack, condition, calls, source, raises, timeout, build_timeout, seed)
    except AssayError as error:
        report_error(error)
        code = ABORT
    except Exception:
        errors.print_exception()
        code = ABORT
    raise typer.Exit(code)


def _probe_here(
    kernel: str, repo: Path, build: str, pack: Path | None, condition: list[str] | None, calls: int,
    source: list[str] | None, raises: Literal["skip", "bad"], timeout: float, build_timeout: float, seed: int,
) -> int:  # fmt: skip
    from assay.harness.bisect.commits import probe as process
    from assay.harness.bisect.commits.executor import Forks, run_build
    from assay.harness.bisect.commits.outcome import outcome_of
    from assay.harness.bisect.commits.repo import Repository
    from assay.harness.bisect.commits.state import BisectSpec

    _check_kernel(kernel)
    interpret_without_gpu()
    top = Repository(repo).path
    sources = tuple(source) if source else BisectSpec.model_fields["sources"].default
    spec = BisectSpec(
        repo=str(top), good="", bad="", kernel=kernel, sources=sources, raises=raises, pack=str(pack) if pack else "",
        conditions=tuple(condition or ()), calls=calls, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="assay-probe-") as made:
        scratch = Path(made)
        why, _ = run_build(build, top, build_timeout, scratch / "log")
        if why:
            say(f"skip: {why}")
            return SKIP
        task = process.Task(top, sources, kernel, _calls(scratch, spec), scratch / "result.json", scratch / "log")
        measured = Forks().run(task, timeout)
    outcome = outcome_of(measured, spec, [])
    worst = f"worst own error {outcome.worst:.3g} times its bound, {outcome.where}" if outcome.worst is not None else ""
    text = f"{outcome.outcome}: {worst or outcome.reason} ({measured.origin or 'not imported'})"
    say(text)
    return {"good": GOOD, "bad": BAD, "skip": SKIP}[outcome.outcome]
