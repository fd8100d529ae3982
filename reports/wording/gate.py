"""Sentences of a gate: the candidate against its accepted baseline, its policy, and its earlier runs."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.text import counted
from assay.reports.wording.accuracy import BY_BETTING
from assay.reports.wording.say import Found, Measured, Templates, says


def _differing(differs: list[tuple[str, str, str]]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} was {_short(was)}, now {_short(now)}" for name, was, now in differs)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:12] + "…")


def _accept_again(folder: str) -> str:
    return f"assay gate accept on a current run, and remove the stale baseline from {folder}"


def _unused(unused: list[str], damaged: Sequence[str]) -> str:
    lists = {"not used": unused, "not used, since damaged": damaged}
    return "".join(f"; {what}: {', '.join(names)}" for what, names in lists.items() if names)


@says
def _baseline_matches(name: str, unused: list[str], damaged: Sequence[str] = ()) -> Found:
    return Found(f"{name}{_unused(unused, damaged)}")


@says
def _baseline_stale(
    backend: str,
    differs: list[tuple[str, str, str]],
    served: list[str],
    folder: str,
    unused: list[str],
    damaged: Sequence[str] = (),  # missing in older reports
) -> Found:
    other = f"its server (A) did not serve what this one (B) does: {'; '.join(served)}"
    said = f"the baseline of {backend} is stale: {other if served else _differing(differs)}{_unused(unused, damaged)}"
    return Found(said, _accept_again(folder))


@says
def _no_baseline_accepted(backend: str, unused: list[str], damaged: Sequence[str] = ()) -> Found:
    return Found(f"none was accepted for {backend}{_unused(unused, damaged)}", "assay gate accept RUN")


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
    "against-accepted": "Against the accepted answers:",
    "non-inferior-anyway": "No loss beyond the margin is shown, and the candidate is non-inferior to the reference.",
    "nothing-in-common": "The run and the baseline have no measurement in common.",
    "policy-strict": "margins, error rates and compared lengths are the defaults, or stricter",
    "own-error-grew": "The error grew most at {where}: {accepted:percent} accepted, {now:percent} now, "
    "a factor {above:if above|within} the policy's {line}.",
    "own-error-growth": Measured("growth of the error", "{metric.value:times}", "Largest over layers and conditions"),
    "reference-stored": Found("{name}: its answers serve as the reference's; no reference server was started"),
    "loss-since-accepted": Measured(
        "loss of accuracy since it was accepted", "{metric.value:points}", f"Accepted minus now, {BY_BETTING}"
    ),
    "suite-required": Found(
        "{ran:if it ran|it did not run}; {line:or a gate requires {required:listed} (default)}",
        "add {suite} to --suites, on servers that assay starts",
    ),
}
