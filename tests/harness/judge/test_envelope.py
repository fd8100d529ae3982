"""What a verdict covers: counted conditions against the policy's envelope."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, ranges_of
from assay.harness.judge.decide import SuiteVerdict, decide
from assay.harness.judge.envelope import claim
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.report import EnvelopeResult
from assay.harness.verdict import Check
from assay.reports.words import envelope_lines

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)
PASSED = SuiteVerdict(id="layers", title="Own error", verdict="pass", why="fine")


ENVELOPE = Envelope.of(512, "cpu")


def claimed(
    counts: EnvelopeCounts | None, phases: Sequence[str], features: tuple[str, ...] = (), **flags: Any
) -> tuple[Check, EnvelopeResult | None]:
    """The check that the envelope was covered, and what a report says of it."""
    header = SimpleNamespace(features=features)
    run = SimpleNamespace(
        spec=make_spec({"envelope_tokens": 512, "device": "cpu", **flags}), envelope=counts, claimed=phases,
        over_envelope=(), counts={"candidate": ()}, errors=SimpleNamespace(headers=[header, header]), folder=None,
    )  # fmt: skip
    made = claim(cast(RunEvidence, run))
    return made.checks[0], cast(EnvelopeResult | None, made.parts.get("envelope"))


def checked(counts: EnvelopeCounts | None, phases: Sequence[str], **flags: Any) -> Check:
    return claimed(counts, phases, **flags)[0]


def counted(limits: EngineLimits = LIMITS, phases: tuple[str, ...] = ("extend",), layers: int = 4) -> EnvelopeCounts:
    """The counts of a run that covers the envelope of the default policy exactly."""
    calls = {
        phase: {
            quantity: {label: dict.fromkeys(range(layers), 2) for label in labels}
            for quantity, labels in ENVELOPE.kinds(limits)[phase].items()
        }
        for phase in phases
    }
    met = {
        phase: {quantity: dict.fromkeys(range(layers), ranges_of(points)) for quantity, points in _points(limits, phase).items()}
        for phase in phases
    }
    return EnvelopeCounts(limits=limits, calls=calls, met=met)


def _points(limits: EngineLimits, phase: str) -> dict[str, Iterable[int]]:
    wanted = ENVELOPE.reach(limits).lengths[phase]
    return {
        **{quantity: range(points[0], points[-1] + 1) for quantity, points in wanted.items()},
        "batch": [1, ENVELOPE.batch],
        "depth": range(1, ENVELOPE.depth + 1),
    }


def meeting(quantity: str, lengths: Iterable[int], phase: str = "extend", layer: int | None = None) -> EnvelopeCounts:
    """The counts of a run whose calls had these lengths alone, in one layer or in all."""
    changed = counted(phases=("extend", "decode")).model_copy(deep=True)
    layers = changed.met[phase][quantity]
    layers.update(dict.fromkeys(layers if layer is None else [layer], ranges_of(lengths)))
    return changed


def without(counts: EnvelopeCounts, quantity: str, label: str, layer: int | None = None) -> EnvelopeCounts:
    """The same without the calls of a condition, in one layer or in all."""
    changed = counts.model_copy(deep=True)
    by_layer = changed.calls["extend"][quantity][label]
    for number in list(by_layer) if layer is None else [layer]:
        del by_layer[number]
    return changed


def test_what_the_policy_wants_is_covered() -> None:
    check = checked(counted(), ["extend"])
    assert (check.status, check.found) == ("ok", "4 layers in extend; envelope_tokens = 512 (--envelope-tokens)")


@pytest.mark.parametrize(
    ("quantity", "label"),
    [("batch", "9-32"), ("chunk", "later chunk"), ("chunk", "later chunk of full length"), ("border", "on it"),
     ("mix", "some with a prefix")],
)  # fmt: skip
def test_a_condition_that_one_layer_lacks_is_no_pass(quantity: str, label: str) -> None:
    check = checked(without(counted(), quantity, label, layer=2), ["extend"])
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
    check = checked(counts, phases)
    assert check.status == "missing"
    assert f"{phase}: {gap}" in check.found
    assert decide("sage_attn", [PASSED], [check]).verdict == "inconclusive"
    _, result = claimed(counts, phases)
    assert result is not None
    assert result.gaps == (f"{phase}: {gap}",)


def test_a_claimed_phase_that_was_not_compared_is_no_pass() -> None:
    check = checked(counted(), ["extend", "decode"])
    assert check.status == "missing"
    assert "--disable-cuda-graph" in check.settles


def test_without_counts_it_is_missing_and_without_the_suite_not_checked() -> None:
    assert checked(None, ["extend"]).status == "missing"
    assert checked(None, ["extend"], suites="accuracy").status == "not checked"


def test_what_the_engine_cannot_do_is_not_wanted_and_is_said() -> None:
    paged = EngineLimits(chunk_tokens=None, context_tokens=4096, page_tokens=64, prefix_cache=True)
    counts = counted(paged)
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert ENVELOPE.reach(paged).lengths["extend"]["prefix-tokens"] == tuple(range(64, 513, 64))
    assert checked(counts, ["extend"]).status == "ok"
    _, result = claimed(counts, ["extend"])
    assert result is not None
    assert "extend: chunked prefill: it is switched off" in envelope_lines(result)[-1]
    assert "page sizes other than 64" in envelope_lines(result)[-1]


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [
        ({}, set()),
        ({"extend": "disabled"}, {"extend in CUDA graphs: the servers ran it without"}),
        (
            {"extend": "breakable", "decode": "full"},
            {
                "extend in CUDA graphs: calls were compared in passes without; what graphs answered is compared as text",
                "decode in CUDA graphs: calls were compared in passes without; what graphs answered is compared as text",
            },
        ),
    ],
)
def test_graphs_in_which_nothing_was_compared_are_not_covered(graphs: dict[str, str], expected: set[str]) -> None:
    _, result = claimed(counted(LIMITS.model_copy(update={"graphs": graphs})), ["extend", "decode"])
    assert result is not None
    said = envelope_lines(result)[-1]
    assert [line for line in expected if line not in said] == []
    assert said.count("in CUDA graphs:") == len(expected)


def test_the_sentence_says_how_far_it_reaches_and_what_lies_outside() -> None:
    _, result = claimed(counted(), ["extend"])
    assert result is not None
    assert envelope_lines(result)[0].startswith(
        "Compared in every layer: prefill at 1 to 512 new tokens, at 1 to 512 behind a cached prefix, at 1 to 512 cached and at "
        "1 to 512 in all, "
        "in batches of up to 9; decode is the reference's"
    )
    assert "extend: more than 512 new tokens at once" in envelope_lines(result)[-1]
    assert "decode by the candidate: it claims none" in envelope_lines(result)[-1]
