"""Sentences about both roles' distributions over the same tokens: how far apart they are, and against which limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.harness.judge.judgement import Metric
from assay.harness.statement import Statement
from assay.harness.text import counted, in_units, listed, percent
from assay.reports.wording.say import Found, Measured, Templates, say, says


def _nats(value: float | None) -> str:
    """Format with as many digits as the ends of an interval have in reports: fewer can lie outside it."""
    return "an unknown number of nats" if value is None else in_units(f"{value:.3g}", "nat")


@says
def _not_cached_as_required(
    condition: str, left_out: int, sequences: int, required: int, cached: list[tuple[str, int, int]]
) -> str:
    which = "logits" if left_out == sequences else f"logits of {left_out} of {sequences} sequences"
    wanted = f"at {'most' if condition == 'cold' else 'least'} {required}"
    had = " and ".join(f"the {role} had {least} to {most}" for role, least, most in cached)
    return f"{which}, {condition}: {wanted} cached tokens were required; {had}"


_Places = list[tuple[int, int, str]]


@says
def _reference_not_finite(places: _Places) -> str:
    return (
        f"The reference's own log-probabilities are not finite at {_at(places)}, so nothing can be compared with them."
    )


@says
def _candidate_not_finite(places: _Places) -> str:
    return f"The candidate's log-probabilities are not finite at {_at(places)}; the reference's are."


def _at(places: _Places) -> str:
    return " and ".join(f"{count:,} of {positions:,} positions, {condition}" for count, positions, condition in places)


@says
def _too_few_scored(prompts: int, least: int, not_observed: list[Statement]) -> str:
    unmet = f" Not observed: {'; '.join(map(say, not_observed))}." if not_observed else ""
    return f"{prompts} prompts were scored both cold and cached; at least {least} are needed for a verdict.{unmet}"


@says
def _prompts_far(worst: float, **far: Any) -> str:
    return f"{_far(**far)}; the worst has {_nats(worst)}."


@says
def _prompts_too_far(share: float, p: float, **far: Any) -> str:
    return f"{_far(**far)}, above the limit of {percent(share)}; p = {p:.2g}."


def _far(condition: str, count: int, prompts: int, times: float) -> str:
    are = "is" if count == 1 else "are"
    return f"Scored {condition}, {count} of {counted(prompts, 'prompt')} {are} more than {times:g} limits away from the reference"


@says
def _logits_beyond(p: float, **mean: Any) -> str:
    return f"{_found(**mean)}, above {_limit(**mean)}; p = {p:.2g}."


@says
def _logits_within(**mean: Any) -> str:
    return f"{_found(**mean)}, within {_limit(**mean)}."


@says
def _logits_undecided(**mean: Any) -> str:
    return (
        f"{_found(**mean)}: neither shown to be within {_limit(**mean)} nor above it; more prompts (logits_prompts) may resolve "
        "this."
    )


def _found(
    quantity: str, condition: str, value: float, high: float | None, level: float, prompts: int, **_: Any
) -> str:
    mean = f"mean KL is {_nats(value)}" if quantity == "mean-kl" else f"{_CHANGE} is {value:+.3g} nats"
    size = f"at most {_nats(high)} in size with {percent(level)} confidence, {counted(prompts, 'prompt')}"
    return f"Scored {condition}, the {mean} ({size})"


def _limit(quantity: str, bound: float, policy: str, limit: Statement, **_: Any) -> str:
    source = say(limit) if quantity == "mean-kl" else _of_change(limit)
    return f"the limit of {_nats(bound)} ({policy or source})"


_CHANGE = "mean change of the log-likelihood"


def _of_change(limit: Statement) -> str:
    return f"in either direction; the bound is the root of twice that of the KL: {say(limit)}"


@says
def _mean_kl(metric: Metric, limit: Statement) -> Measured:
    return Measured(f"mean KL, {metric.part}", _nats(metric.value), say(limit))


@says
def _likelihood_change(metric: Metric, change: float, limit: Statement) -> Measured:
    explain = f"In{_of_change(limit)[2:]}"
    return Measured(f"{_CHANGE}, {metric.part}", f"{change:+.3g} nats", explain)


@says
def _far_prompts(metric: Metric, count: int, prompts: int, times: float, worst: float | None, limit: float) -> Measured:
    most = "" if worst is None else f"; the worst has {_nats(worst)}"
    explain = f"A mean KL of the prompt above {times:g} times the limit of {_nats(limit)}{most}"
    return Measured(f"prompts far beyond the limit, {metric.part}", f"{count} of {counted(prompts, 'prompt')}", explain)


@says
def _kl_limit(source: str, noise: list[str], factor: float, floor: float | None, prompts: int) -> str:
    of = {"policy": "", "noise": f"{explained_by(noise)}; ", "floor": f"{factor:g} times the floor, "}[source]
    measured = "not measured" if floor is None else f"{floor:.2g} nats over {counted(prompts, 'prompt')}"
    return f"{of}the reference against itself: {measured}"


def explained_by(noise: list[str]) -> str:
    """Name the noise that explains a limit: the declared noise of both roles, or rounding."""
    return f"declared noise {' and '.join(noise)}" if noise else "rounding, since no other noise is declared"


@says
def _witness(
    witness: str, near: str, off: list[tuple[str, float]], tokens: int, where: Sequence[tuple[str, str]] = ()
) -> str:
    said = _agrees(witness, near, off, f"on {tokens:,} tokens, cold and cached")
    parts = [f"the {role} parts from it {f'in {at}' if at else 'in no layer'}" for role, at in where]
    return f"{said}{f' On the traced sequence, {listed(parts)}.' if parts else ''}"


def _agrees(witness: str, near: str, off: list[tuple[str, float]], between: str) -> str:
    if near not in dict(off):
        return f"{witness} in float32 agrees with {'both sides' if near else 'neither side'} {between}: {_off(off)}."
    other = [(role, value) for role, value in off if role != near]
    return f"{witness} in float32 agrees with the {near}, within {_nats(dict(off)[near])} {between}; {_off(other)}."


def _off(off: list[tuple[str, float]]) -> str:
    return ", ".join(f"the {role} is up to {_nats(value)} off" for role, value in off)


@says
def _no_witness(witness: str, wrong: list[str]) -> str:
    return f"{witness} is not a witness here, because it contradicts the model's folder: {wrong[0]}."


SENTENCES: Templates = {
    "heavy-tail": "Scored {condition}, the prompts' KLs have a heavy tail: the logarithms of the larger half "
    "have a standard deviation of {spread:.2g}, more than {most:g}.",
    "mean-not-shown": "So the prompts asked do not show that the mean is within the limit.",
    "bug-unseen": "A bug in less than {share:percent} of prompts may have met none of them.",
    "not-finite": Measured(
        "positions that are not finite",
        "{metric.value:,.0f}",
        "In the candidate only, of {positions:,} positions",
    ),
    "nothing-scored": Found(
        "nothing was scored",
        "{url:if let assay start both servers, without a URL, or leave logits out of --suites|"
        "see the servers' logs, and run again}",
    ),
}
