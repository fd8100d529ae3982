"""The verdict: suites and checks together."""

from __future__ import annotations

from assay.harness.errors import EngineError
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.decide import decide, holm_corrected
from assay.harness.judge.judgement import SuiteVerdict
from assay.harness.statement import state
from assay.harness.verdict import CheckStatus, Requirement, Verdict


def suite_verdict(verdict: Verdict, id_: str = "s") -> SuiteVerdict:
    return SuiteVerdict(id=id_, verdict=verdict, why=(state("why"),))


def verdict(suites: list[Verdict], *statuses: CheckStatus, failure: FailureResult | None = None) -> str:
    checks = [Requirement("c").check(status, state("found")) for status in statuses]
    return decide(suites, checks, failure)


def test_a_pass_needs_every_suite_and_every_check() -> None:
    assert verdict(["pass", "pass"], "ok", "not checked") == "pass"
    assert verdict(["pass", "inconclusive"], "ok") == "inconclusive"
    assert verdict(["pass"], "ok", "missing") == "inconclusive"
    assert verdict(["pass"], "ok", "failed") == "inconclusive"
    assert verdict([], "ok") == "inconclusive"


def test_it_is_a_regression_unless_something_else_differed() -> None:
    assert verdict(["regression", "inconclusive"], "ok") == "regression"
    assert verdict(["regression"], "missing") == "regression"
    assert verdict(["regression"], "failed") == "inconclusive"


def test_a_failed_engine_is_an_error_even_with_measurements() -> None:
    died = FailureResult.of("engine", EngineError("died"))
    assert verdict(["pass"], "ok", failure=died) == "error"
    assert verdict(["regression"], "ok", failure=died) == "error"


def with_p(verdict: Verdict, p: float | None) -> SuiteVerdict:
    return suite_verdict(verdict).model_copy(update={"p_regression": p})


def test_one_of_several_suites_must_regress_beyond_chance() -> None:
    suites = [with_p("regression", 0.03), with_p("pass", 0.6), with_p("pass", None), with_p("pass", 0.9)]
    corrected = holm_corrected(suites, 0.05)
    assert [one.verdict for one in corrected] == ["inconclusive", "pass", "pass", "pass"]
    assert corrected[0].why[-1] == state("not-below-alpha", suites=4, p=0.12, alpha=0.05)
    assert holm_corrected(suites[:1], 0.05) == suites[:1]
    assert holm_corrected([with_p("regression", 0.01), *suites[1:]], 0.05)[0].verdict == "regression"


def test_what_is_certain_stays_a_regression_among_many_suites() -> None:
    suites = [with_p("regression", None), *(with_p("pass", 0.5) for _ in range(9))]
    assert holm_corrected(suites, 0.05)[0].verdict == "regression"
