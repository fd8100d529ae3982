"""The words of greedy texts: how many differ by more than noise, and how erratic the reference itself is."""

from __future__ import annotations

from assay.harness.judge.judgement import Metric
from assay.harness.text import few
from assay.reports.wording.logits import explained_by
from assay.reports.wording.say import Measured, says


@says
def _no_texts_compared() -> str:
    return "Nothing was compared: there are no greedy texts."


@says
def _reference_texts_not_finite(broken: int, texts: int) -> str:
    return f"The reference's own log-probabilities are not finite in {broken} of {texts} texts, so nothing can be compared."


@says
def _log_probabilities_lacking(bare: int, answers: int) -> str:
    return f"{bare} of {answers} answers came without log-probabilities, or without finite ones; use a server that gives them."


@says
def _too_few_texts(prompts: int, least: int) -> str:
    return f"{prompts} distinct prompts were answered; at least {least} are needed for a pass (--greedy-prompts)."


_DECIDED = {
    "pass": ", at most the limit of {margin}",
    "regression": ", above the limit of {margin}",
    "inconclusive": ": neither shown to be at most the limit of {margin} nor above it; to resolve: more greedy texts",
}


@says
def _share_of_texts_apart(
    apart: int, texts: int, low: float, high: float, level: float, margin: float, verdict: str
) -> str:
    ends = f"{100 * low:.1f} % to {100 * high:.1f} % with {100 * level:.0f} % confidence"
    decided = _DECIDED[verdict].format(margin=f"{100 * margin:.1f} %")
    return f"{apart} of {texts} greedy texts differ by more than noise ({100 * apart / texts:.1f} %; {ends}){decided}."


@says
def _envelope_answers_apart(apart: list[str], answers: int) -> str:
    return f"{len(apart)} of {answers} answers over the envelope differ by more than noise: {few(apart, 4)}."


@says
def _reference_erratic(erratic: int, answers: int, largest: float, factor: float) -> str:
    return (
        f"The reference is erratic: asked again, {erratic} of {answers} of its answers changed by up to {largest:.2g} nats, "
        f"beyond what noise and {factor:g} times their median explain."
    )


@says
def _largest_changes(nats: list[float]) -> str:
    return f"changes in nats, the largest first: {', '.join(f'{change:.2g}' for change in nats)}"


@says
def _texts_apart(metric: Metric, apart: int, texts: int) -> Measured:
    return Measured(
        "texts that differ by more than noise",
        f"{metric.value:.1f} %",
        f"{apart} of {texts} texts: at the first difference, log-odds change by more than the limit, a token is not among "
        "the other's best five, or a log-probability is not finite",
    )


@says
def _close_limit(metric: Metric, factor: float | None, declared: list[str]) -> Measured:
    source = f"What is explained by {explained_by(declared)}" if factor is None else f"{factor:g} times the floor"
    return Measured("limit of the log-odds' change", f"{metric.value:.2g} nats", source)


@says
def _reference_floor(metric: Metric, prompts: int, erratic: int) -> Measured:
    return Measured(
        "reference's own floor",
        "not measured" if metric.value is None else f"{metric.value:.2g} nats",
        f"Largest change of log-odds of the reference asked twice, over {prompts} prompts, {erratic} of them erratic and left out",
    )


@says
def _envelope_texts_apart(metric: Metric, answers: int) -> Measured:
    return Measured(
        "answers over the envelope that differ by more than noise",
        f"{metric.value:.0f} of {answers}",
        "Equal tokens are compared by their log-probabilities",
    )
