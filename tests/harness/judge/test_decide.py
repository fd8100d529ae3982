"""The verdict: suites and checks together, and the headline that says it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from assay.harness.errors import EngineError
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.build import _scope_of, _shown_by
from assay.harness.judge.decide import SuiteVerdict, decide, holm_corrected
from assay.harness.judge.report import EnvelopeResult, Metric, SuiteResult
from assay.harness.verdict import OPERATOR, UNEXPLAINED, Check, Finding, Verdict, cause_of

VERDICTS: tuple[Verdict, ...] = ("pass", "regression", "inconclusive")
OK = Check(id="c", title="C", status="ok", found="f")


def suite_verdict(verdict: Verdict, id_: str = "s") -> SuiteVerdict:
    return SuiteVerdict(id=id_, title="S", verdict=verdict, why="why")


PASS = suite_verdict("pass")


def verdict(suites: list[Verdict], *statuses: str, failure: FailureResult | None = None) -> tuple[str, int]:
    checks = [Check(id="c", title="C", status=status, found="f") for status in statuses]  # type: ignore[arg-type]
    judged = decide("mine", [suite_verdict(v) for v in suites], checks, failure)
    assert judged.reasons
    return judged.verdict, int(judged.exit_code)


def test_a_pass_needs_every_suite_and_every_check() -> None:
    assert verdict(["pass", "pass"], "ok", "not checked") == ("pass", 0)
    assert verdict(["pass", "inconclusive"], "ok") == ("inconclusive", 3)
    assert verdict(["pass"], "ok", "missing") == ("inconclusive", 3)
    assert verdict(["pass"], "ok", "failed") == ("inconclusive", 3)
    assert verdict([], "ok") == ("inconclusive", 3)


def test_it_is_a_regression_unless_something_else_differed() -> None:
    assert verdict(["regression", "inconclusive"], "ok") == ("regression", 1)
    assert verdict(["regression"], "missing") == ("regression", 1)
    assert verdict(["regression"], "failed") == ("inconclusive", 3)


def test_a_failed_engine_is_an_error_even_with_measurements() -> None:
    died = FailureResult.of("engine", EngineError("died"))
    assert verdict(["pass"], "ok", failure=died) == ("error", 3)
    assert verdict(["regression"], "ok", failure=died) == ("error", 3)


def test_a_partial_run_says_so_whatever_its_verdict() -> None:
    left_out = ["accuracy", "greedy"]
    headlines = [decide("mine", [suite_verdict(v)], [OK], left_out=left_out).headline for v in VERDICTS]
    assert headlines[0] == "Partial run: mine passes s; accuracy and greedy were left out."
    assert all(headline.startswith("Partial run: ") for headline in headlines)
    assert not any(decide("mine", [suite_verdict(v)], [OK]).headline.startswith("Partial") for v in VERDICTS)
    assert "no worse" in decide("mine", [PASS], [OK]).headline


def with_p(verdict: Verdict, p: float | None) -> SuiteVerdict:
    return suite_verdict(verdict).model_copy(update={"p_regression": p})


def test_one_of_several_suites_must_regress_beyond_chance() -> None:
    suites = [with_p("regression", 0.03), with_p("pass", 0.6), with_p("pass", None), with_p("pass", 0.9)]
    corrected = holm_corrected(suites, 0.05)
    assert [one.verdict for one in corrected] == ["inconclusive", "pass", "pass", "pass"]
    assert "p = 0.12" in corrected[0].why
    assert holm_corrected(suites[:1], 0.05) == suites[:1]
    assert holm_corrected([with_p("regression", 0.01), *suites[1:]], 0.05)[0].verdict == "regression"


def test_what_is_certain_stays_a_regression_among_many_suites() -> None:
    suites = [with_p("regression", None), *(with_p("pass", 0.5) for _ in range(9))]
    assert holm_corrected(suites, 0.05)[0].verdict == "regression"


DOES = "applies a top-left causal mask once a prefix is cached"
SENTENCE = 'Computes "causal mask top-left" in extend with a cached prefix (all layers).'


def found(**more: Any) -> Finding:
    values = {
        "id": "mask-top-left", "title": "causal mask top-left", "severity": "serious", "where": "extend", "diagnosis": SENTENCE,
        "does": DOES, "evidence": (), "reproduce": "again",
    }  # fmt: skip
    return Finding.model_validate(values | more)


def suite(id_: str = "accuracy", verdict: str = "regression", **more: Any) -> SuiteResult:
    values = {"id": id_, "title": "Questions", "verdict": verdict, "why": "It lost.", "synthetic": False}
    return SuiteResult.model_validate(values | more)


def test_the_headline_carries_the_cause_and_what_it_costs() -> None:
    suites = [suite(), suite("greedy"), suite("logits")]
    judged = decide("mine", suites, [], cause=found(), shown="accuracy 1.000 -> 0.219")
    assert judged.headline == f"Do not merge: mine {DOES} (accuracy 1.000 -> 0.219)."
    assert judged.reasons[0] == SENTENCE
    assert len(judged.reasons) == 4


@pytest.mark.parametrize(
    ("id_", "cause", "end"),
    [
        ("accuracy", found(does="", title="state kept between calls"), "worse than the reference: state kept between calls"),
        ("latency", None, "slower than the reference"),
        ("baseline", None, "worse than its accepted baseline"),
    ],
)
def test_the_headline_says_what_a_candidate_without_such_words_is_worse_than(id_: str, cause: Finding | None, end: str) -> None:
    assert decide("mine", [suite(id_)], [], cause=cause).headline == f"Do not merge: mine is {end}."


def test_a_bug_without_a_name_is_said_as_it_was_read() -> None:
    odd = found(id=UNEXPLAINED, does="computes something other than attention", operator="query i sees key p + 2")
    for id_ in (UNEXPLAINED, OPERATOR):
        cause = cause_of([found(severity="info"), odd.model_copy(update={"id": id_})])
        assert cause is not None
        assert cause.does == "computes something other than attention: query i sees key p + 2"
    assert cause_of([found(severity="info")]) is None


def test_accuracies_show_a_regression_before_other_numbers(examples: ModuleType) -> None:
    assert _shown_by(examples.regression().suites) == "accuracy 0.977 -> 0.121"
    kl = Metric(id="kl", title="mean KL, cached", value=16.6, text="16.6 nats", bound=0.1)
    assert _shown_by([suite("logits", metrics=(kl,), decided_by="kl")]) == "mean KL, cached 16.6 nats"
    assert _shown_by([suite(verdict="pass")]) == ""


@pytest.mark.parametrize(
    ("questions", "claimed", "served", "said"),
    [
        (260, ["extend"], 2048, "on the tiny model: 260 synthetic questions, up to 2,048 tokens; decode is the reference's"),
        (0, ["extend", "decode"], 2048, "on the tiny model: up to 2,048 tokens"),
        (0, ["extend", "decode"], 158, "on the tiny model: up to 2,048 tokens (158 of them served)"),
        (0, ["extend", "decode"], 0, "on the tiny model: up to 2,048 tokens (none of them served)"),
    ],
)
def test_a_pass_says_what_it_covers(questions: int, claimed: list[str], served: int, said: str) -> None:
    reached, own = ({phase: {"total-tokens": tokens, "batch": 8} for phase in claimed} for tokens in (2048, served))
    limits = EngineLimits(context_tokens=4096)
    covered = EnvelopeResult(policy="p", claimed=(), limits=limits, compared={}, reached=reached, served_reached=own, rows=())
    scope = _scope_of("/models/tiny", questions, True, covered, claimed)
    assert scope == said
    passed = decide("mine", [suite(verdict="pass")], [], scope=scope)
    assert passed.headline == f"mine is no worse than the reference, within the stated margins, {said}."
