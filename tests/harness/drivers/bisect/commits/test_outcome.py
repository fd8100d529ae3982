from __future__ import annotations

import math

import pytest

from assay.harness.drivers.bisect.commits.outcome import changes, outcome_of
from assay.harness.drivers.bisect.commits.state import BisectSpec, CallErrors, Measurement


def spec(**over: object) -> BisectSpec:
    return BisectSpec.model_validate({"repo": "r", "good": "g", "bad": "b", "kernel": "m:f"} | over)


def measured(*owns: tuple[float, ...], bound: float = 0.01, prefixes: str = "01") -> Measurement:
    rows = (
        CallErrors(
            number=i, layer=i % 2, call=f"call {i}", condition={"prefix": prefixes[i % len(prefixes)]}, own=own,
            bound=bound, rounding=0.001,
        )
        for i, own in enumerate(owns)
    )  # fmt: skip
    return Measurement(status="measured", rows=tuple(rows))


def test_the_worst_head_of_the_worst_call_decides() -> None:
    right = outcome_of(measured((0.001, 0.009), (0.0, 0.01)), spec(), [])
    assert (right.outcome, right.worst) == ("good", 1.0)
    wrong = outcome_of(measured((0.001, 0.009), (0.011, 0.01)), spec(), [])
    assert (wrong.outcome, wrong.worst) == ("bad", pytest.approx(1.1))
    assert wrong.where == "call 1, head 0: own error 1.1 %"
    assert outcome_of(measured((0.0, math.inf)), spec(), []).outcome == "bad"


def test_an_empty_comparison_is_skipped() -> None:
    assert outcome_of(measured(), spec(), []).outcome == "skip"
    nothing = Measurement(status="build", reason="make failed")
    assert outcome_of(nothing, spec(), []) == outcome_of(nothing, spec(raises="bad"), [])
    assert outcome_of(nothing, spec(), []).reason == "build: make failed"


@pytest.mark.parametrize("status", ["raised", "died"])
def test_a_kernel_that_raises_is_classified_as_requested(status: str) -> None:
    one = Measurement.model_validate({"status": status, "reason": "x"})
    assert outcome_of(one, spec(), []).outcome == "skip"
    assert outcome_of(one, spec(raises="bad"), []).outcome == "bad"


def test_an_accuracy_run_decides_by_its_verdict() -> None:
    assert outcome_of(Measurement(status="measured", regression=True), spec(), []).outcome == "bad"
    assert outcome_of(Measurement(status="measured", regression=False), spec(), []).outcome == "good"
    assert outcome_of(Measurement(status="undecided", reason="x"), spec(), []).outcome == "skip"


def test_against_the_good_revision() -> None:
    good = [measured((0.02, 0.0001), (0.0, 0.0)), measured((0.03, 0.0001), (0.0, 0.0))]
    ours = spec(against="good")
    assert outcome_of(measured((0.06, 0.001), (0.001, 0.0)), ours, good).outcome == "good", (
        "out of bounds, but no worse than good allows"
    )
    assert outcome_of(measured((0.061, 0.0), (0.0, 0.0)), ours, good).outcome == "bad"
    assert outcome_of(measured((0.0, 0.0011), (0.0, 0.0)), ours, good).outcome == "bad", "within the bound, but worse than good"
    new = measured((0.0, 0.0), (0.0, 0.0), (0.011, 0.0))
    assert outcome_of(new, ours, good).outcome == "bad", "a call that good did not compute uses its bound"


def test_changes_by_layer_head_and_condition() -> None:
    before = measured((0.0, 0.0), (0.0, 0.02))
    at = measured((0.0, 0.02), (0.0, 0.02))
    found = {change.axis: change for change in changes(at, before, spec(), [])}
    assert found["layer"].failing == ("0", "1")
    assert found["layer"].new == ("0",)
    assert found["prefix"].new == ("0",)
    assert (found["head"].failing, found["head"].new, found["head"].values) == (("1",), (), ("0", "1"))
    assert {c.axis: c.new for c in changes(at, None, spec(), [])}["head"] == ("1",)
