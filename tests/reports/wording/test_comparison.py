"""The words of a comparison."""

from __future__ import annotations

import json
from typing import Any

import pytest

from assay.harness.ingest.comparison import SIDES, ComparedAnswers, ComparedTask, Comparison, TraceDifference
from assay.harness.ingest.result import CitedFinding, FileDocument, FileRead, IngestResult
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Requirement, Verdict
from assay.reports.wording.comparison import comparison_words, first_places, ingest_headline
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import say
from assay.reports.wording.written import worded_json


def does(what: str, name: str = "") -> Statement:
    return state("trace-does", does=what, name=name)


SEGMENT = state("one-more-segment", kind="decode", steps=14)
REFUSED = (state("tasks-differ", what="shots", a=0, b=5), state("setting-differs", setting="top_p", a=None, b="1"))
PLACE = {"layer": 11, "boundary": "attention", "name": "self_attn.attn", "step": 0, "head": 5, "token": 70, "batch": None}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            state("traces-differ", subject="request 1", a=does("action", "Batch decode"), b=None, lines=(32, 31)),
            "Request 1 polls Batch decode in the first trace (line 32) but not in the second (after line 31).",
        ),
        (
            state("traces-differ", subject="request 1", a=None, b=does("call", "popn_func_"), lines=(32, 33)),
            "Request 1 calls popn_func_ in the second trace (line 33) but not in the first (after line 32).",
        ),
        (
            state("traces-differ", subject="request 2", a=does("is"), b=None, lines=(81, 0)),
            "Request 2 is there in the first trace (line 81) but not in the second.",
        ),
        (
            state("traces-differ", subject="request 1", a=SEGMENT, b=None, lines=(40, 39)),
            "Request 1 has one more segment, decode with 14 steps in the first trace (line 40) but not in the second (after "
            "line 39).",
        ),
        (does("mark", "segment ends"), "ends a segment"),
        (does("mark", "Reload"), "logs Reload"),
        (does("answers", "it's"), 'answers "it\'s"'),
        (
            state("tensors-differ", differing=2, compared=2, **PLACE | {"layer": None, "step": 3, "batch": 0}),
            "2 of 2 tensors differ; the first is outside the layers, attention (self_attn.attn), pass 3, sequence 0, head 5, "
            "token 70.",
        ),
        (
            state("tensors-equal", compared=1, exact=True, names=("x", "y"), not_compared=0),
            "1 tensor is equal bit for bit (x in A, y in B).",
        ),
        (
            state("tensors-equal", compared=9, exact=False, names=("x", "x"), not_compared=2),
            "9 tensors are equal within bounds, but 2 could not be compared.",
        ),
        (
            state("not-same-question", differs=REFUSED),
            "Not the same question: 0 shots in A and 5 shots in B; the setting top_p is not set in A and 1 in B.",
        ),
        (
            state("scores-unpaired", a=0.212, b=0.824, low=0.5427, high=0.6813, level=0.95, margin=0.02),
            "B 0.8240 - A 0.2120 = +0.6120, 95 % +0.54 to +0.68, unpaired, with a margin of 0.02. A pass needs samples of both "
            "(--log_samples of lm-eval): paired, they show smaller differences, and which answers differ.",
        ),
        (
            state("scores-unpaired", a=0.9, b=0.8, low=None, high=None, level=0.95, margin=0.02),
            "B 0.8000 - A 0.9000 = -0.1000, no interval, since no standard error is stated, unpaired, with a margin of 0.02. "
            "A pass needs samples of both (--log_samples of lm-eval): paired, they show smaller differences, and which answers "
            "differ.",
        ),
        (
            state("score-either-way", outcome="changed", a=0.3, b=0.7, low=-0.45, high=-0.35, level=0.9, margin=0.02),
            "The score is 0.3000 in A and 0.7000 in B (+35.0 to +45.0 points with 90 % confidence), it changed by more than the "
            "margin of 2 points. These results do not record which way is better.",
        ),
    ],
)
def test_a_statement_is_said_before_and_after_it_was_written(statement: Statement, said: str) -> None:
    assert say(statement) == say(Statement.model_validate_json(statement.model_dump_json())) == said


@pytest.mark.parametrize(
    ("id_", "outcome", "title", "found"),
    [
        (
            "all-paired",
            state("documents-paired", pairs=23, gaps=[(1, "only-in-a", "mmlu", ["7-T"]), (2, "repeated", "gpqa", ["1", "2"])]),
            "it is not shown that every document is in both",
            "3 documents were not paired: 1 only in A (mmlu: 7-T); 2 more often in one than in the other (gpqa: 1, 2)",
        ),
        ("all-read", state("records-unread", unread=1), "it is not shown that every record was understood", "1 record was not"),
    ],
)
def test_a_check_that_is_not_met_says_what_is_wrong_and_what_to_do(id_: str, outcome: Statement, title: str, found: str) -> None:
    said = said_check(Requirement(id_, sides=SIDES).met(False, outcome))
    assert (said.title, said.found, bool(said.settles)) == (title, found, True)


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


def test_the_first_place_of_a_difference_is_said_as_far_as_it_is_known() -> None:
    kind = TraceDifference(where="request 1", a=None, b=does("is"), count=2, lines=(0, 1200))
    assert first_places(kind) == "line 1,200"
    assert first_places(kind.model_copy(update={"lines": (7, 9)})) == "after line 7 and line 9"


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
