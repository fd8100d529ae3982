"""What a verdict covers: counted conditions against the policy's envelope."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, Met, met_of
from assay.harness.evidence.lengths import ranges_of
from assay.harness.judge.decide import About, SuiteVerdict, decide
from assay.harness.judge.envelope import check_envelope, envelope_result

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)
SUITES = ("accuracy", "greedy", "logits", "layers")
PASSED = SuiteVerdict(id="layers", title="Own error", verdict="pass", why="fine")


def asked(**changes: Any) -> tuple[Envelope, str]:
    """The envelope of a policy, and its line."""
    policy = make_spec({"envelope_tokens": 512, **changes}).policy
    return Envelope.of(policy.envelope_tokens, "cpu"), policy.line("envelope_tokens")


def counted(limits: EngineLimits = LIMITS, phases: tuple[str, ...] = ("extend",), layers: int = 4) -> EnvelopeCounts:
    """The counts of a run that covers the envelope of the default policy exactly."""
    envelope, _ = asked()
    calls = {
        phase: {
            quantity: {label: dict.fromkeys(range(layers), 2) for label in labels}
            for quantity, labels in envelope.kinds(limits)[phase].items()
        }
        for phase in phases
    }
    met = {
        phase: {quantity: _met(points, layers) for quantity, points in _points(limits, phase).items()}
        for phase in phases
    }
    return EnvelopeCounts(limits=limits, calls=calls, met=met)


def _points(limits: EngineLimits, phase: str) -> dict[str, Iterable[int]]:
    envelope, _ = asked()
    wanted = envelope.reach(limits).lengths[phase]
    return {
        **{quantity: range(points[0], points[-1] + 1) for quantity, points in wanted.items()},
        "batch": [1, envelope.batch],
        "depth": range(1, envelope.depth + 1),
    }


def _met(lengths: Iterable[int], layers: int = 4) -> tuple[Met, ...]:
    return met_of(dict.fromkeys(range(layers), ranges_of(lengths)))


def meeting(quantity: str, lengths: Iterable[int], phase: str = "extend", layer: int | None = None) -> EnvelopeCounts:
    """The counts of a run whose calls had these lengths alone, in one layer or in all."""
    changed = counted(phases=("extend", "decode")).model_copy(deep=True)
    layers = changed.by_layer(phase, quantity)
    layers.update(dict.fromkeys(layers if layer is None else [layer], ranges_of(lengths)))
    changed.met[phase][quantity] = met_of(layers)
    return changed


def without(counts: EnvelopeCounts, quantity: str, label: str, layer: int | None = None) -> EnvelopeCounts:
    """The same without the calls of a condition, in one layer or in all."""
    changed = counts.model_copy(deep=True)
    by_layer = changed.calls["extend"][quantity][label]
    for number in list(by_layer) if layer is None else [layer]:
        del by_layer[number]
    return changed


def test_what_the_policy_wants_is_covered() -> None:
    check = check_envelope(*asked(), SUITES, counted(), ["extend"])
    assert (check.status, check.found) == ("ok", "4 layers in extend; envelope_tokens = 512 (--envelope-tokens)")


@pytest.mark.parametrize(
    ("quantity", "label"),
    [("batch", "9-32"), ("chunk", "later chunk"), ("chunk", "later chunk of full length"), ("border", "on it"),
     ("mix", "some with a prefix")],
)  # fmt: skip
def test_a_condition_that_one_layer_lacks_is_no_pass(quantity: str, label: str) -> None:
    check = check_envelope(*asked(), SUITES, without(counted(), quantity, label, layer=2), ["extend"])
    assert check.status == "missing"
    assert label in check.found
    assert decide("sage_attn", [PASSED], [check]).verdict == "inconclusive"


@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize(
    ("phase", "quantity", "met", "gap"),
    [
        # A backend that returns zeros for 202 to 511 cached tokens passed.
        ("extend", "prefix-tokens", [*range(1, 202), 512], "cached prefix 202 to 511"),
        # So did one that is wrong for a chunk of more than 130 new tokens behind a prefix.
        ("extend", "new-behind-prefix", range(1, 131), "new tokens behind a prefix 131 to 512"),
        # Decode was compared at 1 to 200 and 577 to 584, and called "decode to 584".
        ("decode", "total-tokens", [*range(1, 201), *range(577, 585)], "total length 201 to 512"),
        ("extend", "total-tokens", [one for one in range(1, 513) if one != 257], "total length 257"),
        ("extend", "new-tokens", range(2, 513), "new tokens 1"),
    ],
)
def test_a_gap_within_the_envelope_is_no_pass_and_is_named(
    phase: str, quantity: str, met: Iterable[int], gap: str, layer: int | None
) -> None:
    counts, phases = meeting(quantity, met, phase, layer), ["extend", "decode"]
    check = check_envelope(*asked(), SUITES, counts, phases)
    assert check.status == "missing"
    assert f"{phase}: {gap}" in check.found
    assert decide("sage_attn", [PASSED], [check]).verdict == "inconclusive"
    result = envelope_result(*asked(), counts, phases)
    assert result is not None
    assert result.gaps == (f"{phase}: {gap}",)


def test_lengths_with_a_gap_are_said_as_they_are() -> None:
    result = envelope_result(
        *asked(), meeting("total-tokens", [*range(1, 201), *range(577, 585)], "decode"), ["decode"]
    )
    assert result is not None
    assert "decode at 1 to 200 and 577 to 584 tokens" in result.sentence
    assert result.reached["decode"]["total-tokens"] == 200


def test_a_claimed_phase_that_was_not_compared_is_no_pass() -> None:
    check = check_envelope(*asked(), SUITES, counted(), ["extend", "decode"])
    assert check.status == "missing"
    assert "--disable-cuda-graph" in check.settles


def test_without_counts_it_is_missing_and_without_the_suite_not_checked() -> None:
    assert check_envelope(*asked(), SUITES, None, ["extend"]).status == "missing"
    assert check_envelope(*asked(), ("accuracy",), None, ["extend"]).status == "not checked"


def test_a_larger_policy_wants_more() -> None:
    check = check_envelope(*asked(envelope_tokens=2048), SUITES, counted(), ["extend"])
    assert check.status == "missing"
    assert "extend: cached prefix 513 to 2,048" in check.found
    assert "envelope_tokens = 2048 (--envelope-tokens)" in check.found


def test_what_the_engine_cannot_do_is_not_wanted_and_is_said() -> None:
    paged = EngineLimits(chunk_tokens=None, context_tokens=4096, page_tokens=64, prefix_cache=True)
    counts = counted(paged)
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert asked()[0].reach(paged).lengths["extend"]["prefix-tokens"] == tuple(range(64, 513, 64))
    assert check_envelope(*asked(), SUITES, counts, ["extend"]).status == "ok"
    result = envelope_result(*asked(), counts, ["extend"])
    assert result is not None
    assert "extend: chunked prefill: it is switched off" in result.not_covered
    assert "page sizes other than 64" in result.not_covered


def test_mixed_batches_are_wanted_where_the_engine_makes_them() -> None:
    mixing = LIMITS.model_copy(update={"mixed": True})
    counts = counted(mixing)
    assert check_envelope(*asked(), SUITES, counts, ["extend"]).status == "ok"
    assert check_envelope(*asked(), SUITES, without(counts, "mix", "extend and decode"), ["extend"]).status == "missing"


def test_the_sentence_says_how_far_it_reaches_and_what_lies_outside() -> None:
    result = envelope_result(*asked(), counted(), ["extend"])
    assert result is not None
    assert result.sentence == (
        "prefill at 1 to 512 new tokens, at 1 to 512 behind a cached prefix, at 1 to 512 cached and at 1 to 512 in all, "
        "in batches of up to 9; decode is the reference's"
    )
    assert "extend: more than 512 new tokens at once" in result.not_covered
    assert "decode by the candidate: it claims none" in result.not_covered
    judged = decide("sage_attn", [PASSED], [], about=About(covers=result.sentence))
    assert any(result.sentence in reason for reason in judged.reasons)
