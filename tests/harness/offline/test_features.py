"""Kernels that declare features: the matrix asks for them, and one that ignores them does not pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from assay.harness.attention.call import FEATURES, AttentionCall, Kernel, Mask
from assay.harness.attention.kernels import declaration, declares
from assay.harness.attention.matrix import Case, cases
from assay.harness.bugs.faults import rounded_oracle
from assay.harness.errors import ExitCode
from assay.harness.offline import check as checking
from assay.harness.offline.check import check


def declaring(kernel: Kernel, *features: str) -> Kernel:
    return declares(features=features)(lambda call: kernel(call))


@cache
def asking(*features: str) -> tuple[Case, ...]:
    """The calls of the matrix that ask for features, and some that do not."""
    made = cases(declared=declaration(declaring(rounded_oracle, *features)))
    return tuple(
        case for number, case in enumerate(made) if case.condition["asked for"] != "nothing" or number % 40 == 0
    )


def without(feature: str, call: AttentionCall) -> Tensor:
    plain = {
        "window": {"mask": Mask()},
        "softcap": {"softcap": 0.0},
        "temperature": {"temperature": 0},
        "sinks": {"sinks": ()},
        "alibi": {"alibi": ()},
        "not_causal": {"mask": Mask()},
    }
    if feature in ("custom_mask", "positions"):
        return rounded_oracle(replace(call, **{feature: None}))
    if feature == "padding":  # as if the last sequence went on to the end of q
        ends = call.cu_seqlens_q.clone()
        ends[-1] = len(call.q)
        return rounded_oracle(replace(call.with_spec(padded_rows=0), cu_seqlens_q=ends))
    return rounded_oracle(call.with_spec(**plain[feature]))


def test_a_kernel_that_computes_what_it_declares_passes_and_the_check_says_what_was_asked_for() -> None:
    result = check(declaring(rounded_oracle, *ASKED), cases=asking(*ASKED), read_out=0, calls=0)
    assert (result.exit_code, result.findings) == (ExitCode.PASS, ())
    asked = result.coverage.sentence.partition("asked for: ")[2]
    for value in ("window 1,", "window 129", "softcap 1,", "softcap 50", "temperature 64", "sinks near -4"):
        assert value in asked
    assert (
        "window 64 and softcap 30 and temperature 64 and sinks near 0 and ALiBi to 2^-8 and 7 padded rows and random tree"
        in asked
    )


ASKED = tuple(feature for feature in FEATURES if feature != "lse")


@pytest.mark.few(1)
@pytest.mark.parametrize("feature", ASKED)
def test_a_kernel_that_ignores_what_it_declares_is_wrong_on_every_value(feature: str) -> None:
    some = asking(feature)
    result = check(declaring(lambda call: without(feature, call), feature), cases=some, read_out=5, calls=0)
    assert result.exit_code == ExitCode.REGRESSION
    failing = {case.condition["asked for"] for case in result.failing}
    # The mask of a chain is the causal one, and plain attention does not depend on where a sequence begins.
    right = {"nothing", "chain", "1000 keys evicted"}
    assert failing == {case.condition["asked for"] for case in some} - right
    unread = "only calls that ask for a feature are wrong, and those are not read" in str(result.findings)
    assert unread == (feature != "not_causal")  # with no fewer keys than queries, that is no feature


@pytest.mark.parametrize("feature", ["window", "temperature", "alibi"])
def test_a_kernel_that_goes_by_places_among_the_keys_and_not_by_positions_is_wrong(feature: str) -> None:
    def by_place(call: AttentionCall) -> Tensor:
        """Positions of keys that were evicted, or lie between, are not counted."""
        return rounded_oracle(replace(call, positions=None))

    result = check(declaring(by_place, feature, "positions"), cases=asking(feature, "positions"), read_out=0, calls=0)
    failing = {case.condition["asked for"] for case in result.failing}
    value = {"window": "window 128", "temperature": "temperature 64", "alibi": "ALiBi to 2^-8"}[feature]
    assert f"{value} and keys just behind" in failing
    assert (f"{value} and 1000 keys evicted" in failing) == (feature == "temperature")  # the others go by distances


def test_a_window_that_is_off_by_one_is_wrong() -> None:
    def narrower(call: AttentionCall) -> Tensor:
        window = call.spec.mask.window
        return rounded_oracle(call.with_spec(mask=Mask(window=window - 1)) if window > 1 else call)

    result = check(declaring(narrower, "window"), cases=asking("window"), read_out=0, calls=0)
    assert {case.condition["asked for"] for case in result.failing} == {
        f"window {size}" for size in (64, 16, 17, 65, 128, 129)
    }


def test_a_kernel_that_declares_nothing_is_asked_for_nothing_and_costs_what_it_cost() -> None:
    assert {case.make().spec.features for case in cases()[::7]} == {()}
    assert "asked for" not in cases()[0].condition


def test_a_feature_that_does_not_exist_is_not_declared() -> None:
    with pytest.raises(
        ValueError, match=r"declares the features \['relative bias'\]; expected some of window, softcap"
    ):
        declares(features=("relative bias",))


def test_an_engines_backend_is_checked_on_plain_attention_though_it_takes_whatever_a_layer_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = declaring(lambda call: without("softcap", call), "softcap")
    monkeypatch.setattr(checking, "named", lambda _: ("sglang:mine", backend))
    result = check("sglang:mine", phases=["decode"], dtypes=["float32"], read_out=0, calls=0)
    assert result.verdict == "pass"
    assert "asked for" not in result.coverage.sentence
