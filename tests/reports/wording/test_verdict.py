"""The headline of a verdict: the cause and what it costs, and what a pass covers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.envelope import EngineLimits, ranges_of
from assay.harness.judge.judgement import measure
from assay.harness.judge.report import EnvelopeResult, Report, SuiteResult, Tally
from assay.harness.statement import state
from assay.harness.verdict import OPERATOR, UNEXPLAINED, Check, Finding, Requirement, cause_of
from assay.reports.wording.verdict import headline, reasons

DOES = "applies a top-left causal mask once a prefix is cached"
SENTENCE = 'Computes "causal mask top-left" in extend with a cached prefix (all layers).'


def found(**more: Any) -> Finding:
    values = {
        "id": "mask-top-left", "title": "causal mask top-left", "severity": "serious", "where": "extend", "diagnosis": SENTENCE,
        "does": DOES, "evidence": (), "reproduce": "again",
    }  # fmt: skip
    return Finding.model_validate(values | more)


def suite(id_: str = "accuracy", verdict: str = "regression", **more: Any) -> SuiteResult:
    return SuiteResult.model_validate({"id": id_, "verdict": verdict, "why": (state("lost"),), "synthetic": True} | more)


@pytest.fixture
def report(examples: ModuleType) -> Any:
    def make(*suites: SuiteResult, cause: Finding | None = None, **more: Any) -> Report:
        verdict = min((each.verdict for each in suites), key=["regression", "inconclusive", "pass"].index)
        changes = {"suites": suites, "verdict": verdict, "findings": (cause,) if cause else (), "causes": int(cause is not None),
                   "checks": (), "envelope": None}  # fmt: skip
        base: Report = examples.passing().model_copy(update={"left_out": ()})
        return base.model_copy(update=changes | more)

    return make


TALLIES = tuple(
    Tally(role=role, right=right, wrong=256 - right, unparsed=0, ran_to_limit=0, total=256)
    for role, right in (("reference", 256), ("candidate", 56))
)


def test_the_headline_carries_the_cause_and_what_it_costs(report: Any) -> None:
    made = report(suite(tallies=TALLIES), suite("greedy"), suite("logits"), cause=found())
    assert headline(made) == f"Do not merge: sage_attn {DOES} (accuracy 1.000 → 0.219)."
    assert reasons(made)[0] == SENTENCE
    assert len(reasons(made)) == 4


@pytest.mark.parametrize(
    ("id_", "cause", "end"),
    [
        ("accuracy", found(does="", title="state kept between calls"), "worse than the reference: state kept between calls"),
        ("latency", None, "slower than the reference"),
    ],
)
def test_the_headline_says_what_a_candidate_without_such_words_is_worse_than(
    report: Any, id_: str, cause: Finding | None, end: str
) -> None:
    assert headline(report(suite(id_), cause=cause)) == f"Do not merge: sage_attn is {end}."


def test_a_bug_without_a_name_is_said_as_it_was_read() -> None:
    odd = found(id=UNEXPLAINED, does="computes something other than attention", operator="query i sees key p + 2")
    for id_ in (UNEXPLAINED, OPERATOR):
        cause = cause_of([found(severity="info"), odd.model_copy(update={"id": id_})])
        assert cause is not None
        assert cause.does == "computes something other than attention: query i sees key p + 2"
    assert cause_of([found(severity="info")]) is None


def test_the_deciding_number_shows_a_regression_where_no_accuracy_does(report: Any) -> None:
    floor = measure("flip-floor", 0.1, flips=1, questions=10)
    made = report(suite("logits", metrics=(floor,), decided_by="flip-floor"))
    assert headline(made) == "Do not merge: sage_attn is worse than the reference (reference's own flips 1 of 10)."


def test_a_pass_of_kernels_whose_names_are_not_known_says_that_their_execution_was_not_shown(report: Any) -> None:
    def said(*checks: Check) -> str:
        return headline(report(suite("layers", "pass"), checks=checks))

    executed = Requirement("kernel-executed")
    unknown = [executed.of(phase).check("not checked", state("kernels-not-named")) for phase in ("extend", "decode")]
    end = "; it is not shown that its own kernels ran in {}, because their names are not known."
    assert said(*unknown).endswith(end.format("extend and decode"))
    assert said(unknown[0], executed.of("decode").check("ok", state("fine"))).endswith(end.format("extend"))
    assert "not shown" not in said(executed.of("extend").check("ok", state("fine")))


def test_a_partial_run_says_so_whatever_its_verdict(report: Any) -> None:
    left_out = ("accuracy", "greedy")
    for verdict in ("pass", "regression", "inconclusive"):
        assert headline(report(suite("layers", verdict), left_out=left_out)).startswith("Partial run: ")
    passed = headline(report(suite("layers", "pass"), left_out=left_out))
    done = "Partial run: sage_attn passes layers, on the model model"
    assert passed == f"{done}; the reference computes decode; accuracy and greedy were left out."


@pytest.mark.parametrize(
    ("questions", "claimed", "served", "said"),
    [
        (
            260,
            ("extend",),
            128,
            "260 synthetic questions, extend at 10 of 1 to 128 tokens in batches of 1 to 3 and 9; the reference computes decode",
        ),
        (
            0,
            ("extend", "decode"),
            64,
            "extend at 10 of 1 to 128 tokens in batches of 1 to 3 and 9 (6 of 1 to 64 served), decode at 10 of 1 to 128 tokens in "
            "batches of 1 to 3 and 9 (6 of 1 to 64 served)",
        ),
        (
            0,
            ("extend",),
            0,
            "extend at 10 of 1 to 128 tokens in batches of 1 to 3 and 9 (none served); the reference computes decode",
        ),
    ],
)
def test_a_pass_says_what_it_covers(report: Any, questions: int, claimed: tuple[str, ...], served: int, said: str) -> None:
    """It said "up to 2,048 tokens" where a few lengths had been met."""
    met = (1, 2, 30, 40, 63, 64, 65, 99, 127, 128)
    compared, own = (
        {phase: {"total-tokens": ranges_of(n for n in met if n <= most), "batch": ((1, 3), (9, 9))} for phase in claimed}
        for most in (128, served)
    )
    limits = EngineLimits(context_tokens=4096)
    covered = EnvelopeResult(policy="p", claimed=(), limits=limits, compared=compared, reached={}, served=own, rows=())
    tallies = tuple(each.model_copy(update={"right": 0, "wrong": questions, "total": questions}) for each in TALLIES)
    made = report(suite(verdict="pass", tallies=tallies if questions else ()), envelope=covered)
    served_by = made.candidate.model_copy(update={"claimed_phases": claimed})
    made = made.model_copy(
        update={"candidate": served_by, "environment": made.environment.model_copy(update={"model": "/models/tiny"})}
    )
    assert headline(made) == f"sage_attn is no worse than the reference, within the stated margins, on the tiny model: {said}."
