"""Two results with answers -> `Comparison`: pairs what can be paired, explains why the rest cannot be, and decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from assay.harness.files import timestamp
from assay.harness.ingest.assay_run import basis_of, report_of
from assay.harness.ingest.comparison import SIDES, AnswerFlip, ComparedAnswers, ComparedTask, Comparison
from assay.harness.ingest.pairing import (
    BEYOND_STOP,
    ItemPair,
    ItemPairing,
    decide_either_way,
    decide_perplexity,
    decide_unpaired,
    higher_is_better,
    loss,
    pair_tasks,
)
from assay.harness.ingest.result_set import Loaded, ResultSet
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
from assay.harness.verdict import WORST_FIRST, Check, Requirement, Verdict, cause_of

# Level of each interval and test.
_ALPHA = 0.05
# Flips in a result, and characters that are kept of an answer.
_FLIPS_SHOWN, _TEXT_KEPT = 50, 400


def _result(
    left: Loaded, right: Loaded, verdict: Verdict, why: Sequence[Statement], checks: Sequence[Check],
    answers: ComparedAnswers | None = None, notes: Sequence[Statement] = (),
) -> Comparison:  # fmt: skip
    kind: Literal["runs", "answers"] = "runs" if left.reader.id == "assay-run" else "answers"
    return Comparison(
        verdict=verdict, created=timestamp(), kind=kind, why=tuple(why), a=left.file, b=right.file, checks=tuple(checks),
        answers=answers, notes=tuple(notes),
    )  # fmt: skip


def compare_answers(left: Loaded, right: Loaded, margin: float, *, a_failed: bool = False) -> Comparison:
    """Compare two results of one tool: the first score of all tasks together, and every score of each.

    All share the level of a regression, and one of any score is one of B. A check that is not met rules out a pass, and hides no
    regression. Lengths and ends of the answers are judged where A's are a measure: not where A failed, or where B is shown to score
    better.

    Args:
        margin: largest loss that passes.
        a_failed: whether A's own verdict is a failure.
    """
    mine, theirs = left.scores, right.scores
    pairings = {name: pair_tasks(mine[name], theirs[name]) for name in mine if name in theirs}
    # The first score of a task stands for it: others are of the same answers.
    first = {mine[name].task: name for name in reversed(pairings)}.values()
    firsts = {name: pairing for name, pairing in pairings.items() if name in first}
    # Perplexities are no scores from 0 to 1, which alone can be pooled.
    pooled = [pairing for pairing in firsts.values() if not pairing.of_perplexity]
    pairs = [pair for pairing in pooled for pair in pairing.pairs]
    either_way = any(pairing.either_way for pairing in pooled)
    turned = [pair for pairing in pooled for pair in pairing.turned] if either_way else pairs
    tests = len(pairings) + (len(firsts) > 1)
    rule = Rule(margin, _ALPHA, _ALPHA / max(1, tests), loss_suffices=True)
    adaptive = any(score.adaptive for score in (*mine.values(), *theirs.values()))
    tasks = [_task(mine[name], theirs[name], pairing, rule, adaptive) for name, pairing in pairings.items()]
    leading = [task for name, task in zip(pairings, tasks, strict=True) if name in firsts]
    alone = (
        min(leading, key=lambda task: (WORST_FIRST.index(task.verdict), -task.loss)) if leading and not pooled else None
    )
    alone = leading[0] if len(leading) == 1 else alone
    overall, lengths = alone or decide_either_way(pairs, turned, rule, adaptive), _lengths(pairs)
    flips = [flip for name, pairing in firsts.items() for flip in _flips(mine[name].task, pairing)]
    answers = ComparedAnswers(
        margin=margin,
        alpha=_ALPHA,
        overall=overall,
        tasks=tuple(tasks),
        flips=tuple(flips[:_FLIPS_SHOWN]),
        lengths=lengths,
    )
    no_measure = "failed" if a_failed else "gain" if overall.high < 0 and not overall.either_way else ""
    # A result that is compared with its copy passes whatever the candidate computes.
    same = left.run == right.run and left.source.is_copy_of(right.source)
    checks = [
        *_checks(left, right, [task for task in tasks if task in leading or task.of_no_scale], list(firsts.values())),
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
    open_ = [
        task
        for task in tasks
        if task.changed or (task in leading and task.test == "bootstrap" and task.verdict != "pass")
    ]
    if decided == "pass" and open_:
        decided, why = "inconclusive", [*(state("of-task", task=task.name, why=task.why) for task in open_), *why]
    if decided == "pass" and any(check.status in ("missing", "failed") for check in checks):
        decided = "inconclusive"
    changed = next((pairing.differences.changed for pairing in firsts.values()), ())
    notes = [state("served-differently", changed=changed)] if changed else []
    return _result(left, right, decided, why, checks, answers, notes)


def _ends_checks(lengths: AnswerLengths | None, pairs: Sequence[ItemPair], no_measure: str) -> Iterator[Check]:
    """Check lengths and ends of the answers, unless A's are no measure."""
    if no_measure:
        outcome = state("lengths-no-measure", why=no_measure)
        yield from (
            Requirement(id_, sides=SIDES).check("not checked", outcome) for id_ in ("answer-lengths", "finish-reasons")
        )
        return
    yield check_lengths(lengths, SIDES) if lengths else _NO_LENGTHS
    ends = [(AnswerEnd(a.finish), AnswerEnd(b.finish)) for a, b in pairs]
    yield check_ends(ends, SIDES, units=[a.key for a, _ in pairs])


def _lengths(pairs: Sequence[ItemPair]) -> AnswerLengths | None:
    """Compare the lengths of the answers; repeats of a document count once. None where a side wrote none.

    They are in characters where a side does not record tokens.
    """
    counted = any(a.tokens is not None and b.tokens is not None for a, b in pairs)
    of = [(a, b, a.tokens if counted else a.characters, b.tokens if counted else b.characters) for a, b in pairs]
    known = [(a, b, mine, theirs) for a, b, mine, theirs in of if mine is not None and theirs is not None]
    ends = [
        (AnswerEnd(a.finish, mine, text=a.answer), AnswerEnd(b.finish, theirs, text=b.answer))
        for a, b, mine, theirs in known
    ]
    return compare_lengths(ends, _ALPHA, units=[a.key for a, *_ in known], counted=counted) if ends else None


def _task(a: ResultSet, b: ResultSet, pairing: ItemPairing, rule: Rule, adaptive: bool) -> ComparedTask:
    known: dict[str, object] = {
        "task": a.task, "metric": a.metric, "shots": a.asked.shots, "again": pairing.again, "differs": pairing.differs,
        "unpaired": tuple(pairing.unpaired),
    }  # fmt: skip
    if pairing.alone:
        decided = decide_unpaired(a, b, rule, decides=not pairing.differs)
        why = (*([state("not-same-question", differs=pairing.differs)] if pairing.differs else []), *decided.why)
        return decided.model_copy(update={**known, "why": why})
    if pairing.of_perplexity:
        return decide_perplexity(pairing.pairs, rule).model_copy(update=known)
    decided = decide_either_way(pairing.pairs, pairing.turned, rule, adaptive)
    if higher_is_better(a, b) is False:
        known |= {"a": 1 - decided.a, "b": 1 - decided.b}
    return decided.model_copy(update=known)


def _flips(task: str, pairing: ItemPairing) -> Iterator[AnswerFlip]:
    for pair in pairing.pairs:
        if lost := loss(pair):
            changed: Literal["lost", "gained", "changed"] = "lost" if lost > 0 else "gained"
            a, b = pair
            texts = {"question": a.question, "target": a.target, "a": a.answer, "b": b.answer}
            kept = {name: text[:_TEXT_KEPT] for name, text in texts.items()}
            yield AnswerFlip(task=task, key=a.key, direction="changed" if pairing.either_way else changed, **kept)


def _checks(
    left: Loaded, right: Loaded, tasks: Sequence[ComparedTask], pairings: Sequence[ItemPairing]
) -> Iterator[Check]:
    differs = [(task.task, task.differs) for task in tasks if task.differs]
    sides = (("A", left.scores, right.scores), ("B", right.scores, left.scores))
    only = [(name, side) for side, these, those in sides for name in these if name not in those]
    unread, apart = left.reading.unread + right.reading.unread, _other_scores(left.scores, right.scores)
    gaps = [
        (item.count, item.id, task.task, item.examples)
        for task in tasks
        for item in task.unpaired
        if item.id != BEYOND_STOP
    ]
    paired = sum(len(pairing.pairs) for pairing in pairings)
    doubts = [
        (side, finding.where, finding.diagnosis)
        for side, loaded in zip(SIDES, (left, right), strict=True)
        for finding in loaded.reading.findings
        if finding.severity != "info"
    ]
    unrecorded = sorted({side for pairing in pairings for side in pairing.differences.unrecorded})
    same = Requirement("same-settings", sides=SIDES)
    yield Requirement("files-sound", sides=SIDES).met(not doubts, state("doubts", doubts=doubts))
    yield Requirement("same-tasks", sides=SIDES).met(not only, state("tasks-in-one", only=only))
    if unrecorded and not differs:
        yield same.check(
            "missing" if any(len(pairing.differences.unrecorded) == 1 for pairing in pairings) else "not checked",
            state("settings-not-recorded", sides=unrecorded),
        )
    else:
        yield same.met(not differs, state("questions-differ", differs=differs))
    yield Requirement("scores-agree", sides=SIDES).met(not apart, state("stated-scores", apart=apart))
    yield Requirement("all-paired", sides=SIDES).met(not gaps, state("documents-paired", pairs=paired, gaps=gaps))
    yield Requirement("all-read", sides=SIDES).met(not unread, state("records-unread", unread=unread))
    if unverified := sum(pairing.unverified for pairing in pairings):
        yield Requirement("same-prompts", sides=SIDES).check(
            "not checked", state("prompts-not-recorded", pairs=unverified)
        )
    if left.reader.id != "assay-run":
        yield _EXECUTION


# Difference of a score that rounding to three digits explains.
_ROUNDED = 1e-3


def _other_scores(*sides: dict[str, ResultSet]) -> list[tuple[str, float, str, float]]:
    """List the scores of tasks that their documents do not have: the files are of different runs, or one is damaged."""
    disagreements = []
    for which, side in zip(SIDES, sides, strict=True):
        for part in side.values():
            stated, mean = part.stated, part.accuracy
            if stated and mean is not None and abs(stated.value - mean) > _ROUNDED * max(1, abs(mean)):
                disagreements.append((which, stated.value, part.task, mean))
    return disagreements


_EXECUTION = Requirement("execution", sides=SIDES).check("not checked", state("kernels-not-recorded"))
_NO_LENGTHS = Requirement("answer-lengths", sides=SIDES).check("not checked", state("tokens-not-recorded"))


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
        missing = Requirement("answers", sides=SIDES).met(False, state("report-without-answers"))
        return _capped(_result(left, right, "inconclusive", [], [missing]), b)
    made = compare_answers(left, right, margin, a_failed=a.verdict in ("regression", "error"))
    return _capped(made.model_copy(update={"cause": _new_cause(a, b)}) if made.verdict == "regression" else made, b)


def _capped(result: Comparison, b: Report) -> Comparison:
    """Cap a comparison at the new run's own verdict."""
    if WORST_FIRST.index(result.verdict) <= WORST_FIRST.index(b.verdict):
        return result
    own = Requirement("own-verdict", sides=SIDES).met(False, state("own-verdict", verdict=b.verdict, of=basis_of(b)))
    return result.model_copy(update={"verdict": b.verdict, "checks": (*result.checks, own)})


def _new_cause(a: Report, b: Report) -> Statement | None:
    """State what the new run's candidate does wrong and the accepted one does not; None where no kernel was seen to."""
    before, cause = cause_of(a.findings), cause_of(b.findings)
    if cause is None or not cause.does or (before is not None and before.does == cause.does):
        return None
    return state("new-cause", candidate=one_line(b.candidate.backend, 60), does=cause.does)
