"""Sentences about the probes of a run: what both servers computed for the same tokens, and under which conditions."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.judge.judgement import Metric
from assay.harness.statement import Statement
from assay.harness.text import listed
from assay.reports.wording.logits import explained_by
from assay.reports.wording.say import Found, Measured, Templates, say, says

_CONDITIONS = {
    "cold": "cold", "cached": "after a cached prefix", "batched": "in a batch", "continued": "in a batch, after an earlier turn",
}  # fmt: skip


def _also(condition: str, conditions: list[str]) -> str:
    """Say under which other conditions the servers differ, or that they differ under this one alone."""
    others = [_CONDITIONS[each] for each in conditions if each != condition]
    return f"; also {listed(others)}" if others else "; not otherwise"


@says
def _probes_differ(
    condition: str, measure: str, mean: float, bound: float, worst: float, probe: str, token: int, written: bool, prompt: int,
    conditions: list[str], why: Sequence[Statement] = (),
) -> str:  # fmt: skip
    at = f"generated token {token}" if written else f"prompt token {token:,} of {prompt:,}"
    what = f"{measure.capitalize()} {_CONDITIONS[condition]}"
    size = f"mean KL {mean:.2g} nats, at worst {worst:.2g}, and up to {bound:.2g} is noise"
    first = f"first at {at} of probe {probe}{_also(condition, conditions)}"
    return f"{what} differs: {'; '.join([size, first, *map(say, why)])}."


@says
def _probes_differ_otherwise(condition: str, conditions: list[str], why: list[Statement]) -> str:
    return f"The probes' answers {_CONDITIONS[condition]} differ: {'; '.join(map(say, why))}{_also(condition, conditions)}."


@says
def _probes_undecided(parts: list[tuple[str, list[Statement]]]) -> str:
    return f"Undecided: {'; '.join(f'{_CONDITIONS[name]}: {listed([*map(say, why)])}' for name, why in parts)}."


@says
def _probes_unmet(parts: list[tuple[str, str]]) -> str:
    return f"Not met: {'; '.join(f'{_CONDITIONS[name]}: {why}' for name, why in dict.fromkeys(map(tuple, parts)))}."


@says
def _probes_within(bound: float, noise: list[str]) -> str:
    return f"Every probe is within {bound:.2g} nats of mean KL ({explained_by(noise)})."


@says
def _probes_covered(
    probes: int, shortest: int, longest: int, depth: int, cached: str, batched: str, chunks: str
) -> Found:
    how = "cold, after a cached prefix, in a batch, and after an earlier turn"
    met = "; ".join(filter(None, [cached, batched, chunks or "no prompt was split into chunks"]))
    lengths = f"{probes} probes of {shortest:,} to {longest:,} tokens, in prefill and up to {depth} steps of decode"
    return Found(f"{lengths}, {how}: {met}.")


@says
def _probe_kl(metric: Metric, condition: str, measure: str, worst: float, positions: int) -> Measured:
    explain = f"Over {positions:,} positions; the worst has {worst:.2g}"
    return Measured(f"{measure}, {_CONDITIONS[condition]}", f"{metric.value:.2g} nats", explain)


SENTENCES: Templates = {
    "rounding-not-measured": "What {declared} may cost is not known, since {said}; logits_limit in the policy may bound it.",
    "probes-not-asked": Found(
        "not every condition was asked{said:if : {said}|}", "let assay start both servers, and see their logs"
    ),
}
