"""Compares two results with answers: pairs the answers it can, explains why it cannot pair the rest, and decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from assay.harness.files import timestamp
from assay.harness.ingest.assay_run import basis_of, report_of
from assay.harness.ingest.comparison import SIDES, UNDECIDED, AnswerFlip, ComparedAnswers, ComparedTask, Comparison
from assay.harness.ingest.pairing import BEYOND_STOP, ItemPair, Pairing, decide_pairs, pair_tasks
from assay.harness.ingest.result import FormatReader
from assay.harness.ingest.result_set import ReadResults
from assay.harness.judge.answer_lengths import (
    AnswerEnd,
    AnswerLengths,
    check_ends,
    check_lengths,
    compare_lengths,
    state_beyond,
)
from assay.harness.judge.paired_accuracy import Rule
from assay.harness.judge.report import Report
from assay.harness.statement import Statement, state
from assay.harness.text import one_line
from assay.harness.verdict import WORST_FIRST, Check, CheckStatus, Requirement, Verdict, cause_of, serious

# Level of each interval and test.
_ALPHA = 0.05
# Difference between two scores that rounding to three digits explains.
_ROUNDED = 1e-3
# Flips kept in a result, and characters kept of an answer. A question may begin with a header, so it keeps five times as many.
_FLIPS_SHOWN, _TEXT_KEPT = 50, 400


def compare_answers(
    reader: FormatReader, left: ReadResults, right: ReadResults, margin: float, *, a_failed: bool = False
) -> Comparison:
    """Compare two results of one tool: every score of every task, and the first scores of all tasks together.

    All tests share the level of a regression, and a regression in any score is a regression of B. A check that is not met rules out
    a pass but does not hide a regression. B's answer lengths and finish reasons are judged against A's, unless A failed or B is
    shown to score better.

    Args:
        reader: the reader of both results.
        left: the accepted result.
        right: the new result.
        margin: largest loss that passes.
        a_failed: whether A's own verdict is a failure.
    """
    mine, theirs = left.scores, right.scores
    paired = [pair_tasks(mine[name], theirs[name]) for name in mine if name in theirs]
    # A task's first score stands for the task: its other scores are computed from the same answers.
    firsts = [each for each in paired if each is next(other for other in paired if other.a.task == each.a.task)]
    # Only scores from 0 to 1 can be pooled, so perplexities cannot.
    pooled = [each for each in firsts if not each.of_perplexity]
    pairs = [pair for each in pooled for pair in each.pairs]
    rule = Rule(margin, _ALPHA, _ALPHA / max(1, len(paired) + (len(firsts) > 1)), loss_suffices=True)
    adaptive = any(score.adaptive for score in (*mine.values(), *theirs.values()))
    tasks = [each.decide(rule, adaptive) for each in paired]
    leading = [task for each, task in zip(paired, tasks, strict=True) if each in firsts]
    if leading and (len(leading) == 1 or not pooled):
        overall = min(leading, key=lambda task: (WORST_FIRST.index(task.verdict), -task.loss))
    else:
        overall = decide_pairs(pairs, rule, adaptive)
    lengths = _lengths(pairs)
    answers = ComparedAnswers(
        margin=margin, alpha=_ALPHA, overall=overall, tasks=tuple(tasks), lengths=lengths,
        flips=tuple(islice(_flips(firsts), _FLIPS_SHOWN)),
    )  # fmt: skip
    no_measure = "failed" if a_failed else "gain" if overall.high < 0 else ""
    checked = [task for task in tasks if task in leading or any(gap.id in UNDECIDED for gap in task.unpaired)]
    # A result compared with a copy of itself would always pass.
    same = left.source.is_copy_of(right.source)
    checks = [
        *_checks(reader, left, right, checked, firsts),
        *_ends_checks(lengths, pairs, no_measure),
        Requirement("two-results", sides=SIDES).met(not same, state("bytes-compared", same=same)),
    ]
    worse = [task for task in tasks if task.verdict == "regression"] if overall.verdict != "regression" else []
    decided: Verdict = "regression" if worse else overall.verdict
    told = sorted(worse or ([] if pairs or len(leading) == 1 else leading), key=lambda task: -task.loss)
    why = [state("of-task", task=task.name, why=task.why) for task in told] or [*overall.why]
    if (differs := [task for task in leading if task.differs]) and why[0].id != "not-same-question" and not told:
        why = [state("not-same-question", differs=differs[0].differs), *why]
    if lengths and lengths.beyond and not no_measure:
        beyond = state_beyond(lengths, "B")
        why = [*why, beyond] if decided == "regression" else [beyond, *why]
        decided = "regression"
    unshown = [task for task in leading if task.test == "bootstrap" and task.verdict != "pass"]
    open_ = [task for task in tasks if task.changed or task in unshown]
    if decided == "pass" and open_:
        decided, why = "inconclusive", [*(state("of-task", task=task.name, why=task.why) for task in open_), *why]
    if decided == "pass" and any(check.status in ("missing", "failed") for check in checks):
        decided = "inconclusive"
    changed = firsts[0].differences.changed if firsts else ()
    notes = [state("served-differently", changed=changed)] if changed else []
    return Comparison(
        verdict=decided, created=timestamp(), kind="answers", why=tuple(why), a=left.compared(reader), b=right.compared(reader),
        checks=tuple(checks), answers=answers, notes=tuple(notes),
    )  # fmt: skip


def _ends_checks(lengths: AnswerLengths | None, pairs: Sequence[ItemPair], no_measure: str) -> Iterator[Check]:
    """Check the answers' lengths and finish reasons, unless A's cannot serve as a measure."""
    if no_measure:
        outcome = state("lengths-no-measure", why=no_measure)
        yield from (
            Requirement(id_, sides=SIDES).check("not checked", outcome) for id_ in ("answer-lengths", "finish-reasons")
        )
        return
    unknown = Requirement("answer-lengths", sides=SIDES).check("not checked", state("tokens-not-recorded"))
    yield check_lengths(lengths, SIDES) if lengths else unknown
    ends = [(AnswerEnd(a.finish), AnswerEnd(b.finish)) for a, b in pairs]
    yield check_ends(ends, SIDES, units=[a.key for a, _ in pairs])


def _lengths(pairs: Sequence[ItemPair]) -> AnswerLengths | None:
    """Compare answer lengths, or return None if a side wrote no answers. Repeats of a document count once.

    Lengths are in tokens, or in characters if a side does not record tokens.
    """
    counted = any(a.tokens is not None and b.tokens is not None for a, b in pairs)
    of = [(a, b, a.tokens if counted else a.characters, b.tokens if counted else b.characters) for a, b in pairs]
    known = [(a, b, mine, theirs) for a, b, mine, theirs in of if mine is not None and theirs is not None]
    ends = [
        (AnswerEnd(a.finish, mine, text=a.answer), AnswerEnd(b.finish, theirs, text=b.answer))
        for a, b, mine, theirs in known
    ]
    return compare_lengths(ends, _ALPHA, units=[a.key for a, *_ in known], counted=counted) if ends else None


def _flips(pairings: Sequence[Pairing]) -> Iterator[AnswerFlip]:
    """Yield the documents that the sides did not answer equally well."""
    for task, (a, b) in ((each, pair) for each in pairings for pair in each.pairs):
        if lost := (a.score or 0.0) - (b.score or 0.0):
            direction = "lost" if lost > 0 else "gained"
            texts = {"question": a.question, "target": a.target, "a": a.answer, "b": b.answer}
            kept = {name: text[: 5 * _TEXT_KEPT if name == "question" else _TEXT_KEPT] for name, text in texts.items()}
            yield AnswerFlip.model_validate({"task": task.a.task, "key": a.key, "direction": direction, **kept})


def _checks(
    reader: FormatReader,
    left: ReadResults,
    right: ReadResults,
    tasks: Sequence[ComparedTask],
    pairings: Sequence[Pairing],
) -> Iterator[Check]:
    loaded = list(zip(SIDES, (left, right), strict=True))
    doubts = [(side, doubt.where, doubt.diagnosis) for side, each in loaded for doubt in serious(each.findings)]
    sides = (("A", left.scores, right.scores), ("B", right.scores, left.scores))
    only = [(name, side) for side, these, those in sides for name in these if name not in those]
    differs = [(task.task, task.differs) for task in tasks if task.differs]
    unrecorded = [pairing.differences.unrecorded for pairing in pairings]
    yield Requirement("files-sound", sides=SIDES).met(not doubts, state("doubts", doubts=doubts))
    yield Requirement("same-tasks", sides=SIDES).met(not only, state("tasks-in-one", only=only))
    same = Requirement("same-settings", sides=SIDES)
    if any(unrecorded) and not differs:
        status: CheckStatus = "missing" if any(len(sides) == 1 for sides in unrecorded) else "not checked"
        named = sorted({side for sides in unrecorded for side in sides})
        yield same.check(status, state("settings-not-recorded", sides=named))
    else:
        yield same.met(not differs, state("questions-differ", differs=differs))
    apart = [
        (side, score.stated.value, score.task, mean)
        for side, each in loaded
        for score in each.sets
        if score.stated and (mean := score.accuracy) is not None
        if abs(score.stated.value - mean) > _ROUNDED * max(1, abs(mean))
    ]
    gaps = [
        (gap.count, gap.id, task.name if gap.id in UNDECIDED else task.task, gap.examples)
        for task in tasks
        for gap in task.unpaired
        if gap.id != BEYOND_STOP
    ]
    unread = left.unread + right.unread
    pairs = sum(len(each.pairs) for each in pairings)
    yield Requirement("scores-agree", sides=SIDES).met(not apart, state("stated-scores", apart=apart))
    yield Requirement("all-paired", sides=SIDES).met(not gaps, state("documents-paired", pairs=pairs, gaps=gaps))
    yield Requirement("all-read", sides=SIDES).met(not unread, state("records-unread", unread=unread))
    if unverified := sum(pairing.unverified for pairing in pairings):
        outcome = state("prompts-not-recorded", pairs=unverified)
        yield Requirement("same-prompts", sides=SIDES).check("not checked", outcome)
    if reader.id != "assay-run":
        yield Requirement("execution", sides=SIDES).check("not checked", state("kernels-not-recorded"))


def compare_runs(reader: FormatReader, left: ReadResults, right: ReadResults, margin: float) -> Comparison:
    """Compare two runs of assay by their answers to the questions that both asked.

    Both reports are rebuilt from the evidence. The verdict cannot be better than the new run's own, because answers say nothing
    about layers, logits, or kernels that did not run.
    """
    a, b = report_of(left.source), report_of(right.source)
    if left.sets and right.sets:
        made = compare_answers(reader, left, right, margin, a_failed=a.verdict in ("regression", "error"))
        cause = _new_cause(a, b) if made.verdict == "regression" else None
        return _capped(made.model_copy(update={"kind": "runs", "cause": cause}), b)
    missing = Requirement("answers", sides=SIDES).met(False, state("report-without-answers"))
    made = Comparison(
        verdict="inconclusive", created=timestamp(), kind="runs", why=(), a=left.compared(reader), b=right.compared(reader),
        checks=(missing,),
    )  # fmt: skip
    return _capped(made, b)


def _capped(result: Comparison, b: Report) -> Comparison:
    """Cap a comparison at the new run's own verdict."""
    if WORST_FIRST.index(result.verdict) <= WORST_FIRST.index(b.verdict):
        return result
    own = Requirement("own-verdict", sides=SIDES).met(False, state("own-verdict", verdict=b.verdict, of=basis_of(b)))
    return result.model_copy(update={"verdict": b.verdict, "checks": (*result.checks, own)})


def _new_cause(a: Report, b: Report) -> Statement | None:
    """State the fault that only the new run's candidate has, or return None if no kernel was seen to be at fault."""
    before, cause = cause_of(a.findings), cause_of(b.findings)
    if cause is None or not cause.does or (before is not None and before.does == cause.does):
        return None
    return state("new-cause", candidate=one_line(b.candidate.backend, 60), does=cause.does)
