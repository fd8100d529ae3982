"""The statements of a log that a claim can be about: metrics, scores and outcomes of tests."""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.harness.ingest.quantity import quantity, unit_of
from assay.harness.ingest.result import Statement
from assay.harness.ingest.sglang_log.facts import Log

_PASSING = frozenset({"passed", "xfailed"})
_AFTER_NUMBER = re.compile(r"^[^:]*: *\S+")


def statements(log: Log, path: str) -> Iterable[Statement]:
    """Yield the statements in the order of their lines, but for those of a summary, which come last."""
    for metric in log.metrics:
        names, unit = quantity(metric.name)
        unit = unit or unit_of(_AFTER_NUMBER.sub("", metric.text))
        yield Statement("number", names, metric.value, f"{path}:{metric.line}", metric.text, unit)
    for group in log.groups:
        for name, value in group.scores.items():
            yield Statement("number", (name,), value, f"{path}:{group.line}", f"'{name}': {value:g}")
    for block in log.blocks:
        for name, written, line in block.rows:
            if re.fullmatch(r"-?[\d.]+", written) and written.count(".") < 2:
                names, unit = quantity(name)
                yield Statement("number", names, float(written), f"{path}:{line}", f"{name}: {written}", unit)
    for test in log.tests:
        line = test.outcome_line or test.line
        names = (test.id, test.id.rpartition("::")[2], test.id.partition(" ")[0])
        yield Statement("test", names, test.outcome, f"{path}:{line}", f"{test.id} {test.outcome.upper()}".rstrip())
    yield from _loose(log, path)


def _loose(log: Log, path: str) -> Iterable[Statement]:
    """Yield the outcomes that no listed test has: those of several sessions in one file, and those that only the summary counts."""
    if log.loose_outcomes.count:
        for outcome, count in log.outcomes.items():
            if outcome not in _PASSING and count > sum(test.outcome == outcome for test in log.tests):
                where = log.loose_outcomes
                yield Statement("test", ("(a test)",), outcome, f"{path}:{where.first}", where.text)
    selected, line, text = log.collected
    counted = re.findall(r"(\d+) (?:failed|passed|skipped|xfailed|xpassed|error)s?\b", log.summary[0])
    if selected > max(sum(log.outcomes.values()), sum(map(int, counted))):
        # The log is cut off, perhaps by the test that has no outcome.
        yield Statement("test", ("(a collected test)",), "", f"{path}:{line}", text)
    text, line = log.summary
    for count, outcome in re.findall(r"(\d+) (failed|passed|error)s?\b", text):
        if int(count) > sum(test.outcome == outcome for test in log.tests):
            yield Statement("test", ("(summary)",), outcome, f"{path}:{line}", text)
