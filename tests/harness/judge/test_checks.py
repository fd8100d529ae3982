from __future__ import annotations

import pytest

from assay.harness.config import RunSpec
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.manifest import Failure, ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.judge import checks as rules
from assay.harness.judge.decide import BASELINE, SuiteVerdict, decide, holm_corrected
from assay.harness.sides import ROLES, Role, Side
from assay.harness.verdict import Check, Verdict

VERDICTS: tuple[Verdict, ...] = ("pass", "regression", "inconclusive")


def count(backend: str, phase: str = "extend", layers: int = 4, delegated_by: str = "", calls: int = 5) -> CallCount:
    return CallCount(
        backend=backend,
        kernel=f"{backend} kernel",
        phase=phase,
        cached_prefix=True,
        delegated_by=delegated_by,
        calls_by_layer=dict.fromkeys(range(layers), calls),
    )


def server(backend: str = "mine", phases: tuple[str, ...] = ("extend",), role: str = "candidate") -> ServerManifest:
    return ServerManifest(role=role, backend=backend, engine="e", claimed_phases=phases, arguments={"dtype": "float32"})


def answer(cached: int | None) -> Answer:
    return Answer(
        suite="mmlu", role="candidate", item="i", prompt_hash="h", text="", finish_reason="stop", prompt_tokens=100,
        completion_tokens=5, cached_tokens=cached, latency_s=1.0,
    )  # fmt: skip


REFERENCE = [count("triton"), count("triton", "decode")]
OK = Check(id="c", title="C", status="ok", found="f")


def suite_verdict(verdict: Verdict, id_: str = "s") -> SuiteVerdict:
    return SuiteVerdict(id=id_, title="S", verdict=verdict, why="why")


PASS = suite_verdict("pass")
SPEC = RunSpec.of(reference="triton", candidate="mine")


def statuses(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


def test_a_weaker_policy_is_named() -> None:
    assert rules.check_policy(()).status == "ok"
    assert rules.only_declared({}, {"reference": "int8_qk", "candidate": ""}) == []
    assert rules.only_declared({"int8_qk": 0.1}, {"candidate": "int8_qk"}) == []
    assert rules.only_declared({"exact": 0.1}, {"candidate": "int8_qk"}) == [
        "noise = int8_qk (declared by the kernel alone)"
    ]
    check = rules.check_policy(("margin = 0.1 (assay.toml, [policy])", "alpha = 0.2 (--alpha)"))
    assert (check.status, check.found) == ("not checked", "margin = 0.1 (assay.toml, [policy]); alpha = 0.2 (--alpha)")


def test_own_kernel_in_every_layer_is_ok() -> None:
    counts = [count("mine"), count("triton", "decode", delegated_by="mine")]
    (check,) = rules.check_kernel_ran(server(), counts, REFERENCE)
    assert (check.status, check.found) == ("ok", "mine kernel 20 calls in 4 layers")


def test_a_kernel_that_was_never_called_is_missing() -> None:
    assert statuses(rules.check_kernel_ran(server(), [], REFERENCE)) == ["missing"]


def test_a_fallback_next_to_the_kernel_fails() -> None:
    (check,) = rules.check_kernel_ran(server(), [count("mine"), count("triton", calls=1)], REFERENCE)
    assert check.status == "failed"
    assert "also triton kernel 4 calls" in check.found


def test_delegating_a_claimed_phase_is_no_own_kernel() -> None:
    both = server(phases=("extend", "decode"))
    counts = [count("mine"), count("triton", "decode", delegated_by="mine")]
    assert statuses(rules.check_kernel_ran(both, counts, REFERENCE)) == ["ok", "missing"]


def test_a_layer_without_the_kernel_fails() -> None:
    (check,) = rules.check_kernel_ran(server(), [count("mine", layers=3)], REFERENCE)
    assert (check.status, "not in [3]" in check.found) == ("failed", True)


def test_a_server_that_assay_did_not_start_proves_nothing() -> None:
    assert statuses(rules.check_kernel_ran(server("http://x", ()), [], [])) == ["missing"]
    assert statuses(rules.check_kernel_ran(None, [], [])) == ["missing"]


def test_same_servers() -> None:
    pair: dict[Role, ServerManifest] = {"reference": server("triton", role="reference"), "candidate": server()}
    assert rules.check_same_servers(SPEC, pair, {}).status == "ok"
    differing = rules.check_same_servers(SPEC, pair, {"dtype": ("float32", "bfloat16")})
    assert (differing.status, differing.found) == ("failed", "dtype: float32 against bfloat16")
    assert rules.check_same_servers(SPEC, pair | {"candidate": server("http://x", ())}, {}).status == "missing"
    assert rules.check_same_servers(SPEC, {}, {}).status == "missing"


def test_a_flag_that_was_asked_to_differ_must_differ_in_the_servers() -> None:
    sides = (Side(backend="triton", flags=flags) for flags in ((), ("--page-size=16",)))
    spec = RunSpec(**dict(zip(ROLES, sides, strict=True)))
    same = {role: server("triton", role=role).model_copy(update={"arguments": {"page_size": 1}}) for role in ROLES}
    check = rules.check_same_servers(spec, same, {})
    assert (check.status, check.found) == (
        "failed",
        "both servers report the same --page-size, which was asked to differ",
    )
    other = same["candidate"].model_copy(update={"arguments": {"page_size": 16}})
    assert rules.check_same_servers(spec, same | {"candidate": other}, {}).status == "ok"


def decode_calls(calls: int, compiled: bool) -> CallCount:
    return CallCount(
        backend="triton",
        kernel="triton",
        phase="decode",
        cached_prefix=True,
        compiled=compiled,
        calls_by_layer={0: calls},
    )


def test_compiled_only_where_it_was_asked_for() -> None:
    counts: dict[Role, list[CallCount]] = {role: [decode_calls(9, False)] for role in ROLES}
    plain = {role: server("triton", role=role) for role in ROLES}
    assert rules.check_compiled(plain, counts) == []
    asked = {role: one.model_copy(update={"arguments": {"enable_torch_compile": True}}) for role, one in plain.items()}
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing"
    counts["reference"].append(decode_calls(10, True))
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing", "the candidate's were not compiled"
    counts["candidate"].append(decode_calls(9, True))
    (check,) = rules.check_compiled(asked, counts)
    assert check.status == "missing", "half of the candidate's were not: as many as capturing alone may leave"
    counts["candidate"].append(decode_calls(82, True))
    (check,) = rules.check_compiled(asked, counts)
    assert (check.status, check.found) == (
        "ok",
        "10 of 19 decode calls of the reference, 91 of 100 decode calls of the candidate; more than 50 % of each are needed",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cached", "status"),
    [
        ([54] * 10, "ok"),
        ([1] * 4 + [16] * 4, "ok"),
        ([1] * 5 + [54] * 4, "missing"),
        ([15] * 10, "missing"),
        ([1] * 10, "missing"),
        ([None] * 10, "missing"),
        ([], "missing"),
    ],
)
def test_cached_prefix(cached: list[int | None], status: str) -> None:
    assert rules.check_cached_prefix([answer(tokens) for tokens in cached]).status == status


def test_all_answered() -> None:
    assert rules.check_all_answered(8, 8, ()).status == "ok"
    assert rules.check_all_answered(8, 7, ()).status == "missing"
    assert rules.check_all_answered(0, 0, ()).status == "missing"
    other = rules.check_all_answered(8, 7, ("mmlu-3",))
    assert (other.status, other.found) == ("missing", "7 of 8; answers to another prompt: 1, the first to mmlu-3")
    assert "--out" in other.settles


def verdict(suites: list[Verdict], *statuses: str, failure: Failure | None = None) -> tuple[str, int]:
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
    died = Failure(kind="engine", message="died")
    assert verdict(["pass"], "ok", failure=died) == ("error", 3)
    assert verdict(["regression"], "ok", failure=died) == ("error", 3)


def test_worse_than_the_accepted_baseline_is_not_worse_than_the_reference() -> None:
    baseline = suite_verdict("regression", BASELINE)
    other = suite_verdict("regression")
    assert decide("mine", [PASS, baseline], [OK], None).headline.endswith("worse than its accepted baseline.")
    assert decide("mine", [other, baseline], [OK], None).headline.endswith("worse than the reference.")


def test_a_partial_run_says_so_whatever_its_verdict() -> None:
    assert rules.check_accuracy_tested(["mmlu", "layers"]) == []
    left_out = ["mmlu", "greedy"]
    headlines = [decide("mine", [suite_verdict(v)], [OK], left_out=left_out).headline for v in VERDICTS]
    assert headlines[0] == "Partial run: mine passes s; mmlu and greedy were left out."
    assert all(headline.startswith("Partial run: ") for headline in headlines)
    assert not any(decide("mine", [suite_verdict(v)], [OK]).headline.startswith("Partial") for v in VERDICTS)
    assert "no worse" in decide("mine", [PASS], [OK]).headline


def test_a_pass_says_what_it_covers() -> None:
    assert "covers up to 512 tokens" in " ".join(decide("mine", [PASS], [OK], covers="up to 512 tokens").reasons)


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
