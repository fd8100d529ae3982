"""The words of greedy texts."""

from __future__ import annotations

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.statement import state
from assay.reports.wording.say import measured_of, say


@pytest.mark.parametrize(
    ("verdict", "decided"),
    [
        ("pass", ", at most the limit of 10.0 %."),
        ("regression", ", above the limit of 10.0 %."),
        ("inconclusive", ": neither shown to be at most the limit of 10.0 % nor above it; to resolve: more greedy texts."),
    ],
)
def test_a_share_of_texts_is_said_with_its_verdict(verdict: str, decided: str) -> None:
    share = state("share-of-texts-apart", apart=6, texts=128, low=0.0207, high=0.0901, level=0.9, margin=0.1, verdict=verdict)
    said = "6 of 128 greedy texts differ by more than noise (4.7 %; 2.1 % to 9.0 % with 90 % confidence)"
    assert say(share) == f"{said}{decided}"


def test_an_erratic_reference_is_said_with_its_largest_change() -> None:
    erratic = state("reference-erratic", erratic=1, answers=32, largest=8.0, factor=3.0)
    assert say(erratic) == (
        "The reference is erratic: asked again, 1 of 32 of its answers changed by up to 8 nats, beyond what noise and 3 times "
        "their median explain."
    )


def test_of_many_answers_over_the_envelope_the_first_are_named() -> None:
    said = say(state("envelope-answers-apart", apart=list("abcdef"), answers=40))
    assert said == "6 of 40 answers over the envelope differ by more than noise: a, b, c, d and 2 more."


@pytest.mark.parametrize(
    ("factor", "declared", "source"),
    [
        (None, [], "What is explained by rounding, since no other noise is declared"),
        (None, ["int8", "fp8"], "What is explained by declared noise int8 and fp8"),
        (3.0, ["int8"], "3 times the floor"),
    ],
)
def test_the_limit_is_said_with_its_source(factor: float | None, declared: list[str], source: str) -> None:
    measured = measured_of(measure("close-limit", 0.5, factor=factor, declared=declared))
    assert measured == ("limit of the log-odds' change", "0.5 nats", source)


def test_a_floor_that_was_not_measured_is_said_so() -> None:
    assert measured_of(measure("reference-floor", None, prompts=0, erratic=0)).text == "not measured"
    assert measured_of(measure("reference-floor", 0.21, prompts=32, erratic=1)).text == "0.21 nats"
