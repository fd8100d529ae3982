"""The words of a comparison."""

from __future__ import annotations

import json
from typing import Any

import pytest

from assay.harness.ingest.comparison import SIDES, ComparedAnswers, ComparedTask, Comparison
from assay.harness.ingest.result import CitedFinding, FileDocument, FileRead, IngestResult
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Requirement, Verdict
from assay.reports.wording.comparison import comparison_words, ingest_headline
from assay.reports.wording.say import say
from assay.reports.wording.written import worded_json


def does(what: str, name: str = "") -> Statement:
    return state("trace-does", does=what, name=name)


GAP = Requirement("all-paired", sides=SIDES).met(False, state("documents-paired", pairs=9, gaps=[(1, "only-in-a", "t", ["7"])]))
UNPAIRED = (
    "it is not shown that every document is in both: 1 document was not paired: 1 only in A (t: 7). "
    "To resolve: run both to the end."
)
OWN = Requirement("own-verdict", sides=SIDES).met(False, state("own-verdict", verdict="error", of=["kernel-ran", "greedy"]))
CAUSE = state("new-cause", candidate="triton", does="applies no causal mask")
FILE = FileRead(path="a", format="f", title="F", bytes=1, sha256="", lines=1, read=1, unread=0)


OTHER = state("not-same-question", differs=(state("tasks-differ", what="shots", a=1, b=0),))
LOSS = {"loss": 208 / 14042, "low": 0.0131, "high": 0.0166, "lost": 208, "gained": 0, "questions": 14042, "level": 0.9}
KEPT = state("accuracy-kept", p=1e-6, p_mcnemar=5e-63, margin=0.02, test="exact", **LOSS)
EQUAL = KEPT.model_copy(update={"values": KEPT.values | {"loss": 0.0, "low": -0.002, "high": 0.002, "p_mcnemar": None}})


def compared(verdict: Verdict, scores: Verdict = "pass", checks: tuple[Check, ...] = (), **more: Any) -> Comparison:
    why = more.get("why", (state("scores"),)) if verdict == "pass" else (state("scores"),)
    answers = ComparedAnswers(margin=0.02, alpha=0.05, overall=ComparedTask(task="", verdict=scores, why=why))
    known = {"created": "", "kind": "runs", "why": why, "a": FILE, "b": FILE, "answers": answers}
    return Comparison(verdict=verdict, checks=checks, **known | more)


@pytest.mark.parametrize(
    ("result", "headline", "reasons"),
    [
        (compared("pass"), "B is as good as A: scores", ["scores"]),
        (
            compared("pass", why=(KEPT,)),
            "B is worse by 1.5 points (1.3 to 1.7), within the margin of 2: 208 lost and 0 gained of 14,042.",
            [say(KEPT)],
        ),
        (compared("pass", why=(EQUAL,)), f"B is as good as A: {say(EQUAL)}", [say(EQUAL)]),
        (
            compared("inconclusive", "inconclusive", why=(OTHER, state("gap"))),
            "No verdict: Not the same question: 1 shot in A and 0 shots in B. gap",
            ["Not the same question: 1 shot in A and 0 shots in B.", "gap"],
        ),
        (compared("inconclusive", checks=(GAP,)), f"No verdict: {UNPAIRED}", [UNPAIRED, "scores"]),
        (compared("inconclusive", "inconclusive", (GAP,)), "No verdict: scores", ["scores", UNPAIRED]),
        (compared("regression", why=(state("worse"),), checks=(GAP,)), "B is worse than A: worse", ["worse", UNPAIRED]),
        (compared("regression", "regression", cause=CAUSE), "B is worse than A: triton applies no causal mask. scores", ["scores"]),
        (
            compared("error", checks=(GAP, OWN)),
            "B's own verdict is error: kernel-ran, greedy",
            ["B's own verdict is error: kernel-ran, greedy", UNPAIRED, "scores"],
        ),
        (compared("regression", kind="trace", answers=None), "scores", ["scores"]),
    ],
)
def test_a_comparison_says_first_what_decides(result: Comparison, headline: str, reasons: list[str]) -> None:
    assert comparison_words(result) == (headline, reasons)
    written = json.loads(worded_json(result))
    assert (written["headline"], written["reasons"]) == (headline, reasons)
    assert ("Each run's own report" in written["covers"]) == (result.kind == "runs")
    assert Comparison.model_validate(written) == result


def ingested(verdict: Verdict, *formats: str) -> IngestResult:
    finding = CitedFinding(id="x", title="X", severity="warning", where="w", diagnosis="It is slow.", reproduce="")
    found = (finding, finding.model_copy(update={"severity": "serious", "diagnosis": "It is wrong."}))
    files = [FILE.model_copy(update={"format": format_, "path": path}) for path, format_ in zip("abc", formats, strict=False)]
    findings = found if verdict == "regression" else found[:1]
    documents = [FileDocument(file=file, findings=findings if file.format == "log" else ()) for file in files]
    return IngestResult(verdict=verdict, created="", documents=tuple(documents))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ingested("inconclusive", "unknown", "unknown"), "a and b: not recognised, so nothing was read."),
        (ingested("regression", "log", "unknown"), "It is wrong. Not recognised: b."),
        (ingested("inconclusive", "log"), "X (w): It is slow. A file cannot show if it is a regression."),
        (ingested("inconclusive", "log", "log"), "X (w): It is slow. A file cannot show if it is a regression; 1 more warning."),
        (ingested("inconclusive", "quiet"), "Nothing here shows a regression, and a file cannot show a pass."),
    ],
)
def test_files_say_what_is_serious_and_what_was_not_recognised(result: IngestResult, said: str) -> None:
    assert ingest_headline(result) == json.loads(worded_json(result))["headline"] == said


def test_the_worst_warning_of_all_files_leads() -> None:
    result = ingested("inconclusive", "log", "log")
    ids = ("fallback", "crash")
    documents = [
        document.model_copy(
            update={"findings": tuple(one.model_copy(update={"id": id_, "where": id_}) for one in document.findings)}
        )
        for id_, document in zip(ids, result.documents, strict=True)
    ]
    for order in (documents, documents[::-1]):
        assert ingest_headline(result.model_copy(update={"documents": tuple(order)})).startswith("X (crash): It is slow.")
