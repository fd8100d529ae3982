"""The parts of a finding: the lines that it cites, and the names of what it is about."""

from __future__ import annotations

from assay.harness.ingest.result import CitedFinding, Excerpt
from assay.harness.ingest.sglang_log.facts import Burst, Log, Server, Test, Where
from assay.harness.text import one_line
from assay.harness.verdict import Severity


def cite(*places: Where | tuple[int, str]) -> tuple[Excerpt, ...]:
    """Quote lines: a range where there are several of a kind."""
    quoted = []
    for place in places:
        where = place if isinstance(place, Where) else Where(1, place[0], place[0], place[1])
        if where.count:
            quoted.append(Excerpt(first=where.first, last=where.last, text=one_line(where.text)))
    return tuple(quoted)


def test_name(log: Log, index: int) -> str:
    """Return the name of a test without its file."""
    return log.tests[index].id.rpartition("::")[2] if index >= 0 else "the log"


def finding(
    id: str, title: str, severity: Severity, where: str, diagnosis: str, evidence: list[str], cites: tuple[Excerpt, ...]
) -> CitedFinding:
    """Make a finding without a command of its own: the document has the next steps."""
    return CitedFinding(
        id=id,
        title=title,
        severity=severity,
        where=where,
        diagnosis=diagnosis,
        evidence=tuple(evidence),
        reproduce="",
        cites=cites,
    )


def has_failed(log: Log, index: int) -> bool:
    """Return True if a test failed. What is outside of all tests may have, and counts as failed."""
    return index < 0 or log.tests[index].outcome in ("failed", "error")


def outcome(test: Test) -> tuple[int, str]:
    """Return the line with a test's outcome."""
    return test.outcome_line, test.outcome.upper()


def runaway_bursts(log: Log, server: Server) -> list[Burst]:
    """Find answers that ended together, as many steps after they began as an answer may have tokens."""
    if log.disordered.count:  # of several processes: nobody knows whose batches lie between
        return []
    limit = log.answer_limit[0]
    interval = server.decode_steps // server.decodes.count if server.decodes.count else 0
    return [burst for burst in server.bursts if limit and interval and abs(burst.steps - limit) <= interval]
