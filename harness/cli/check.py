"""A kernel without a server: ``assay check``."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.harness.cli.app import ReadOut, app, as_given, console, detail, errors, report_error
from assay.harness.cli.output import Html, Json, Junit, deliver
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.extras import require
from assay.worker import Event


@app.command()
def check(
    kernel: Annotated[str, typer.Argument(help="A kernel: a published name, module:function, or sglang:BACKEND.")],
    size: Annotated[
        str, typer.Option(help="small, for interpreted kernels; or full, with longer sequences and more heads.")
    ] = "small",
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU, if there is one.")] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="extend or decode; by default those that the kernel declares.")
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
            help="Head dimensions that it must compute, such as 64,128; by default those that it declares, or these.",
        ),
    ] = None,
    like: Annotated[
        list[str] | None,
        typer.Option(help="A model whose shape is added, as llama-3-8b or qwen2.5-7b; --size full has common ones."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the matrix and of its data.", min=0)] = 0,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    calls: Annotated[
        int | None,
        typer.Option(
            help="How often the kernel runs in all, to see it become wrong; by default 1,000, in full 2,000.", min=0
        ),
    ] = None,
    read_out: ReadOut = 30.0,
    html: Html = None,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Run a kernel on the op-level matrix, without a server or a model, and name what is wrong with it."""
    if junit:
        require("reports", "assay check --junit")
    from assay.harness.checks.jobs import check as run
    from assay.harness.checks.jobs import ended_early
    from assay.harness.progress import ProgressDisplay
    from assay.reports.check import check_document
    from assay.reports.terminal import say as print_text

    dims = _whole_numbers("--head-dim", head_dim) if head_dim else None
    with ProgressDisplay(errors) as display:

        def show(event: Event) -> None:
            if event["event"] == "stands" and event["reading"] and not console.quiet:
                draft = KernelResult.model_validate(event["result"])
                print_text(errors, f"{draft.summary()}. Reading what it computes, for at most {read_out:g} s.")
            # Outside of a terminal, a check of a second needs no line.
            elif event["event"] == "runs" and (errors.is_terminal or event["done"] < event["total"]):
                display.count("runs of the kernel", event["done"], event["total"])

        result = run(
            kernel, phases=phase, dtypes=_words(dtype), head_dims=dims, noise=noise, size=size,  # type: ignore[arg-type]
            device=device, like=_words(like), seed=seed, case=case, again=as_given(), calls=calls, read_out=read_out, on_event=show,
        )  # fmt: skip
    if result.not_run:
        report_error(ended_early(result.not_run, "what it had found is below"))
    raise typer.Exit(deliver(check_document(result, detail.verbose), json, html, junit))


def _words(given: list[str] | None) -> list[str] | None:
    """Split a flag that may be repeated, or hold several words with commas."""
    return [word.strip() for words in given for word in words.split(",")] if given else None


def _whole_numbers(flag: str, given: list[str]) -> tuple[int, ...]:
    """Parse the numbers of such a flag.

    Raises:
        UsageError: one of its words is none.
    """
    words = _words(given) or []
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise UsageError(
                f"{flag} is {word!r}.",
                "whole numbers greater than or equal to 1",
                f"separate several with commas, as in {flag} 64,128",
            )
    return tuple(map(int, words))
