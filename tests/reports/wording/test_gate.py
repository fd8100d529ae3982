"""What a gate says of baselines, of its policy and of earlier runs."""

from __future__ import annotations

import pytest

from assay.harness.statement import Statement, state
from assay.harness.verdict import Requirement
from assay.reports.wording.requirements import said_check

ENGINE = [("engine", "SGLang 0 on cpu", "SGLang 1 on cpu")]
AGAIN = "assay gate accept on a current run, and remove the stale baseline from baselines"


@pytest.mark.parametrize(
    ("found", "said", "settles"),
    [
        (state("baseline-matches", name="mine-1", unused=["old-2"]), "mine-1; not used: old-2", ""),
        (
            state("baseline-stale", backend="mine", differs=ENGINE, served=[], folder="baselines", unused=["old-2"]),
            "the baseline of mine is stale: engine was 'SGLang 0 on cpu', now 'SGLang 1 on cpu'; not used: old-2",
            AGAIN,
        ),
        (
            state("baseline-stale", backend="mine", differs=[], served=["torch is 1 in A, 2 in B"], folder="baselines", unused=[]),
            "the baseline of mine is stale: its server (A) did not serve what this one (B) does: torch is 1 in A, 2 in B",
            AGAIN,
        ),
        (state("no-baseline-accepted", backend="mine", unused=[]), "none was accepted for mine", "assay gate accept RUN"),
        (
            state("reference-stored", name="triton-1", needed=True),
            "triton-1: its answers serve as the reference's; no reference server was started",
            "",
        ),
        (
            state("reference-not-stored", backend="triton", differs=[("model_hash", "a" * 64, "b")], folder="baselines"),
            "the baseline of triton is stale: model hash was 'aaaaaaaaaaaa…', now 'b'; the reference server was queried instead",
            AGAIN,
        ),
        (
            state("reference-not-stored", backend="triton", differs=[], folder="baselines"),
            "none was accepted for triton; the reference server was queried instead",
            AGAIN,
        ),
        (
            state("policy-weakened", lines=["margin = 0.1 (--margin)"], declared="int8_qk"),
            "margin = 0.1 (--margin); noise = int8_qk (declared by the kernel alone)",
            "leave lines of policy out for a verdict by the defaults; to accept a kernel's noise, name it in [policy.bounds]",
        ),
        (
            state("suite-required", suite="layers", ran=False, line="", required=["greedy", "layers"]),
            "it did not run; a gate requires greedy and layers (default)",
            "add layers to --suites, on servers that assay starts",
        ),
        (
            state("ran-before", runs=3, verdicts=[("regression", 2), ("pass", 1)], last="run-3"),
            "3 earlier runs beside this one: 2 regression, 1 pass; the last is run-3",
            "judge the treatment by all of its runs: assay runs lists them",
        ),
    ],
)  # fmt: skip
def test_what_a_check_found(found: Statement, said: str, settles: str) -> None:
    check = said_check(Requirement("policy").check("not checked", found))
    assert (check.found, check.settles) == (said, settles)
