"""Sentences about a comparison of two results, two files of tensors or two traces, and about files that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.harness.ingest.comparison import ComparedKind, ComparedTask, Comparison, TraceDifference
from assay.harness.ingest.result import UNKNOWN, IngestResult
from assay.harness.ingest.sglang_findings import badness
from assay.harness.statement import Statement
from assay.harness.text import counted, few, listed, one_line, points, three_digits
from assay.reports.wording.say import Found, Templates, say, says
from assay.reports.wording.verdict import unmet_sentence

_WORDS = {"pass": "B is as good as A", "regression": "B is worse than A"}
COVERS: dict[ComparedKind, str] = {
    "answers": (
        "A pass covers the scores that these files state, on the documents that were paired. It does not show which kernel "
        "computed the answers, that the servers differed in nothing else, or that long, cached or batched requests occurred: "
        "assay run does."
    ),
    "runs": (
        "A pass covers the candidates' answers to the questions that both runs asked, of a new run that passes by itself. Each "
        "run's own report lists which kernels ran."
    ),
}
"""What a verdict covers and what it does not, by kind of comparison; for tensors and traces, the headline says it."""


def comparison_words(result: Comparison) -> tuple[str, list[str]]:
    """Say the verdict on a comparison in one sentence, and the reasons, most important first."""
    why, unmet, own = list(map(say, result.why)), [], []
    for check in result.checks:
        if check.requirement == "own-verdict":
            own = [say(check.outcome)]
        elif check.status in ("failed", "missing"):
            unmet.append(unmet_sentence(check))
    overall = result.answers.overall if result.answers else None
    # If the scores alone would pass, an unmet requirement decides.
    would_pass = overall is not None and overall.verdict == "pass" and result.why == overall.why
    reasons = [*own, *unmet, *why] if would_pass else [*own, *why, *unmet]
    if own or result.kind in ("tensors", "trace"):
        return reasons[0], reasons
    if result.verdict == "pass" and overall is not None and (worse := _within_margin(overall)):
        return worse, reasons
    cause = [say(result.cause)] if result.cause else []
    # The change that makes it another question leads, and the difference follows.
    leading = reasons[: 2 if result.why and result.why[0].id == "not-same-question" else 1]
    return f"{_WORDS.get(result.verdict, 'No verdict')}: {' '.join([*cause, *leading])}", reasons


def _within_margin(overall: ComparedTask) -> str:
    """Say a loss that is shown and lies within the margin, or return an empty string without one."""
    if overall.test == "bootstrap" and overall.low > 0:
        return f"B is worse: {say(*overall.why)}"
    kept = next((why.values for why in overall.why if why.id == "accuracy-kept"), None)
    if kept is None or kept["low"] <= 0:
        return ""
    loss, (low, high) = points(100 * kept["loss"]), (three_digits(100 * kept[name]) for name in ("low", "high"))
    return (
        f"B is worse by {loss} ({low} to {high}), within the margin of {100 * kept['margin']:g}: {kept['lost']:,} lost and "
        f"{kept['gained']:,} gained of {kept['questions']:,}."
    )


def ingest_headline(result: IngestResult) -> str:
    """Say in a few sentences what was found in files."""
    findings = [finding for document in result.documents for finding in document.findings]
    unknown = [document.file.path for document in result.documents if document.file.format == UNKNOWN]
    if len(unknown) == len(result.documents):
        return f"{listed(unknown)}: not recognised, so nothing was read."
    also = f" Not recognised: {listed(unknown)}." if unknown else ""
    if result.verdict == "regression":
        return " ".join(finding.diagnosis for finding in findings if finding.severity == "serious") + also
    warned = [finding for finding in findings if finding.severity == "warning"]
    if not warned:
        return f"Nothing here shows a regression, and a file cannot show a pass.{also}"
    worst = min(warned, key=badness)
    more = f"; {counted(len(warned) - 1, 'more warning')}" if len(warned) > 1 else ""
    return f"{worst.title} ({worst.where}): {worst.diagnosis.rstrip('.')}. A file cannot show if it is a regression{more}.{also}"


SENTENCES: Templates = {
    "prompts-not-recorded": Found(
        "{pairs:counted pair} without a recorded prompt: the documents are the same, and so presumably are the prompts"
    ),
    "kernels-not-recorded": Found(
        "these files do not record which kernels ran", "assay run --reference … --candidate …"
    ),
    "tokens-not-recorded": Found(
        "these files do not record the tokens of each answer", "a tool that does: inspect_ai or assay run"
    ),
    "bytes-compared": Found(
        "{same:if both hold the same bytes|they differ}",
        "name the candidate's result; if two results may be equal, name the folders of their tools, which have the date",
    ),
    "report-without-answers": Found("a report.json has none", "name the folders of both runs"),
    "own-verdict": Found("B's own verdict is {verdict}{of:if : |}{of:commas}", "see the report of B"),
    "of-task": "{task}: {why:said}",
    "new-cause": "{candidate} {does}.",
    "no-tensor-compared": "Nothing could be compared{why:if : |}{why:said}.",
    "file-not-read": "not read, and {side:if only in {side}|not the same}: {file}",
    "tensor-in-one": "only in {side}: {tensor}",
    "shapes-differ": "shapes differ, {a} and {b}: {tensor}",
    "dtypes-differ": "dtypes differ, {a} and {b}, so bits cannot be equal: {tensor}",
    "tensors-not-read": "not read: {said}",
    "trace-without-steps": "The traces cannot be compared: {path} has no request that contains a step.",
    "traces-equal": (
        "Both traces take the same steps: {requests:counted request}, {segments:counted segment}, {steps:counted step}."
    ),
    "one-more-segment": "has one more segment, {kind} with {steps:counted step}",
}
_SAME = "run the same tasks with the same settings on both"
_UNPAIRED = {
    "other-prompt": "asked with another prompt",
    "other-target": "with another expected answer",
    "only-in-a": "only in A",
    "only-in-b": "only in B",
    "repeated": "more often in one than in the other",
    "not-scored": "without a score in A or in B",
    "skipped-in-a": "requested, but without an answer in A",
    "skipped-in-b": "requested, but without an answer in B",
    "no-samples": "in scores without samples",
    "beyond-stop": "asked after the other run had stopped",
}
# Scores whose answers are not paired.
_BEYOND = {"no-direction": "does not record which way is better", "off-scale": "is not from 0 to 1 or to 100"}


@says
def _tasks_in_one(only: list[tuple[str, str]]) -> Found:
    return Found("; ".join(f"{task} is only in {side}" for task, side in only) or "the same tasks", _SAME)


_IDENTIFYING = {
    "limit": "the limit of documents",
    "tokenizer": "the tokenizer",
    "template": "the chat template or prompt template",
    "version": "the version of the task",
}


@says
def _tasks_differ(what: str, a: Any, b: Any) -> str:
    if what == "shots":
        return f"{counted(int(a), 'shot')} in A and {counted(int(b), 'shot')} in B"
    return _setting_differs(_IDENTIFYING.get(what, f"the limit {what}"), a, b).removeprefix("the setting ")


@says
def _setting_differs(setting: str, a: str | None, b: str | None) -> str:
    return f"the setting {setting} is {'not set' if a is None else a} in A and {'not set' if b is None else b} in B"


_MOST_NAMED = 4


def _differences(differs: list[Statement]) -> str:
    named = [say(each) for each in differs[:_MOST_NAMED]]
    more = len(differs) - len(named)
    return "; ".join(named) + (f"; {more:,} more" if more else "")


@says
def _not_same_question(differs: list[Statement]) -> str:
    return f"Not the same question: {_differences(differs)}."


@says
def _questions_differ(differs: list[tuple[str, list[Statement]]]) -> Found:
    named = [f"{task}: {_differences(why)}" for task, why in differs]
    return Found(few(named, _MOST_NAMED) or "nothing differs", _SAME)


@says
def _settings_not_recorded(sides: list[str]) -> Found:
    said = f"{sides[0]} does not record all of them" if len(sides) == 1 else "neither records them"
    return Found(said, "lm-eval's results file next to the samples, or a whole log")


@says
def _doubts(doubts: list[tuple[str, str, str]]) -> Found:
    told = (f"{side} ({where}): {diagnosis.rstrip('.')}" for side, where, diagnosis in doubts)
    return Found(
        "; ".join(told) or "nothing",
        "run all of it on one server, to the end, without a cache, and leave its scores unchanged",
    )


_PERPLEXITIES = {
    "worse": "above the margin of {} %", "within": "within the margin of {} % either way",
    "changed": "lower by more than the margin of {} %, which an honest repetition never is",
    "undecided": "not shown to be within the margin of {} % either way",
}  # fmt: skip


@says
def _perplexity(
    outcome: str, a: float, b: float, ratio: float, low: float, high: float, level: float, margin: float, documents: int
) -> str:
    return (
        f"The perplexity is {a:.4g} in A and {b:.4g} in B, a ratio of {ratio:.4f} ({low:.4f} to {high:.4f} with {100 * level:g} % "
        f"confidence) over {counted(documents, 'document')}: {_PERPLEXITIES[outcome].format(f'{100 * margin:g}')}."
    )


@says
def _scores_unpaired(
    a: float, b: float, low: float | None, high: float | None, level: float, margin: float, either_way: bool = False
) -> str:
    interval = (
        "no interval, since no standard error is stated"
        if low is None or high is None
        else f"{100 * level:.0f} % {low:+.2f} to {high:+.2f}"
    )
    return (
        f"B {b:.4f} - A {a:.4f} = {b - a:+.4f}, {interval}, unpaired, with a margin of {margin:g}. A pass needs samples of both "
        "(--log_samples of lm-eval): paired, they show smaller differences, and which answers differ."
        f"{' These results do not record which way is better.' if either_way else ''}"
    )


@says
def _stated_scores(apart: list[tuple[str, float, str, float]]) -> Found:
    said = (
        f"{side} states {stated:.4f} for {task}, and its documents have {mean:.4f}"
        for side, stated, task, mean in apart
    )
    return Found("; ".join(said) or "they are", _SAME)


@says
def _served_differently(changed: list[tuple[str, str | None, str | None]]) -> str:
    named = [f"{name} {one_line(a or 'not set', 60)} → {one_line(b or 'not set', 60)}" for name, a, b in changed]
    return f"what these files say of the servers differs, and is what was compared: {few(named, 6)}"


def _were(count: int, what: str) -> str:
    return f"{counted(count, what)} {'was' if count == 1 else 'were'} not"


@says
def _documents_paired(pairs: int, gaps: list[tuple[int, str, str, list[str]]]) -> Found:
    if not gaps:
        return Found(counted(pairs, "pair"))
    if beyond := [(task, why) for _, why, task, _ in gaps if why in ("off-scale", "no-direction")]:
        said = f"{listed([task for task, _ in beyond])} has a score that {_BEYOND[beyond[0][1]]}, compared unpaired"
        return Found(said, "name another score with --metric")
    alone = [task for _, why, task, _ in gaps if why == "no-samples"]
    if len(alone) == len(gaps):
        return Found(f"{listed(alone)} has scores without samples, compared unpaired", "lm-eval with --log_samples")
    detail = "; ".join(
        f"{count:,} {_UNPAIRED[why]} ({task}{': ' if examples else ''}{', '.join(examples)})"
        for count, why, task, examples in gaps
    )
    lacking = _were(sum(count for count, *_ in gaps), "document")
    return Found(f"{lacking} paired: {detail}", "run both to the end")


@says
def _records_unread(unread: int) -> Found:
    return Found(_were(unread, "record") if unread else "every record", "see the lines that assay ingest quotes")


_DIMENSIONS = {"b": "sequence", "h": "head", "t": "token"}


def cell_text(index: Sequence[int], axes: str) -> str:
    """Describe a cell, such as ", head 3, token 17" or ", at [0, 3, 17]" if its dimensions have no names."""
    if not axes:
        return f", at {[*index]}" if index else ""
    at = dict(zip(axes, index, strict=True))
    return "".join(f", {what} {at[axis]}" for axis, what in _DIMENSIONS.items() if axis in at)


def layer_text(layer: int | None) -> str:
    """Name a layer of a model."""
    return "outside the layers" if layer is None else f"layer {layer}"


@says
def _nan_in_both(tensor: str, tensors: int, cells: int, of: int) -> str:
    more = f" and {counted(tensors - 1, 'more tensor')}" if tensors > 1 else ""
    return f"NaN on both sides, which shows nothing, in {cells:,} of {counted(of, 'cell')} of {tensor}{more}"


@says
def _tensors_differ(
    differing: int, compared: int, layer: int | None, boundary: str, name: str, step: int, index: list[int], axes: str
) -> str:
    place = f"{layer_text(layer)}, {boundary} ({name}){f', pass {step}' if step else ''}{cell_text(index, axes)}"
    unnamed = " (--layout names the dimensions)" if len(index) > 1 and not axes else ""
    differ = "differs" if differing == 1 else "differ"
    return f"{differing} of {counted(compared, 'tensor')} {differ}; the first is {place}{unnamed}."


@says
def _passes_in_order(a: int, b: int) -> str:
    return f"Compared row by row in order: {_counted_passes(a)} of A with {_counted_passes(b)} of B."


def _counted_passes(count: int) -> str:
    return f"{count:,} pass{'' if count == 1 else 'es'}"


@says
def _rows_differ(tensor: str, a: list[list[int]], b: list[list[int]]) -> str:
    return f"the passes combine different rows, {few(list(map(str, a)), 3)} and {few(list(map(str, b)), 3)}: {tensor}"


@says
def _tensors_equal(compared: int, exact: bool, names: tuple[str, str], not_compared: int) -> str:
    same = "equal bit for bit" if exact else "equal within bounds"
    alone = f" ({names[0]} in A, {names[1]} in B)" if names[0] != names[1] else ""
    but = f", but {not_compared} could not be compared" if not_compared else ""
    return f"{counted(compared, 'tensor')} {'is' if compared == 1 else 'are'} {same}{alone}{but}."


@says
def _traces_not_understood(unread: list[tuple[str, int]]) -> str:
    files = "; ".join(f"{path}: {count:,}" for path, count in unread)
    return f"Everything that was read in both is equal, but some lines were not understood ({files})."


_DOES = {
    "mark": "logs {name}", "action": "polls {name}", "call": "calls {name}", "is": "is there", "has-answer": "has an answer",
    "answers": "answers {name!r}",
}  # fmt: skip
_MARKS = {"Add Request": "is added", "segment begins": "begins a segment", "segment ends": "ends a segment"}


@says
def _trace_does(does: str, name: str) -> str:
    return (does == "mark" and _MARKS.get(name)) or _DOES[does].format(name=name)


def _places(a: Statement | None, b: Statement | None, lines: tuple[int, int]) -> list[str]:
    """Say where two traces differ, in each; return nothing where that is unknown."""
    sides = zip((a, b), lines, strict=True)
    return [f"{'after ' if does is None else ''}line {line:,}" if line else "" for does, line in sides]


@says
def _traces_differ(subject: str, a: Statement | None, b: Statement | None, lines: tuple[int, int]) -> str:
    first, second = (f" ({place})" if place else "" for place in _places(a, b, lines))
    if a is None or b is None:
        (there, at), (other, after) = (("first", first), ("second", second))[:: 1 if a else -1]
        said = f"{subject} {say(*filter(None, (a, b)))} in the {there} trace{at} but not in the {other}{after}."
    else:
        said = f"{subject} {say(a)}{first} where the other {say(b)}{second}."
    return said[0].upper() + said[1:]


def first_places(kind: TraceDifference) -> str:
    """Say where the first of some differences is, in both files."""
    return " and ".join(filter(None, _places(kind.a, kind.b, kind.lines)))
