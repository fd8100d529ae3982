"""Kernels without a server: ``assay check``, ``assay replay``, ``assay explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.harness.cli.app import app, as_given
from assay.harness.cli.output import (
    deliver,
    detail,
    errors,
    file_row,
    new_file,
    progress,
    report_error,
    say,
)
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.files import write_whole
from assay.harness.text import did_you_mean
from assay.worker import Event

_ReadOut = Annotated[
    float,
    typer.Option(help="Most seconds to spend on finding out what a wrong kernel computes; 0 to skip it.", min=0),
]
_Test = Annotated[
    Path | None,
    typer.Option("--test", help="Write a test here that fails with the smallest wrong call.", callback=new_file),
]


@app.command()
def check(
    kernel: Annotated[str, typer.Argument(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    size: Annotated[
        str, typer.Option(help="small, for interpreted kernels; full, with longer sequences and more heads.")
    ] = "small",
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU, if there is one.")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="extend (prefill) or decode; by default those that the kernel declares.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float16, bfloat16 or float32, or several as a,b; by default all."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(help="Quantisation whose noise is allowed; by default the one that the kernel declares."),
    ] = None,
    head_dim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INTEGER",
            help="Head dimensions that the kernel must support, such as 64,128; by default those that it declares, or these.",
        ),
    ] = None,
    like: Annotated[
        list[str] | None,
        typer.Option(
            help="Also check the shape of this model, such as llama-3-8b or qwen2.5-7b; --size full has common ones."
        ),
    ] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    calls: Annotated[
        int | None,
        typer.Option(
            help="Total kernel runs; repeats catch kernels that fail only later. Default: 1,000; with --size full, 2,000.",
            min=0,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check one dtype and one head_dim only, in seconds; the verdict says so.")
    ] = False,
    read_out: _ReadOut = 30.0,
    test: _Test = None,
) -> None:
    """Run a kernel on the op-level matrix, without a server or a model, and name what is wrong with it."""
    from assay.harness.checks.jobs import check as run
    from assay.reports.check import check_document

    dims = _whole_numbers("--head-dim", head_dim) if head_dim else None
    stands = False
    with progress() as display:

        def show(event: Event) -> None:
            nonlocal stands
            if event["event"] == "stands":  # no further run belongs to the matrix
                stands = True
                if event["reading"]:
                    said = KernelResult.model_validate(event["result"]).summary()
                    display.say(f"{said}. Reading what it computes, for at most {read_out:g} s.")
                elif errors.is_terminal:
                    display.say("finding out where it is wrong")
            # Off a terminal, a check that takes a second needs no progress line.
            elif event["event"] == "runs" and not stands and (errors.is_terminal or event["done"] < event["total"]):
                display.count("runs of the kernel", event["done"], event["total"])

        result = run(
            kernel, phases=phase, dtypes=_words(dtype), head_dims=dims, noise=noise, size=size,  # type: ignore[arg-type]
            device=device, like=_words(like), case=case, again=as_given(), calls=calls, read_out=read_out, on_event=show,
            quick=quick,
        )  # fmt: skip
    document = check_document(result, detail.verbose)
    raise typer.Exit(_deliver(result, deliver(document), test))


def _deliver(result: KernelResult, code: int, test: Path | None) -> int:
    """Write the test for a result already shown, report a kernel that ended its process, and return the exit code."""
    if test and result.test:
        write_whole(test, result.test)
        file_row("Test", test)
    elif test:
        why = (
            "the wrong call fails only with others, or with numbers too many for a test"
            if result.smallest
            else "no wrong call is known"
        )
        file_row("Test", f"none: {why}")
    if result.not_run:
        from assay.harness.checks.jobs import ended_early

        report_error(ended_early(result.not_run, "its findings up to then are above"))
    return code


def _words(given: list[str] | None) -> list[str] | None:
    """Split a flag that may be repeated, or that lists several values with commas."""
    return [word.strip() for words in given for word in words.split(",")] if given else None


def _whole_numbers(flag: str, given: list[str]) -> tuple[int, ...]:
    """Parse the numbers of such a flag."""
    words = _words(given) or []
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(
                f"{flag} is {word!r}.",
                "whole numbers greater than or equal to 1",
                f"separate several with commas, as in {flag} 64,128",
            )
    return tuple(map(int, words))


@app.command()
def replay(
    pack: Annotated[Path, typer.Argument(help="Folder of a replay pack, recorded by `assay run`.")],
    candidate: Annotated[str, typer.Option(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    read_out: _ReadOut = 30.0,
    test: _Test = None,
) -> None:
    """Run a kernel on recorded calls, without a server or a model, and name what is wrong with it."""
    from assay.harness.checks.jobs import replay as run
    from assay.reports.check import check_document

    with progress() as display:

        def show(event: Event) -> None:
            if event["event"] == "runs":
                display.count(f"{candidate}: runs on recorded calls", event["done"], event["total"])

        result = run(pack, candidate, read_out=read_out, on_event=show)
    raise typer.Exit(_deliver(result, deliver(check_document(result)), test))


@app.command()
def explain(
    id: Annotated[str | None, typer.Argument(help="The id of a finding; without it, all are listed.")] = None,
) -> None:
    """Explain a finding: what goes wrong, wrong and right code, public reports, and what to do."""
    from assay.reports.explain import explanation, titles

    kinds = titles()
    known = {known_id: title for kind in kinds.values() for known_id, title in kind.items()}
    if id is None:
        width = max(map(len, known))
        for heading, ids in kinds.items():
            say(f"{heading}:")
            for known_id, title in ids.items():
                say(f"  {known_id:<{width}}  {title}")
        return
    if id not in known:
        hint = did_you_mean(id, [*known]) or "assay explain lists them"
        raise UsageError(f"{id!r} is not a known bug or finding.", "the id of one", hint)
    say(explanation(id))
