"""Findings from scores: below guessing, below the bound of the test, and answers that were not parsed."""

from __future__ import annotations

from collections.abc import Iterable

from assay.harness.ingest import guessing
from assay.harness.ingest.guessing import GUESSING, LEVEL
from assay.harness.ingest.result import CitedFinding
from assay.harness.ingest.sglang_log.citing import cite, finding, has_failed, outcome, runaway_bursts, test_name
from assay.harness.ingest.sglang_log.facts import Group, Log, Metric, Trace, Where
from assay.harness.ingest.sglang_log.numbers import asserted
from assay.harness.stats.binomial import at_most
from assay.harness.text import one_line


def questions(log: Log, metric: Metric) -> tuple[int, Where] | None:
    """Infer how many questions a score is of: a progress bar's total, in its test, of which the score is a whole number."""
    for bar in reversed(list(log.bars.values())):
        if bar.test == metric.test and not bar.label and bar.done == bar.total > 1:
            right = metric.value * bar.total
            if abs(right - round(right)) < 1e-3:
                return bar.total, Where(1, bar.line, bar.line, f"{bar.done}/{bar.total}")
    return None


def scores(log: Log) -> list[tuple[str, Metric]]:
    """List the scores of known evaluations: ``[METRIC] mmlu_score=0.125``."""
    named = [(metric.name.removesuffix("_score").removesuffix("_accuracy").lower(), metric) for metric in log.metrics]
    return [(name, one) for name, one in named if name != one.name.lower() and 0 <= one.value <= 1]


def below_guessing(log: Log) -> Iterable[CitedFinding]:
    """Yield a score that is below what guessing gets, with its exact p-value. Without the number of questions nothing follows."""
    for name, metric in scores(log):
        of = questions(log, metric)
        if of is None:
            continue
        group = _group(log, metric)
        evidence = [f"by group: {_by_group(group)}"] if group else []
        cites = cite((metric.line, metric.text), of[1], *([(group.line, group.text)] if group else []))
        found = guessing.below_guessing(name, metric.value, of[0], test_name(log, metric.test), evidence, cites)
        if found:
            yield found


def _group(log: Log, metric: Metric) -> Group | None:
    found = (group for group in log.groups if group.test == metric.test and group.scores.get("score") == metric.value)
    return next(found, None)


def _by_group(group: Group) -> str:
    """Return the scores by group in a line, without their deviations."""
    return ", ".join(
        f"{key} {value:.3g}" for key, value in group.scores.items() if not key.endswith(":std") and key != "score"
    )


def missed_bounds(log: Log) -> list[tuple[Trace, Metric, float]]:
    """Find the assertions that failed because of a score that the log also states: where, the score, and the bound."""
    found = []
    stated = scores(log)
    for trace in log.traces:
        said = asserted(trace.exception)
        if said is None or not has_failed(log, trace.test) or "greater" not in said[1] or not said[0] <= said[2]:
            continue
        scored = (one for _, one in stated if one.value == said[0] and one.test == trace.test)
        found += [(trace, one, said[2]) for one in list(scored)[:1]]
    return found


def below_bound(log: Log) -> Iterable[CitedFinding]:
    """Yield a test that failed because of a score."""
    for trace, metric, bound in missed_bounds(log):
        value, of = metric.value, questions(log, metric)
        evidence = [f"the assertion that failed: {one_line(trace.exception)}"]
        if of and 0 < bound < 1:
            p = at_most(round(value * of[0]), of[0], bound)
            evidence.append(
                f"if the true score were {bound:g}, {round(value * of[0])} or fewer of {of[0]} would be right with p = {p:.2g}"
            )
        yield finding(
            "score-below-bound",
            "Score below the bound that the test sets",
            "serious",
            test_name(log, trace.test),
            f"{metric.name} is {value:g}; the test asks for {bound:g}.",
            evidence,
            cite(
                (trace.exception_line, trace.exception),
                (metric.line, metric.text),
                *([outcome(log.tests[trace.test])] if trace.test >= 0 else []),
            ),
        )


def unparsed(log: Log) -> Iterable[CitedFinding]:
    """Find missing answers, where a score is below guessing."""
    for name, metric in scores(log):
        of = questions(log, metric)
        if name not in GUESSING or of is None or at_most(round(metric.value * of[0]), of[0], GUESSING[name]) >= LEVEL:
            continue
        right = round(metric.value * of[0])
        endless = [
            burst for server in log.servers if server.test == metric.test for burst in runaway_bursts(log, server)
        ]
        ran = sum(one.size for one in endless)
        evidence = [
            f"{right} right answers are what guessing on {right / GUESSING[name]:.0f} questions gives, not on {of[0]}"
        ]
        if ran and ran < of[0]:
            rest = of[0] - ran
            evidence.append(
                f"{ran} of {of[0]} ran to the token limit; of the other {rest}, at most {right} are right ({right / rest:.2f})"
            )
        yield finding(
            "answers-unparsed",
            "Answers that could not be parsed, suspected",
            "warning",
            test_name(log, metric.test),
            "A model that names any choice scores like guessing. Below it, answers are missing: cut off, or without a choice. "
            "The log does not have the answers; the evaluation's results file does.",
            evidence,
            cite((metric.line, metric.text), *(one.where for one in endless)),
        )
