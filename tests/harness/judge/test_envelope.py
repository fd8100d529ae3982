"""What a verdict covers: counted conditions against the policy's envelope."""

from __future__ import annotations

from typing import Any

import pytest

from assay.harness.config import RunSpec, make_spec
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts
from assay.harness.judge.decide import SuiteVerdict, decide
from assay.harness.judge.envelope import check_envelope, envelope_result

LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)
PASSED = SuiteVerdict(id="layers", title="Own error", verdict="pass", why="fine")


def spec(**changes: Any) -> RunSpec:
    return make_spec({"reference": "torch_native", "candidate": "sage_attn", **changes})


def counted(limits: EngineLimits = LIMITS, phases: tuple[str, ...] = ("extend",), layers: int = 4) -> EnvelopeCounts:
    """The counts of a run that covers the envelope of the default policy exactly."""
    envelope = Envelope.of(spec())
    calls = {
        phase: {
            quantity: {label: dict.fromkeys(range(layers), 2) for label in labels}
            for quantity, labels in envelope.kinds(limits)[phase].items()
        }
        for phase in phases
    }
    largest = {
        phase: {
            quantity: dict.fromkeys(range(layers), value) for quantity, value in envelope.goals(limits)[phase].items()
        }
        for phase in phases
    }
    return EnvelopeCounts(limits=limits, calls=calls, largest=largest)


def without(counts: EnvelopeCounts, quantity: str, label: str, layer: int | None = None) -> EnvelopeCounts:
    """The same without the calls of a condition, in one layer or in all."""
    changed = counts.model_copy(deep=True)
    by_layer = changed.calls["extend"][quantity][label]
    for number in list(by_layer) if layer is None else [layer]:
        del by_layer[number]
    return changed


def test_what_the_policy_wants_is_covered() -> None:
    check = check_envelope(spec(), counted(), ["extend"])
    assert (check.status, check.found) == ("ok", "4 layers in extend; envelope_tokens = 512 (default)")


@pytest.mark.parametrize(
    ("quantity", "label"),
    [("new-tokens", "129-512"), ("prefix-tokens", "1-15"), ("batch", "9-32"), ("chunk", "later chunk"), ("border", "on it"),
     ("mix", "some with a prefix"), ("total-tokens", "129-512")],
)  # fmt: skip
def test_a_condition_that_one_layer_lacks_is_no_pass(quantity: str, label: str) -> None:
    check = check_envelope(spec(), without(counted(), quantity, label, layer=2), ["extend"])
    assert check.status == "missing"
    assert label in check.found
    assert decide("sage_attn", [PASSED], [check]).verdict == "inconclusive"


def test_short_questions_alone_are_no_pass() -> None:
    """What every run was until it drove a load of its own: questions of 30 to 100 tokens."""
    short = counted()
    for quantity in ("new-tokens", "prefix-tokens", "total-tokens"):
        short = without(short, quantity, "129-512")
        short.largest["extend"][quantity] = dict.fromkeys(range(4), 100)
    check = check_envelope(spec(), short, ["extend"])
    assert check.status == "missing"
    assert "extend: new tokens 129-512" in check.found


def test_a_bucket_that_was_met_does_not_stand_for_its_end() -> None:
    counts = counted()
    counts.largest["extend"]["new-tokens"][3] = 130
    check = check_envelope(spec(), counts, ["extend"])
    assert check.status == "missing"
    assert "new tokens up to 512" in check.found


def test_a_claimed_phase_that_was_not_compared_is_no_pass() -> None:
    check = check_envelope(spec(), counted(), ["extend", "decode"])
    assert check.status == "missing"
    assert "--disable-cuda-graph" in check.settles


def test_without_counts_it_is_missing_and_without_the_suite_not_checked() -> None:
    assert check_envelope(spec(), None, ["extend"]).status == "missing"
    assert check_envelope(spec(suites="mmlu"), None, ["extend"]).status == "not checked"


def test_a_larger_policy_wants_more() -> None:
    check = check_envelope(spec(envelope_tokens=2048), counted(), ["extend"])
    assert check.status == "missing"
    assert "513-2048" in check.found
    assert "envelope_tokens = 2048 (--envelope-tokens)" in check.found


def test_what_the_engine_cannot_do_is_not_wanted_and_is_said() -> None:
    paged = EngineLimits(chunk_tokens=None, context_tokens=4096, page_tokens=64, prefix_cache=True)
    counts = counted(paged)
    assert "later chunk" not in counts.calls["extend"]["chunk"]
    assert "1-15" not in counts.calls["extend"]["prefix-tokens"]
    assert check_envelope(spec(), counts, ["extend"]).status == "ok"
    result = envelope_result(spec(), counts, ["extend"])
    assert result is not None
    assert "extend: chunked prefill: it is switched off" in result.not_covered
    assert "page sizes other than 64" in result.not_covered


def test_mixed_batches_are_wanted_where_the_engine_makes_them() -> None:
    mixing = LIMITS.model_copy(update={"mixed": True})
    counts = counted(mixing)
    assert check_envelope(spec(), counts, ["extend"]).status == "ok"
    assert check_envelope(spec(), without(counts, "mix", "extend and decode"), ["extend"]).status == "missing"


def test_the_sentence_says_how_far_it_reaches_and_what_lies_outside() -> None:
    result = envelope_result(spec(), counted(), ["extend"])
    assert result is not None
    assert result.sentence == (
        "prefill to 512 new tokens, 512 cached and 512 in all, in batches of up to 9; decode is the reference's"
    )
    assert "extend: more than 512 new tokens at once" in result.not_covered
    assert "decode by the candidate: it claims none" in result.not_covered
    judged = decide("sage_attn", [PASSED], [], covers=result.sentence)
    assert any(result.sentence in reason for reason in judged.reasons)
