"""The words of what was judged: results hold numbers and ids, and each claim is put into words here, once for all media.

A module for each room of claims; `say` finds the function that says a statement by its id.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from pydantic import BaseModel

from assay.harness.ingest.comparison import Comparison, TraceDifference, Unpaired
from assay.harness.ingest.result import IngestResult
from assay.harness.judge.judgement import Judgement, Metric, SuiteVerdict
from assay.harness.judge.latency_result import LatencyRow
from assay.harness.statement import WORDS, Statement, Worded
from assay.harness.verdict import Check
from assay.reports.wording import accuracy as accuracy
from assay.reports.wording import bisection as bisection
from assay.reports.wording import envelope as envelope
from assay.reports.wording import gate as gate
from assay.reports.wording import greedy as greedy
from assay.reports.wording import invariance as invariance
from assay.reports.wording import latency as latency
from assay.reports.wording import layers as layers
from assay.reports.wording import lengths as lengths
from assay.reports.wording import logits as logits
from assay.reports.wording import sensitivity as sensitivity
from assay.reports.wording import servers as servers
from assay.reports.wording.comparison import COVERS, comparison_words, first_places, ingest_headline, unpaired_title
from assay.reports.wording.requirements import SaidCheck, said_check
from assay.reports.wording.say import measured_of, said_finding, say
from assay.reports.wording.verdict import headline, reasons, suite_title, unmet_sentence

__all__ = [
    "SaidCheck", "headline", "measured_of", "reasons", "said_check", "said_finding", "say", "suite_title", "unmet_sentence",
    "with_words", "worded_json",
]  # fmt: skip


@singledispatch
def with_words(part: Worded) -> dict[str, Any]:
    """Return the words of a part of a result by the keys under which JSON has them."""
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
    return {"title": latency.TIMES[part.metric]}


@with_words.register
def _(part: Judgement) -> dict[str, Any]:
    return {"headline": headline(part), "reasons": reasons(part)}


@with_words.register
def _(part: Comparison) -> dict[str, Any]:
    said, why = comparison_words(part)
    return {"headline": said, "reasons": why, "covers": COVERS.get(part.kind, "")}


@with_words.register
def _(part: Unpaired) -> dict[str, Any]:
    return {"title": unpaired_title(part)}


@with_words.register
def _(part: TraceDifference) -> dict[str, Any]:
    return {"first": first_places(part)}


@with_words.register
def _(part: IngestResult) -> dict[str, Any]:
    return {"headline": ingest_headline(part)}


def worded_json(result: BaseModel) -> str:
    """Write a result as indented JSON, with its words."""
    return result.model_dump_json(indent=2, by_alias=True, context={WORDS: with_words})
