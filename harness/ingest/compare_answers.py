"""Two results with answers -> `Comparison`: pairs what can be paired, explains why the rest cannot be, and decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.harness.files import timestamp
from assay.harness.ingest.assay_run import report_of
from assay.harness.ingest.comparison import (
    AnswerFlip,
    ComparedAnswers,
    ComparedTask,
    Comparison,
    requirement,
)
from assay.harness.ingest.pairing import BEYOND_STOP, ItemPair, ItemPairing, decide_pairs, loss, pair_tasks
from assay.harness.ingest.result import FileRead, FormatReader
from assay.harness.ingest.result_set import ReadResults, ResultSet
from assay.harness.ingest.source_file import SourceFile
from assay.harness.judge.answer_lengths import (
    AnswerEnd,
    AnswerLengths,
    beyond_words,
    check_ends,
    check_lengths,
    compare_lengths,
)
from assay.harness.judge.paired_accuracy import Rule
from assay.harness.judge.report import Report
from assay.harness.text import one_line
from assay.harness.verdict import WORST_FIRST, Check, Requirement, Verdict, cause_of

_COVERS = {
    "answers": (
        "A pass covers the scores that these files state, on the documents that were paired. It does not show which kernel "
        "computed the answers, that both servers differed in nothing else, or that long, cached or batched requests occurred: "
        "assay run does."
    ),
    "runs": (
        "A pass covers the candidates' answers to the questions that both runs asked, of a new run that passes by itself. Each "
        "run's own report lists which kernels ran."
    ),
}
# Level of each interval and test.
_ALPHA = 0.05
# Flips in a result, and characters that are kept of an answer.
_FLIPS_SHOWN, _TEXT_KEPT = 50, 400


@dataclass(frozen=True)
class Loaded:
    """One side of a comparison, read."""

    source: SourceFile
    reader: FormatReader
    reading: ReadResults

    @property
    def tasks(self) -> dict[str, ResultSet]:
        """Its tasks by name."""
        return {result_set.task: result_set for result_set in self.reading.sets}

    @property
    def file(self) -> FileRead:
        """Describe how much was read of it, titled by the tool and the model."""
        first = self.reading.sets[0] if self.reading.sets else None
        about = " ".join(filter(None, (first.tool, first.version, first.model))) if first else self.reader.title
        return self.reading.file(self.source, self.reader.id, about)


def _result(
    left: Loaded, right: Loaded, verdict: Verdict, reasons: Sequence[str], checks: Sequence[Check],
    answers: ComparedAnswers | None = None,
) -> Comparison:  # fmt: skip
    kind: Literal["runs", "answers"] = "runs" if left.reader.id == "assay-run" else "answers"
    return Comparison(
        verdict=verdict, created=timestamp(), kind=kind, headline=_headline(verdict, reasons[:1]), reasons=tuple(reasons),
        covers=_COVERS[kind], a=left.file, b=right.file, checks=tuple(checks), answers=answers,
    )  # fmt: skip


def _headline(verdict: Verdict, reasons: Sequence[str]) -> str:
    """Return the verdict with its first reasons: the cause, if it is known, and what decided."""
    word = {"pass": "B is as good as A", "regression": "B is worse than A"}.get(verdict, "No verdict")
    return f"{word}: {' '.join(reasons)}" if reasons else f"{word}."


def compare_answers(left: Loaded, right: Loaded, margin: float) -> Comparison:
    """Compare two results of one tool: all tasks together, and each task.

    What is missing of the checks rules out a pass, and hides no regression. The first reason is the one that decides: what is
    missing, where that rules out a pass.
    """
    mine, theirs = left.tasks, right.tasks
    pairings = {name: pair_tasks(mine[name], theirs[name]) for name in mine if name in theirs}
    pairs = [pair for pairing in pairings.values() for pair in pairing.pairs]
    rule = Rule(margin, _ALPHA, _ALPHA / (len(pairings) + 1) if len(pairings) > 1 else _ALPHA, loss_suffices=True)
    adaptive = any(task.adaptive for task in (*mine.values(), *theirs.values()))
    tasks = [_task(mine[name], pairing, rule, adaptive) for name, pairing in pairings.items()]
    overall, lengths = tasks[0] if len(tasks) == 1 else decide_pairs(pairs, rule, adaptive), _lengths(pairs)
    flips = [flip for name, pairing in pairings.items() for flip in _flips(name, pairing.pairs)]
    answers = ComparedAnswers(
        margin=margin,
        alpha=_ALPHA,
        overall=overall,
        tasks=tuple(tasks),
        flips=tuple(flips[:_FLIPS_SHOWN]),
        lengths=lengths,
    )
    ends = [(AnswerEnd(a.finish), AnswerEnd(b.finish)) for a, b in pairs if a.repeat == b.repeat == 0]
    checks = [
        *_checks(left, right, tasks, list(pairings.values())),
        check_lengths(lengths, ("A", "B")) if lengths else _NO_LENGTHS,
        check_ends(ends, ("A", "B")),
        _no_copy(left, right),
    ]
    worse = [task for task in tasks if task.verdict == "regression"] if overall.verdict != "regression" else []
    decided: Verdict = "regression" if worse else overall.verdict
    why = [f"{task.task}: {task.why}" for task in worse] or [overall.why]
    if lengths and lengths.beyond:
        why = [*why, beyond_words(lengths, "B")] if decided == "regression" else [beyond_words(lengths, "B"), *why]
        decided = "regression"
    open_ = [check for check in checks if check.status in ("missing", "failed")]
    missing = [
        f"{check.title}: {check.found}" + (f" To resolve: {check.settles}." if check.settles else "") for check in open_
    ]
    if decided == "pass" and open_:
        return _result(left, right, "inconclusive", [*missing, *why], checks, answers)
    return _result(left, right, decided, [*why, *missing], checks, answers)


def _lengths(pairs: Sequence[ItemPair]) -> AnswerLengths | None:
    """Compare the lengths of the answers; repeats of a document count once. None where a side does not record them."""
    known = [(a, b, a.tokens, b.tokens) for a, b in pairs if a.tokens is not None and b.tokens is not None]
    ends = [(AnswerEnd(a.finish, mine), AnswerEnd(b.finish, theirs)) for a, b, mine, theirs in known]
    return compare_lengths(ends, _ALPHA, units=[a.key for a, *_ in known]) if ends else None


def _task(result_set: ResultSet, pairing: ItemPairing, rule: Rule, adaptive: bool) -> ComparedTask:
    known = {name: getattr(result_set, name) for name in ("task", "metric", "shots")} | {
        "again": pairing.again, "refused": pairing.refused, "unpaired": tuple(pairing.unpaired),
    }  # fmt: skip
    why = {"why": f"It cannot be compared: {'; '.join(pairing.refused)}."} if pairing.refused else {}
    return decide_pairs(pairing.pairs, rule, adaptive).model_copy(update={**known, **why})


def _flips(task: str, pairs: Iterable[ItemPair]) -> Iterator[AnswerFlip]:
    for pair in pairs:
        if lost := loss(pair):
            a, b = pair
            texts = {"question": a.question, "target": a.target, "a": a.answer, "b": b.answer}
            kept = {name: text[:_TEXT_KEPT] for name, text in texts.items()}
            yield AnswerFlip(task=task, key=a.key, direction="lost" if lost > 0 else "gained", **kept)


def _checks(
    left: Loaded, right: Loaded, tasks: Sequence[ComparedTask], pairings: Sequence[ItemPairing]
) -> Iterator[Check]:
    refused = "; ".join(f"{task.task}: {'; '.join(task.refused)}" for task in tasks if task.refused)
    sides = (("A", left.tasks, right.tasks), ("B", right.tasks, left.tasks))
    only = [f"{name} is in {side} alone" for side, these, those in sides for name in these if name not in those]
    unread, same = left.reading.unread + right.reading.unread, "run the same tasks with the same settings on both"
    lost, paired = f"{unread:,} records were not" if unread else "", sum(len(pairing.pairs) for pairing in pairings)
    stated, quoted = _other_scores(left.tasks, right.tasks), "see the lines that assay ingest quotes"
    yield requirement("same-tasks", "both have the same tasks", "; ".join(only), "the same tasks", same)
    yield requirement("same-settings", "tasks, prompts and settings are the same", refused, "nothing differs", same)
    yield requirement("scores-agree", "the stated scores are those of the documents", stated, "they are", same)
    yield requirement(
        "all-paired", "every document is in both", _gaps(tasks), f"{paired:,} pairs", "run both to the end"
    )
    yield requirement("all-read", "every record was understood", lost, "every record", quoted)
    if unverified := sum(pairing.unverified for pairing in pairings):
        unknown = (
            f"{unverified:,} pairs have no recorded prompt: the documents are the same, the prompts are taken to be"
        )
        title = "both were asked with the same prompts"
        yield Requirement("same-prompts", title, unchecked=f"whether {title}").check("not checked", unknown)
    if left.reader.id != "assay-run":
        yield _EXECUTION


def _gaps(tasks: Sequence[ComparedTask]) -> str:
    """Describe the documents that were not paired; empty if all were."""
    unpaired = [(item, task.task) for task in tasks for item in task.unpaired if item.id != BEYOND_STOP]
    detail = "; ".join(
        f"{group.count:,} {group.title} ({task}: {', '.join(group.examples)})" for group, task in unpaired
    )
    return f"{sum(group.count for group, _ in unpaired):,} documents were not paired: {detail}" if unpaired else ""


# Difference of a score that rounding to three digits explains.
_ROUNDED = 1e-3


def _other_scores(*sides: dict[str, ResultSet]) -> str:
    """List the scores of tasks that their documents do not have: the files are of different runs, or one is damaged."""
    disagreements = []
    for which, side in zip("AB", sides, strict=True):
        for part in side.values():
            stated, mean = part.figures.get(part.metric), part.accuracy
            if stated and mean is not None and abs(float(stated) - mean) > _ROUNDED:
                disagreements.append(
                    f"{which} states {float(stated):.4f} for {part.task}, and its documents have {mean:.4f}"
                )
    return "; ".join(disagreements)


_COMPUTED = "the kernel under test computed the answers"
_EXECUTION = Requirement("execution", _COMPUTED, unchecked=f"whether {_COMPUTED}").check(
    "not checked", "these files do not record which kernels ran", "assay run --reference … --candidate …"
)
_NO_LENGTHS = Requirement("answer-lengths", sides=("A", "B")).check(
    "not checked", "these files do not record the tokens of each answer", "a tool that does: inspect_ai or assay run"
)


def _no_copy(left: Loaded, right: Loaded) -> Check:
    """Check that B is not A again: a result that is compared with its copy passes whatever the candidate computes."""
    same = "both hold the same bytes" if left.source.is_copy_of(right.source) else ""
    settles = (
        "name the candidate's result; where two results may be equal, the folders of their tools, which have the date"
    )
    return requirement("two-results", "B is another result than A", same, "they differ", settles)


def compare_runs(left: Loaded, right: Loaded, margin: float) -> Comparison:
    """Compare two runs of assay: by the answers to the questions that both asked, and by nothing else.

    Their reports are made again from the evidence. The verdict is no better than that of the new run itself: answers show nothing
    of layers, logits or kernels that did not run.

    Args:
        left: the accepted run.
        right: the new one.
        margin: largest loss that passes.
    """
    a, b = report_of(left.source), report_of(right.source)
    if not (left.reading.sets and right.reading.sets):
        do = "name the folders of both runs"
        missing = requirement("answers", "the answers of both runs are there", "a report.json has none", "", do)
        return _capped(_result(left, right, "inconclusive", [missing.found], [missing]), b)
    of_answers = compare_answers(left, right, margin)
    cause = _new_cause(a, b) if of_answers.verdict == "regression" else []
    headline = _headline(of_answers.verdict, [*cause, *of_answers.reasons[:1]])
    return _capped(of_answers.model_copy(update={"headline": headline}), b)


def _capped(result: Comparison, b: Report) -> Comparison:
    """Cap a comparison at the new run's own verdict."""
    if WORST_FIRST.index(result.verdict) <= WORST_FIRST.index(b.verdict):
        return result
    said = f"B's own verdict is {b.verdict}: {b.headline}"
    own = requirement("own-verdict", "B passes by its own report", said.rstrip("."), "", "see the report of B")
    reasons = (said, *result.reasons)
    checks = (*result.checks, own)
    return result.model_copy(update={"verdict": b.verdict, "headline": said, "reasons": reasons, "checks": checks})


def _new_cause(a: Report, b: Report) -> list[str]:
    """List what the new run's candidate does wrong and the accepted one does not; nothing where no kernel was seen to."""
    before, cause = cause_of(a.findings), cause_of(b.findings)
    if cause is None or not cause.does or (before is not None and before.does == cause.does):
        return []
    return [f"{one_line(b.candidate.backend, 60)} {cause.does}."]
