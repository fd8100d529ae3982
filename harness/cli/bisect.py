"""``assay bisect layers``, ``assay bisect sides``, ``assay bisect commits`` and, for ``git bisect run``, ``assay bisect probe``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand

from assay.harness.cli.app import app, wrong_use
from assay.harness.cli.flags import STARTED, Config, existing, instrumented_spec, spec_flags
from assay.harness.cli.output import deliver, errors, file_row, new_folder, progress, report_error, say
from assay.harness.config import BISECT_FLAGS, SIDES_FLAGS
from assay.harness.errors import GIT_ABORT, AssayError, ExitCode
from assay.harness.extras import require

_bisect_app = typer.Typer(
    no_args_is_help=True, help="Find the layers, the settings or the commit that an error comes from."
)
app.add_typer(_bisect_app, name="bisect")


@_bisect_app.command()
@spec_flags(BISECT_FLAGS, about=STARTED)
def layers(
    flags: dict[str, Any],
    questions: Annotated[int, typer.Option(help="Questions in each probe.", min=1)] = 32,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the server's log and bisect.json.", callback=new_folder)
    ] = None,
    config: Config = None,
) -> None:
    """Find the layers that need the reference.

    Layers of one running server are switched back to the reference until the output is correct again.

    Exit codes: 0 no layer needs the reference, 1 layers were found, 2 usage error, 3 undecided.

    """
    require("serve", "assay bisect layers")

    from assay.harness.drivers.bisect.layer_probes import bisect_layers
    from assay.harness.files import write_whole
    from assay.harness.run.plan import prepare
    from assay.harness.run.run_folder import default_folder
    from assay.reports.bisection import layers_document

    spec = instrumented_spec(flags | {"questions": questions, "suites": "accuracy,layers"}, config)
    plan = prepare(spec)
    folder = out or default_folder(spec.candidate.backend)
    with progress() as display:
        result = bisect_layers(plan, folder, display)
    document = layers_document(result)
    write_whole(folder / "bisect.json", document.json(result) + "\n")
    code = deliver(document)
    file_row("Details", folder / "bisect.json")
    raise typer.Exit(code)


@_bisect_app.command()
@spec_flags(SIDES_FLAGS, about=STARTED)
def sides(
    flags: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(help="The bisection's folder; by default one named after its settings.", callback=new_folder),
    ] = None,
    config: Config = None,
) -> None:
    """Find the smallest set of differences between two sides that breaks the candidate.

    Flags, variables, packages of two environments and files of two model folders are applied to the reference one subset after
    the other. The same command resumes a bisection that was stopped.

    Exit codes: 0 all differences together break nothing, 1 differences are named, 2 usage error, 3 undecided.

    """
    require("serve", "assay bisect sides")

    from assay.harness.drivers.bisect.sides_probes import bisect_sides
    from assay.harness.files import write_whole
    from assay.reports.bisection import sides_document

    spec = instrumented_spec({"questions": _QUESTIONS_OF_SIDES} | flags | {"suites": "accuracy,greedy,logits"}, config)
    with _stoppable(), progress() as display:
        result, folder = bisect_sides(spec, out, display)
    document = sides_document(result)
    write_whole(folder / "bisect.json", document.json(result) + "\n")
    code = deliver(document, folder / "report.html")
    file_row("Details", folder / "bisect.json")
    raise typer.Exit(code)


# A question is asked of every set that nothing cheaper decides about: far fewer than a run asks.
_QUESTIONS_OF_SIDES = 512

# Exit codes of ``git bisect run``, by outcome.
_GIT_CODES = {"good": 0, "bad": 1, "skip": 125}

_REPOSITORY = existing("a folder of a git repository")
_Kernel = Annotated[str, typer.Option(help="The kernel, as module:function; the module is the commit's own.")]


_Build = Annotated[str, typer.Option(help="Shell command that builds a commit, run at the top of its tree.")]
_Pack = Annotated[Path | None, typer.Option(help="Use the recorded calls of this replay pack.")]
_Calls = Annotated[int, typer.Option(help="Maximum number of calls; 0 for all. An interpreted kernel is slow.", min=0)]
_Raises = Annotated[
    Literal["skip", "bad"], typer.Option(help="How to classify a commit whose kernel raises, dies or hangs on a call.")
]


@_bisect_app.command()
def commits(
    repo: Annotated[
        Path, typer.Option(help="A folder of the repository. Its checkout stays untouched.", callback=_REPOSITORY)
    ] = Path("."),
    good: Annotated[str, typer.Option(help="A revision whose kernel is good.", show_default=False)] = "",
    bad: Annotated[str, typer.Option(help="A later revision whose kernel is bad.", show_default=False)] = "",
    kernel: _Kernel = "",
    build: _Build = "",
    pack: _Pack = None,
    calls: _Calls = 0,
    raises: _Raises = "skip",
    out: Annotated[
        Path | None,
        typer.Option(help="The bisection's folder; by default one named after its settings.", callback=new_folder),
    ] = None,
) -> None:
    """Find the commit that made a kernel worse.

    Run the same command again to resume a bisection that was stopped.

    Exit codes: 0 a commit is named, 2 usage error (also if --good or --bad is not what you stated), 3 no commit could be named.

    """
    from assay.harness.drivers.bisect.commits.bisection import bisect_commits, bisection_spec
    from assay.harness.files import write_whole
    from assay.reports.bisection import bisection_document

    settings = {"kernel": kernel, "build": build, "pack": pack, "calls": calls, "raises": raises}
    spec = bisection_spec(repo, {"good": good, "bad": bad, **settings})
    with _stoppable(), progress() as display:
        state, folder = bisect_commits(spec, out, display.say)
    assert state.result is not None
    write_whole(folder.path / "report.json", state.model_dump_json(indent=1))
    deliver(bisection_document(state), folder.path / "report.html")
    raise typer.Exit(state.result.exit_code)


@contextmanager
def _stoppable() -> Iterator[None]:
    """On Ctrl-C and SIGTERM, end a bisection with a message and remove its worktree."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise AssayError("The bisection was stopped.", do="run the same command again to resume it") from None
    finally:
        signal.signal(signal.SIGTERM, before)


class _ForGit(TyperCommand):
    """A command that exits with 128 on a usage error: the usual 2 would mean a bad commit to ``git bisect run``."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            if getattr(error, "exit_code", 0) != ExitCode.USAGE:
                raise
            report_error(wrong_use(error) or error)
            raise typer.Exit(GIT_ABORT) from None


@_bisect_app.command(cls=_ForGit)
def probe(
    kernel: _Kernel,
    build: _Build = "",
    pack: _Pack = None,
    calls: _Calls = 0,
    raises: _Raises = "skip",
    repo: Annotated[Path, typer.Option(help="The checkout to probe.", callback=_REPOSITORY)] = Path("."),
) -> None:
    """Probe the kernel of a checkout as it is, for git bisect run.

    Exit codes are git's: 0 good, 1 bad, 125 skip, 128 for a broken environment or a usage error, which stops git.

    """
    try:
        from assay.harness.drivers.bisect.commits.bisection import bisection_spec, probe_checkout

        settings = {"kernel": kernel, "build": build, "pack": pack, "calls": calls, "raises": raises}
        measured = probe_checkout(bisection_spec(repo, settings, ends=False))
        outcome = measured.outcome(raises)
        say(f"{outcome}: {measured.said} ({measured.origin or 'not imported'})")
        code = _GIT_CODES[outcome]
    except AssayError as error:
        report_error(error)
        code = GIT_ABORT
    except Exception:
        errors.print_exception()
        code = GIT_ABORT
    raise typer.Exit(code)
