"""Sentences of a gate: its policy, and its earlier runs."""

from __future__ import annotations

from assay.harness.text import counted
from assay.reports.wording.say import Found, Templates, says


@says
def _policy_weakened(lines: list[str], declared: str) -> Found:
    noise = [f"noise = {declared} (declared, and not in the policy)"] if declared else []
    return Found(
        "; ".join([*lines, *noise]),
        "leave lines of policy out for a verdict by the defaults; to accept a kernel's noise, name it in [policy.bounds]",
    )


@says
def _ran_before(runs: int, verdicts: list[tuple[str, int]], last: str) -> Found:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts)
    return Found(
        f"{counted(runs, 'earlier run')} of the same comparison: {counts}; the last is {last}",
        "judge by all runs of this comparison: assay runs lists them",
    )


SENTENCES: Templates = {
    "policy-strict": "margins, error rates and compared lengths are the defaults, or stricter",
    "suite-required": Found(
        "{ran:if it ran|it did not run}; {line}",
        "add {suite} to --suites, on servers that assay starts",
    ),
}
