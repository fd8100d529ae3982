"""The words of a bench: why a ratio has its verdict, and what overrules the ratios."""

from __future__ import annotations

from types import ModuleType

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.statement import Statement, state
from assay.harness.verdict import Requirement
from assay.reports.summary import latency_lines
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, say
from assay.reports.wording.verdict import headline, reasons


def ratio(reason: str, low: float = 1.25, high: float = 1.35) -> Statement:
    return state(
        "time-ratio", reason=reason, ratio=1.3, low=low, high=high, level=0.95, ratios=18, floor=1.2, floor_low=1.1, floor_high=1.4,
        floor_ratios=5, least=6, bound=1.1, p=0.0712, mean=1.38,
    )  # fmt: skip


MEASURED = "1.300 (1.250 to 1.350 with 95 % confidence)"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("below", f"{MEASURED}: below the bound of 1.1; 1.380 on average."),
        ("above", f"{MEASURED}: above the bound of 1.1."),
        (
            "too noisy",
            f"{MEASURED}: above the bound of 1.1, but the reference against itself measures 1.200 (1.100 to 1.400): too noisy to "
            "call. To resolve: a quieter machine or more rounds.",
        ),
        (
            "not significant",
            f"{MEASURED}: above the bound of 1.1, but not significant among all ratios (p = 0.071); to resolve: more rounds (18 "
            "ratios were measured).",
        ),
        (
            "mean not clear",
            f"{MEASURED}: below the bound of 1.1, but 1.380 on average, above it (permutation of blocks, p = 0.071): some requests "
            "are slow by far, or chance; to resolve: more rounds (18 ratios were measured).",
        ),
        ("not clear", f"{MEASURED}: not clear of the bound of 1.1; to resolve: more rounds (18 ratios were measured)."),
        ("too few", "Too few ratios: 18, and 5 of the reference against itself; 6 of each are needed."),
    ],
)
def test_a_ratio_says_why_it_has_its_verdict(reason: str, said: str) -> None:
    assert say(ratio(reason)) == said
    assert say(state("of-time", time="itl", load="short, 4 in flight", why=ratio(reason))) == (
        f"Inter-token latency, short, 4 in flight: {said}"
    )


def test_a_check_that_overrules_the_ratios_is_said_with_what_resolves_it() -> None:
    check = Requirement("device-kernels").check("failed", state("interpreted", kernels=["mine"]))
    overruled = state("overruled", **check.model_dump())
    assert say(Statement.model_validate_json(overruled.model_dump_json())) == (
        "kernels were interpreted and did not run on a device: mine: interpreted, so the time measured is the interpreter's. To "
        "resolve: time it on a GPU, where Triton compiles it."
    )


@pytest.mark.parametrize(
    ("faster", "said"),
    [
        (True, "No speed-up: wrong answers (Questions of gsm8k, Logits)."),
        (False, "Wrong answers (Questions of gsm8k, Logits): the times prove nothing."),
    ],
)
def test_times_of_wrong_answers_are_no_pass_and_say_so_first(examples: ModuleType, faster: bool, said: str) -> None:
    timed: LatencyResult = examples.latency()
    note = state("no-gain", faster=faster, wrong=[("accuracy", "gsm8k"), ("logits", "")])
    result = timed.model_copy(update={"verdict": "inconclusive", "note": note})
    assert headline(result) == latency_lines(result)[0] == said
    assert not any(said in reason for reason in reasons(result))
    metric = measure("worst-time-ratio", 0.5, time="e2e", load="short, 1 in flight", ratios=24, note=note)
    assert measured_of(metric) == (
        "worst ratio of times",
        "0.500 times",
        f"{said} Candidate over reference: end-to-end latency, short, 1 in flight; the worst of 24 ratios",
    )


def test_too_few_ratios_leave_the_interval_open() -> None:
    metric = measure("reference-over-itself", 1.0123)
    assert measured_of(metric)[1:] == ("1.012 times", "The floor of that ratio: 1.012 (too few ratios)")
    assert say(state("reference-against-itself", ratio=None, low=None, high=None)).endswith(": not measured")


def test_a_cache_that_is_not_reported_is_said_of_its_role() -> None:
    check = Requirement("shared-prefix").check("missing", state("prompt-tokens-cached", reference=0.8, candidate=None))
    assert said_check(check).found == "reference 80 %, candidate not reported of the prompt tokens were cached"


def test_chunks_are_said_beside_the_prompt() -> None:
    sizes = [("reference", "128"), ("candidate", "None")]
    check = Requirement("chunked").check("missing", state("chunks", prompt=512, sizes=sizes))
    assert said_check(check).found == "512 tokens; chunks of 128 (reference), None (candidate)"
