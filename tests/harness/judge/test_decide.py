"""The verdict: suites and checks together."""

from __future__ import annotations

from assay.harness.errors import EngineError
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.decide import SuiteVerdict, decide, holm_corrected
from assay.harness.verdict import Check, Verdict

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
