"""The words of logits: how far both roles' distributions are apart, and against which limit."""

from __future__ import annotations

from typing import Any

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.statement import Statement, state
from assay.reports.wording.say import measured_of, say

NOISE = state("kl-limit", source="noise", noise=[], factor=5.0, floor=None, prompts=0)
FAR: dict[str, Any] = {"count": 1, "prompts": 64, "times": 20.0, "worst": 0.5}
ABOUT_NOISE = "rounding, since no other noise is declared; the reference against itself: not measured"


def mean(quantity: str, value: float, **changed: Any) -> dict[str, Any]:
    numbers = {
        "quantity": quantity, "condition": "cold", "value": value, "high": 0.002, "level": 0.95, "prompts": 64, "bound": 0.001,
        "policy": "", "limit": NOISE,
    }  # fmt: skip
    return numbers | changed


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            state("logits-beyond", p=0.001, **mean("mean-kl", 0.0015, policy="logits_limit = 0.001")),
            "Scored cold, the mean KL is 0.0015 nats (at most 0.002 nats in size with 95 % confidence, 64 prompts), above the "
            "limit of 0.001 nats (logits_limit = 0.001); p = 0.001.",
        ),
        (
            state("logits-undecided", **mean("likelihood-change", -0.5, high=None)),
            "Scored cold, the mean change of the log-likelihood is -0.5 nats (at most an unknown number of nats in size with 95 % "
            "confidence, 64 prompts): neither shown to be within the limit of 0.001 nats (in either direction; the bound is the "
            f"root of twice that of the KL: {ABOUT_NOISE}) nor above it; more prompts (--logits-prompts) may resolve this.",
        ),
        (
            state("prompts-far", condition="cold", **FAR),
            "Scored cold, 1 of 64 prompts is more than 20 limits away from the reference; the worst has 0.5 nats.",
        ),
        (
            state("kl-limit", source="noise", noise=["int8_qk", "fp8_kv"], factor=5.0, floor=0.0123, prompts=32),
            "declared noise int8_qk and fp8_kv; the reference against itself: 0.012 nats over 32 prompts",
        ),
        (
            state("kl-limit", source="floor", noise=[], factor=5.0, floor=0.0123, prompts=32),
            "5 times the floor, the reference against itself: 0.012 nats over 32 prompts",
        ),
        (
            state("candidate-not-finite", places=[(1_280, 1_280, "cold"), (1, 1_280, "cached")]),
            "The candidate's log-probabilities are not finite at 1,280 of 1,280 positions, cold and 1 of 1,280 positions, cached; "
            "the reference's are.",
        ),
    ],
)  # fmt: skip
def test_what_was_found_is_said_with_its_limit(made: Statement, text: str) -> None:
    assert say(made) == text


@pytest.mark.parametrize(
    ("condition", "left_out", "said"),
    [("cold", 8, "logits, cold: at most 16 cached"), ("cached", 2, "logits of 2 of 8 sequences, cached: at least 16 cached")],
)
def test_too_few_prompts_are_said_with_what_a_server_did_not_cache(condition: str, left_out: int, said: str) -> None:
    cached = [("reference", 20, 20), ("candidate", 0, 15)]
    missed = state("not-cached-as-required", condition=condition, left_out=left_out, sequences=8, required=16, cached=cached)
    assert say(state("too-few-scored", prompts=6, least=64, not_observed=[missed])) == (
        "6 prompts were scored both cold and cached; at least 64 are needed for a verdict. Not observed: "
        f"{said} tokens were required; the reference had 20 to 20 and the candidate had 0 to 15."
    )


def test_numbers_are_said_as_exactly_as_their_intervals() -> None:
    kl = measured_of(measure("mean-kl", 0.0015, part="cold", limit=NOISE))
    assert kl == ("mean KL, cold", "0.0015 nats", ABOUT_NOISE)
    far = measured_of(measure("far-prompts", 1 / 64, part="cached", limit=0.001, **FAR))
    assert far.title == "prompts far beyond the limit, cached"
    assert (far.text, far.explain) == (
        "1 of 64 prompts", "A mean KL of the prompt above 20 times the limit of 0.001 nats; the worst has 0.5 nats",
    )  # fmt: skip
