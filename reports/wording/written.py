"""Results in JSON, with their text next to the numbers and ids that it follows from."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from pydantic import BaseModel

from assay.harness.drivers.sweep.spec import SweepResult
from assay.harness.ingest.comparison import Comparison
from assay.harness.ingest.result import IngestResult
from assay.harness.judge.judgement import Judgement, Metric, SuiteVerdict
from assay.harness.judge.latency_result import LatencyRow
from assay.harness.statement import WORDS, Statement, Worded
from assay.harness.verdict import Check
from assay.reports.wording.comparison import COVERS, comparison_words, ingest_headline
from assay.reports.wording.latency import TIMES
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, say
from assay.reports.wording.verdict import headline, reasons, suite_title, sweep_headline


@singledispatch
def with_words(part: Worded) -> dict[str, Any]:
    """Return the text of a part of a result by the keys that JSON uses for it."""
    raise TypeError(f"no words for {type(part).__name__}")


@with_words.register
def _(part: Statement) -> dict[str, Any]:
    return {"text": say(part)}


@with_words.register
def _(part: Metric) -> dict[str, Any]:
    return measured_of(part)._asdict()


@with_words.register
def _(part: Check) -> dict[str, Any]:
    said = said_check(part)
    return {"title": said.title, "found": said.found, "settles": said.settles}


@with_words.register
def _(part: SuiteVerdict) -> dict[str, Any]:
    return {"title": suite_title(part)}


@with_words.register
def _(part: LatencyRow) -> dict[str, Any]:
    return {"title": TIMES[part.metric]}


@with_words.register
def _(part: Judgement) -> dict[str, Any]:
    return {"headline": headline(part), "reasons": reasons(part)}


@with_words.register
def _(part: SweepResult) -> dict[str, Any]:
    return {"headline": sweep_headline(part)}


@with_words.register
def _(part: Comparison) -> dict[str, Any]:
    said, why = comparison_words(part)
    return {"headline": said, "reasons": why, "covers": COVERS.get(part.kind, "")}


@with_words.register
def _(part: IngestResult) -> dict[str, Any]:
    return {"headline": ingest_headline(part)}


def worded_json(result: BaseModel) -> str:
    """Write a result as indented JSON, with its text."""
    return result.model_dump_json(indent=2, by_alias=True, context={WORDS: with_words})
