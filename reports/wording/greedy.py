"""Sentences about greedy texts: how many differ by more than rounding, and how erratic the reference itself is."""

from __future__ import annotations

from assay.harness.judge.judgement import Metric
from assay.harness.text import three_digits
from assay.reports.wording.logits import explained_by
from assay.reports.wording.say import Measured, Templates, says

_DECIDED = {
    "pass": ", at most the limit of {margin}",
    "regression": ", above the limit of {margin}",
    "inconclusive": ": neither shown to be at most the limit of {margin} nor above it; to resolve: more greedy texts",
}


@says
def _share_of_texts_apart(
    apart: int, texts: int, low: float, high: float, level: float, margin: float, verdict: str
) -> str:
    ends = f"{three_digits(100 * low)} % to {three_digits(100 * high)} % with {100 * level:.0f} % confidence"
    decided = _DECIDED[verdict].format(margin=f"{three_digits(100 * margin)} %")
    return f"{apart} of {texts} greedy texts differ by more than rounding ({three_digits(100 * apart / texts)} %; {ends}){decided}."


@says
def _largest_changes(nats: list[float]) -> str:
    return f"changes in nats, the largest first: {', '.join(f'{change:.2g}' for change in nats)}"


@says
def _close_limit(metric: Metric, factor: float | None, declared: list[str]) -> Measured:
    source = f"The change explained by {explained_by(declared)}" if factor is None else f"{factor:g} times the floor"
    return Measured("limit of the log-odds' change", f"{metric.value:.2g} nats", source)


SENTENCES: Templates = {
    "no-texts-compared": "Nothing was compared, since neither server wrote greedy texts.",
    "reference-texts-not-finite": "The reference's own log-probabilities are not finite in {broken} of {texts} "
    "texts, so nothing can be compared.",
    "log-probabilities-lacking": "{bare} of {answers:counted answer} came without log-probabilities, or with some that are not "
    "finite; use a server that returns them.",
    "too-few-texts": "{prompts} distinct prompts were answered; at least {least} are needed for a pass "
    "(greedy_prompts in assay.toml).",
    "reference-erratic": "The reference is erratic: asked again, {erratic} of {answers} of its answers changed "
    "by up to {largest:.2g} nats, beyond what rounding and {factor:g} times their median explain.",
    "texts-apart": Measured(
        "texts that differ by more than rounding",
        "{metric.value:digits} %",
        "{apart} of {texts:counted text}: at the first difference, log-odds change by more than the limit, a token is not "
        "among the other's best alternatives, or a log-probability is not finite",
    ),
    "envelope-texts-apart": Measured(
        "answers at the required lengths that differ by more than rounding",
        "{metric.value:.0f} of {answers}",
        "Equal tokens are compared by their log-probabilities",
    ),
    "envelope-answers-apart": "{apart:count} of {answers} answers at the required lengths differ by more than "
    "rounding: {apart:few 4}.",
    "reference-floor": Measured(
        "reference's own floor",
        "{metric.value:measured .2g nats}",
        "Largest change of log-odds of the reference asked twice, over {prompts:counted prompt}, {erratic} of them erratic "
        "and left out",
    ),
}
