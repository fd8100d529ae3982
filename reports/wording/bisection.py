"""Sentences about bisections of layers and of sides: why they ended as they did, and what they name."""

from __future__ import annotations

from assay.harness.text import ranges
from assay.reports.wording.say import Templates, says

RIGHT = {"answers": "answers right", "text": "texts identical to the reference's"}
"""The criterion that a prompt must meet."""


MEASURED = {
    "fingerprint": "serves the same", "logits": "log-probabilities", "texts": "greedy texts", "answers": "answers to questions",
}  # fmt: skip
"""What a probe of two sides was judged by."""
_VALUES = {
    "logits": "the mean KL of the log-probabilities is {value:.2g} nats, and {limit:.2g} is allowed",
    "texts": "{value:.0%} of the greedy texts differ by more than noise, and {limit:.0%} may",
    "answers": "{value:.1%} of the answers are lost, and {limit:.1%} may be",
}


@says
def _broken_by_differences(by: str, value: float | None, limit: float | None, differences: int) -> str:
    with_ = "with this difference" if differences == 1 else f"with these {differences} differences"
    if value is None or limit is None:
        return f"{with_}, {MEASURED[by]} show a loss"
    return f"{with_}, {_VALUES[by].format(value=value, limit=limit)}"


@says
def _differences_break_candidate(together: bool, kinds: list[str]) -> str:
    who = (
        "these differences break the candidate only together"
        if together
        else "this difference breaks the candidate alone"
    )
    return f"{who}; without {'any of them' if together else 'it'}, the same probes show no loss"


@says
def _differences_named(sets: int, differences: int) -> str:
    which = "One set" if sets == 1 else f"{sets} sets"
    return f"{which} of the {differences} differences {'breaks' if sets == 1 else 'break'} the candidate; the others break nothing."


@says
def _part_of_differences(differences: list[str], outcome: str, problem: str) -> str:
    words = {"good": "no loss", "bad": "a loss", "skip": f"cannot be served ({problem})"}
    return f"{', '.join(differences)} alone: {words[outcome]}"


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
    "candidate-not-broken": "With all {differences} differences, the probes show no loss.",
    "candidate-undecided": "The side with all differences is shown neither broken nor right: the table of probes says why.",
    "outcomes-contradict": "Repeated probes of the same sets contradict each other, so no set can be named.",
    "probes-exhausted": "The search ended after {probes} probes, its limit: {unsteady} of the {sets} sets that it probed came out "
    "both ways. Steadier probes need more questions (--questions) or fewer differences between the sides.",
    "reference-differs-from-itself": "A second server of the reference itself does not come out good, so nothing can be concluded.",
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
