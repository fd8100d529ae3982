"""Parts that the documents of engine traces and of profiles share: findings of broken rules, and the size of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from assay.harness.ingest.result import CitedFinding, Excerpt
from assay.harness.ingest.trace.machine import RULES
from assay.harness.ingest.trace.model import Trace, Violation

ROWS_SHOWN = 100
"""Most rows of a table."""


def left_out(total: int) -> str:
    """Describe how many rows a table lacks; empty if it has all."""
    return f"{total - ROWS_SHOWN:,} more are not shown" if total > ROWS_SHOWN else ""


def quote(places: Iterable[int], texts: Mapping[int, str], otherwise: str = "") -> tuple[Excerpt, ...]:
    """Quote the places as excerpts, with the text that stands there."""
    return tuple(Excerpt(first=place, last=place, text=texts.get(place, otherwise)) for place in places if place)


def finding_of(violation: Violation, trace: Trace, texts: Mapping[int, str]) -> CitedFinding:
    """Make a finding of a broken rule.

    Args:
        violation: the first place where it is broken.
        trace: counts the others.
        texts: of lines, where the file has lines.
    """
    count = trace.broken[violation.rule]
    places = (f"{trace.unit} {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places)
    return CitedFinding(
        id=violation.rule,
        title=RULES[violation.rule],
        severity="warning",
        where=violation.where,
        diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.",
        evidence=(*places, *((f"{count:,} such places in the trace",) if count > 1 else ())),
        reproduce="",
        cites=quote(violation.places, texts, violation.says),
    )
