"""The application: it imports a command only when it runs, and turns errors into a sentence and an exit code."""

from __future__ import annotations

import importlib
import re
import shlex
import signal
import sys
import traceback
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from assay import __version__
from assay.harness.cli.output import add_output_flags, console, detail, errors, keep_open, report_error
from assay.harness.errors import AssayError, ExitCode, UsageError
from assay.harness.files import portable
from assay.harness.interruption import like_ctrl_c
from assay.harness.text import visible

if TYPE_CHECKING:
    from assay.harness.extras import Extra

_GROUPS = {
    "A kernel": {
        "check": ("kernel", "Check a kernel on the op-level matrix; name what is wrong."),
        "replay": ("kernel", "Check a kernel on recorded calls; name what is wrong."),
        "explain": ("kernel", "Explain a finding: wrong and right code, reports, advice."),
    },
    "Servers": {
        "run": ("run", "Ask both servers the same questions; decide if the candidate may merge."),
        "gate": ("gate", "Run in CI, with the policy; accept a reference."),
        "bench": ("run", "Time both servers side by side; judge the ratio of their times."),
        "bisect": ("bisect", "Find the layers, or the commit, that an error comes from."),
        "invariance": ("invariance", "Toggle features that should not affect outputs; compare them."),
        "fingerprint": ("fingerprint", "Show what a server really runs: tokens, RoPE, weights, backends."),
        "backends": ("run", "List backends and kernels; measure what backends honour."),
        "sweep": ("sweep", "Run a command over axes, such as kernels x models."),
        "doctor": ("doctor", "Check this environment: what a run needs and what is missing."),
    },
    "Results": {
        "report": ("run", "Judge a run again, and rewrite and show its report."),
        "runs": ("run", "List the runs in a folder."),
        "compare": ("compare", "Compare two results, runs, traces, tensors or fingerprints."),
        "ingest": ("compare", "Read other tools' logs, results, traces and tensors."),
    },
}
COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
"""Commands in the order of ``assay --help``: the module of this package that defines it, and its line of help there."""

EXTRAS: dict[str, Extra] = dict.fromkeys(("run", "gate", "invariance"), "serve")
"""Commands that always need more than the base install, and the extra that provides it."""


_INTERRUPTED = "assay: interrupted; there is no verdict, so this is not a pass."
# Typer's exit code for a Ctrl-C before or after the command itself.
_CTRL_C = 128 + signal.SIGINT


class _Deferred(TyperCommand):
    """A command in the list of ``assay --help``, imported only when it runs: importing it takes longer than listing all."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        assert self.name is not None
        console.quiet, console.stderr = False, False
        vars(detail).update(verbose=False, json=False, html=None, junit=None, all=False)
        return load_command(self.name).make_context(*args, **kwargs)


class _Commands(TyperGroup):
    """All of `COMMANDS`, deferred."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            raise wrong_use(error) or error from None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _Deferred(cmd_name, short_help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, commands in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<11}", about) for name, (_, about) in commands.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            with like_ctrl_c():
                return super().invoke(ctx)
        # On the next two exceptions, Typer would exit with 1, which means that the candidate regressed.
        except KeyboardInterrupt:
            errors.print(_INTERRUPTED, markup=False)
            raise typer.Exit(ExitCode.NO_VERDICT) from None
        except typer.Abort:
            errors.print(
                "\nassay: not confirmed, so nothing was done.\nWhat to do: answer y, or add --yes in a pipeline",
                markup=False,
            )
            raise typer.Exit(ExitCode.NO_VERDICT) from None
        except SystemExit as error:  # no command raises it; a kernel's exit code would be mistaken for the command's
            raise AssayError(
                f"Something outside assay called sys.exit({error.code}), so there is no verdict.",
                "a kernel that returns an output or raises an exception",
                "look for sys.exit in the kernel and in what it imports",
            ) from error
        except Exception as error:
            if (wrong := wrong_use(error)) is None:
                raise
            raise wrong from None


app = typer.Typer(
    name="assay",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: nothing is cut off in a narrow terminal, and a pipe gets no boxes
    help="Compare a candidate with a reference in LLM serving.\n\n"
    "Exit codes: 0 pass, 1 regression, 2 usage error, 3 no verdict.",
    epilog="See also assay COMMAND --help, --version, --install-completion.",
)


def wrong_use(error: Exception) -> UsageError | None:
    """Convert Typer's error about a command line to the form of assay's errors, or return None for any other error."""
    context = getattr(error, "ctx", None)
    # click's UsageError or Typer's own copy of it, depending on the version; a group without a command shows its help instead
    if getattr(error, "exit_code", 0) != ExitCode.USAGE or context is None or "NoArgs" in type(error).__name__:
        return None
    from assay.harness.config import expectation
    from assay.harness.text import did_you_mean

    words, above = list[str](), context
    while above.parent is not None:
        words, above = [above.info_name, *words], above.parent
    name = " ".join(["assay", *words])
    see, message, param = f"see {name} -h", str(error.format_message()), getattr(error, "param", None)  # type: ignore[attr-defined]
    if unknown := re.match(r"No such command '(.*?)'", message):
        known = context.command.list_commands(context)
        near = did_you_mean(unknown[1], known)
        return UsageError(f"{name} has no such command '{unknown[1]}'.", f"one of {', '.join(known)}", near or see)
    if unknown := re.match(r"No such option:? '?(-[^\s']*)", message):
        params = [param for param in context.command.params if not getattr(param, "hidden", False)]
        near = did_you_mean(unknown[1], [word for param in params for word in param.opts if word.startswith("--")])
        known = [max(param.opts, key=len) for param in params if param.param_type_name == "option"]
        return UsageError(f"{name} has no option {unknown[1]}.", f"one of {', '.join(known)}", near or see)
    if param is not None and (value := _given(param.opts)) is not None and "Missing" not in type(error).__name__:
        return UsageError(f"{param.opts[0]} is {value!r}.", expectation(str(getattr(error, "message", message))), see)
    required = [
        f"{each.opts[0]} ..." for each in context.command.params if each.required and each.opts[0].startswith("-")
    ]
    pieces = [
        re.sub(r"\{(\w+)\}", lambda word: word[1].upper(), piece)
        for piece in context.command.collect_usage_pieces(context)
    ]
    usage = " ".join([name, *pieces, *required])
    if further := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return UsageError(f"{name} takes no further argument: {further[1]}.", usage, f"remove it, or {see}")
    return UsageError(f"{name}: {message[0].lower()}{message[1:].rstrip('.')}.", usage, see)


def _given(names: list[str]) -> str | None:
    """Return the value that the command line gives an option, or None unless it is given exactly once."""
    words = sys.argv[1:]
    values = [after for word, after in pairwise(words) if word in names]
    values += [word.partition("=")[2] for word in words if "=" in word and word.partition("=")[0] in names]
    return values[0] if len(values) == 1 else None


def as_given() -> str:
    """Return the command as given, without secrets and without --out, whose folder would no longer be new."""
    from assay.harness.sides import hide_flags

    given = iter(sys.argv[1:])
    kept: list[str] = []
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["assay", *hide_flags([*map(portable, kept)])])


def load_command(name: str) -> Any:
    """Import a command; its module registers it with `app`.

    Raises:
        UsageError: packages that the command needs are missing.
    """
    if name in EXTRAS:
        from assay.harness.extras import require

        require(EXTRAS[name], f"assay {name}")
    importlib.import_module(f"assay.harness.cli.{COMMANDS[name][0]}")
    command = typer.main.get_group(app).commands[name]
    add_output_flags(command)
    return command


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        console.print(f"assay {__version__}", highlight=False)
        raise typer.Exit


def entry() -> None:
    """Run the command ``assay``: `main`, with streams that survive a reader that goes away."""
    keep_open()
    main()


def main() -> None:
    """Run the command line. Errors become a sentence and an exit code."""
    code = _run()
    try:
        sys.stdout.flush()
    except AssayError as error:
        report_error(error)
        code = ExitCode.NO_VERDICT
    sys.exit(code)


def _run() -> int | str | None:
    """Run the command and return its exit status."""
    try:
        app()
    except SystemExit as exit_:
        if exit_.code != _CTRL_C:
            return exit_.code
        errors.print(_INTERRUPTED, markup=False)
    except AssayError as error:
        report_error(error)
        return error.exit_code
    except OSError as error:
        report_error(AssayError(f"{error.strerror or error}: {error.filename or ''}"))
    except Exception as error:
        # A bug in assay is not a regression of the candidate: never exit with 1.
        text = "".join(traceback.format_exception(error))
        errors.print(visible(text), markup=False, highlight=False, soft_wrap=True)
        errors.print("assay: this is a bug in assay; there is no verdict.", markup=False)
    return ExitCode.NO_VERDICT
