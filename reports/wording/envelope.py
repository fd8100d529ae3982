"""Sentences about coverage: which conditions and lengths were compared, and what a verdict does not cover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from assay.harness.conditions import BORDER_TOKENS, ENVELOPE
from assay.harness.evidence.envelope import Ranges
from assay.harness.judge.report import EnvelopeResult
from assay.harness.statement import Statement
from assay.harness.text import counted, few, listed, met
from assay.reports.wording.say import Found, Templates, say, says

_FEATURES = {
    "window": "sliding windows", "softcap": "logit caps", "sinks": "attention sinks", "temperature": "an attention temperature",
    "mla": "latent KV caches", "stored_kv": "KV caches of fewer bits",
}  # fmt: skip
# Features of calls that no report lists as lacking: hardly any model asks for them.
_RARE = {"temperature"}
_NEVER = ("cross attention",)
# Other kinds of layers, by a server's name of their operation. No shadow computes them.
_OTHER_LAYERS = {"linear attention": "recurrent layers", "moe": "experts"}
_BEYOND = {
    "new-tokens": "more than {} new tokens at once",
    "new-behind-prefix": "more than {} new tokens at once after a cached prefix",
    "prefix-tokens": "a cached prefix of more than {} tokens",
    "total-tokens": "sequences of more than {} tokens",
    "batch": "batches of more than {}",
    "depth": "answers of more than {} tokens",
}


def envelope_lines(envelope: EnvelopeResult | None) -> list[str]:
    """Say what a verdict covers and what it does not, in a few sentences, or nothing if no call was counted."""
    if envelope is None:
        return []
    features = [_FEATURES[name] for name in _FEATURES if name in envelope.features]
    asked = f"; layers have {listed(features)}" if features else ""
    lines = [f"Compared in every layer: {'; '.join(_compared(envelope))}{asked}. Set by {envelope.policy}."]
    if envelope.served:
        graphs = ", in CUDA graphs" if envelope.served_in_graphs and "decode" in envelope.claimed else ""
        served = "; ".join(_lengths(envelope, envelope.served, envelope.served_reached).values())
        served += "" if "decode" in envelope.claimed else "; the reference computes decode"
        lines.append(f"Served by the candidate's own server: {served}{graphs}.")
    lines += [f"Gaps: {'; '.join(map(say, envelope.gaps))}."] if envelope.gaps else []
    return [*lines, f"Not covered: {'; '.join(_outside(envelope))}."]


def _lengths(
    envelope: EnvelopeResult, compared: Mapping[str, Mapping[str, Ranges]], reached: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    words = {}
    if "extend" in envelope.claimed:
        at = {quantity: met(ranges, BORDER_TOKENS) for quantity, ranges in compared["extend"].items()}
        words["extend"] = (
            f"extend (prefill) at {at['new-tokens']} new tokens, at {at['new-behind-prefix']} after a cached prefix, at "
            f"{at['prefix-tokens']} cached and at {at['total-tokens']} in total"
        )
    if "decode" in envelope.claimed:
        lengths = met(compared["decode"]["total-tokens"], BORDER_TOKENS)
        words["decode"] = f"decode at {lengths} tokens and to a depth of {reached['decode']['depth']:,}"
    return words


def _compared(envelope: EnvelopeResult) -> Iterator[str]:
    """Say which lengths were compared in the shadow."""
    for phase, words in _lengths(envelope, envelope.compared, envelope.reached).items():
        yield f"{words}, in batches of {_in_words(envelope.compared[phase]['batch'])}"
    if "decode" not in envelope.claimed:
        yield "the reference computes decode"


def _outside(envelope: EnvelopeResult) -> Iterator[str]:
    """Say what lies outside the counted conditions."""
    if envelope.not_in_shadow:
        yield (
            f"attention with the candidate's own {listed(envelope.not_in_shadow)}: layers were compared in the reference's server; "
            "answers, texts, logits and probes are the candidate's own"
        )
    limits, extend = envelope.limits, "extend" in envelope.claimed
    for phase, values in envelope.reached.items():
        yield from (f"{phase}: {_BEYOND[quantity].format(f'{value:,}')}" for quantity, value in values.items())
    if "decode" not in envelope.claimed:
        yield "decode by the candidate: it does not claim to compute decode"
    if extend and not envelope.calls("extend", "chunk", "later chunk"):
        starts = (
            f", which starts beyond {limits.chunk_tokens:,} tokens" if limits.chunk_tokens else ": it is switched off"
        )
        yield f"extend: a prompt in chunks{starts}"
    elif extend and not envelope.calls("extend", "chunk", "later chunk of full length"):
        yield "extend: a later chunk of full length"
    if extend and not envelope.calls("extend", "mix", "extend and decode"):
        why = "no such call was made" if limits.mixed else "the servers ran without --enable-mixed-chunk"
        yield f"extend and decode in one call: {why}"
    for phase in envelope.claimed:
        if phase in limits.graphs:
            yield f"{phase} in CUDA graphs: " + (
                "the servers ran it without"
                if limits.graphs[phase] == "disabled"
                else "calls were compared in passes without graphs; answers computed in graphs are compared as text"
            )
    yield f"lengths in between: in each block of {BORDER_TOKENS}, its ends and lengths drawn in each run represent the rest"
    yield f"page sizes other than {limits.page_tokens}"
    for name, phases in envelope.unfelt.items():
        yield f"{_FEATURES[name]} in {listed(phases)}: in some layer they did not change any output that was compared"
    lacking = [words for name, words in _FEATURES.items() if name not in {*_RARE, *envelope.features, *envelope.unfelt}]
    yield f"attention features that this model's calls lack: {', '.join((*lacking, *_NEVER))}"
    if envelope.operations:
        absent = [words for name, words in _OTHER_LAYERS.items() if name not in envelope.operations]
        yield from [f"kinds of layers that this model lacks: {', '.join(absent)}"] if absent else []
    for name, words in _OTHER_LAYERS.items():
        if name in envelope.operations:
            yield f"{words}: they were compared only by answers, texts and logits"
    yield "speculative decoding"


def _in_words(ranges: Ranges, most: int = 6) -> str:
    """Format ranges, such as "1 to 200 and 577 to 584", or "none". Beyond `most`, the last ones are counted."""
    words = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in ranges]
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more ranges to {ranges[-1][1]:,}"]
    return listed(words) or "none"


@says
def _calls_lacking(phase: str, condition: str, lacking: Ranges | int | str) -> str:
    title = f"an end against borders of {BORDER_TOKENS} tokens" if condition == "border" else ENVELOPE[condition].title
    if isinstance(lacking, int):
        return f"{phase}: {title} up to {lacking:,}"
    return f"{phase}: {title} {lacking if isinstance(lacking, str) else _in_words(lacking)}"


_START_OR_READ = "{url:if let assay start the servers, without a URL|see the servers' logs, and run again}"
_REMEDIES = {
    "texts part": "run again, which asks other prompts; if many texts diverge, compare in float32 or set envelope_tokens lower",
    "no prefix cache": "keep the prefix cache on",
    "": "run again, or set envelope_tokens to what the engine can reach; see the servers' logs",
}


@says
def _envelope_lacking(parted: int | None, lacking: Sequence[Statement], cause: str, line: str) -> Found:
    what = "some layer did not compare calls" if parted is None else "answers were not compared"
    before = f", as {counted(parted or 0, 'text')} diverge before" if cause == "texts part" else ""
    return Found(f"{what} with {few(list(map(say, lacking)), 4)}{before}; {line}", _REMEDIES[cause])


@says
def _envelope_covered(layers: Sequence[tuple[str, int]], line: str) -> Found:
    counts = " and ".join(f"{counted(count, 'layer')} in {phase}" for phase, count in layers)
    return Found(f"{counts}; {line}")


SENTENCES: Templates = {
    "envelope-not-requested": Found("the suite layers was not requested; {line}", "add layers to --suites"),
    "envelope-answered": Found("{answers:counted answer}; {line}"),
    "envelope-not-counted": Found("compared calls were not counted; {line}", _START_OR_READ),
    "envelope-not-answered": Found(
        "none of the answers of the candidate's own server at the required lengths was compared; {line}", _START_OR_READ
    ),
    "envelope-not-asked": Found(
        "without the suite {suites:listed} the candidate's server is not asked at the required lengths; {line}",
        "add {suites:listed} to --suites",
    ),
}
