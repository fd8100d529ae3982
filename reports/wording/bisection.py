"""Sentences about a layer bisection: why it ended as it did, and the layers that must run the reference."""

from __future__ import annotations

from assay.harness.text import ranges
from assay.reports.wording.say import Templates, says

RIGHT = {"answers": "answers right", "text": "texts identical to the reference's"}
"""The criterion that a prompt must meet."""


@says
def _right_with_layers_restored(layers: list[int]) -> str:
    if len(layers) == 1:
        return f"The task is right with the reference in layer {layers[0]} and the candidate in all others."
    return (
        f"The task is right with the reference in the {len(layers)} layers {ranges(layers)} and the candidate in all others; with "
        f"the candidate in any one of {ranges(layers)} as well, it is wrong."
    )


@says
def _layers_need_reference(reference: str, candidate: str, by: str) -> str:
    what = "answers" if by == "answers" else "texts"
    again = f"must run {reference} for the {what} to be right again"
    return f"{again}; with {candidate} in all other layers, these prompts show no loss."


@says
def _right_with_candidate(
    candidate: str, layers: int, but: list[int], by: str, alone: int, right: int, lost: int, gained: int, p: float
) -> str:
    where = f"all layers{f' but {ranges(but)}' if but else ''}" if layers or but else "no layer"
    change = f"{lost} lost, {gained} gained, p = {p:.2g}"
    return f"{candidate} in {where}: {right} {RIGHT[by]}, the reference alone {alone} ({change})"


SENTENCES: Templates = {
    "no-outcome-leads": "With the candidate in layers {layers:ranges} the task was right {right} times and wrong "
    "{wrong} times: neither leads clearly.",
    "prompts-too-noisy": "The task fails even with no layer substituted, so these prompts are too noisy to "
    "decide anything.",
    "reference-too-weak": "The reference alone gets {right} of {prompts} right by {by}: a broken candidate could "
    "not look worse.",
    "right-in-all-layers": "The task is right even with the candidate in all {layers} layers.",
    "right-without-cached-prefix": "The task is right with the candidate in all {layers} layers, but only "
    "{cached} of {prompts} prompts had a cached prefix of {tokens} tokens or more: run with the prefix cache on.",
    "each-layer-needed": "each of these layers is needed: with any one of them running the candidate, the task "
    "is wrong again",
    "errors-may-cancel": "more layers of the candidate were better than fewer at least once, so errors cancel or "
    "the measurement is noisy: another choice of layers may also work",
    "layer-alone": "layer {layer}: {wrong:if wrong alone|right alone, wrong only together with others}",
}
