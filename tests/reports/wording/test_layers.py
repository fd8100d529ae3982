"""The words of the layer diff and of the op-level matrix."""

from __future__ import annotations

from typing import Any

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.judge.report import ErrorGrid
from assay.harness.statement import Statement, state
from assay.harness.verdict import Finding, Requirement
from assay.reports.wording.layers import grid_title
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, said_finding, say

WITHIN: dict[str, Any] = {"worst": 0.4, "query": 0.25, "gain": 0.031, "cells": 1_064, "queries": 640, "passes": 1_062}
OUTSIDE: dict[str, Any] = {"failing": 2, "calls": 9, "worst": 37.0, "title": "", "said": "extend: it is wrong."}


def beyond(test: str = "worst-own-error", observed: float = 0.5, excess: float = 12.0, query: list[int] | None = None) -> Statement:
    return state("beyond-noise", test=test, query=query, observed=observed, bound=0.042, excess=excess)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            state("found-at", where="extend, layer 2 of 4", claim=beyond()),
            "extend, layer 2 of 4: at worst the own error is 50 %, 12x what noise explains (4.2 %).",
        ),
        (
            state("reference-not-right", where="decode", claim=beyond("worst-own-error", float("inf"), float("inf"))),
            "the reference is not right, so it proves nothing about the candidate: decode: at worst the own error is not finite, "
            "beyond what noise explains (4.2 %).",
        ),
        (
            beyond("worst-query", query=[701, 512, 2, 3]),
            "at worst the own error of a query is 50 %, 12x what noise explains (4.2 %), at position 701 behind 512 cached tokens, "
            "layer 2, head 3",
        ),
        (
            beyond("worst-query", query=[4, 0, 1, -1]),
            "at worst the own error of a query is 50 %, 12x what noise explains (4.2 %), at position 4 behind 0 cached tokens, "
            "layer 1, all heads together",
        ),
        (beyond("worst-gain", 0.001), "at worst the output is scaled by 0.1 %, 12x what noise explains (4.2 %)"),
        (
            state("error-below-noise", own=1e-6, noise="int8_qk", least=0.007),
            "the own error is 0.0001 %, and int8_qk costs at least 0.7 % on these calls: the kernel probably did not run, or does "
            "not quantise what it declares",
        ),
        (
            state("own-errors-within", sampled=64, **WITHIN),
            "The worst own error is 0.4x what noise explains, that of a single query 0.25x, and the worst gain 0.031x, in 1,064 "
            "cells (64 of 640 queries, 1,062 passes).",
        ),
        (
            state("own-errors-within", sampled=640, **WITHIN),
            "The worst own error is 0.4x what noise explains, that of a single query 0.25x, and the worst gain 0.031x, in 1,064 "
            "cells (all 640 queries, 1,062 passes).",
        ),
        (state("recorded-call-out-of-bounds", worst=float("inf")), "The own error of a recorded call is not finite."),
        (
            state("own-error-above-policy", value=None, line="bounds.int8_qk = 1 (default)"),
            "The largest own error is not finite, above bounds.int8_qk = 1 (default).",
        ),
        (
            state("evidence-lacking", what="calls", said="it\nraised"),
            "The candidate did not compute a call: it raised.",
        ),
        (state("op-calls-not-tested", missing=["no decode", "no\nGPU"]), "Not tested: no decode; no GPU."),
        (state("op-calls-not-tested", missing=[]), "Not tested: no call was computed."),
        (state("layers-not-seen", phase="decode", layers=[1], of=[0, 1]), "decode: no call of layer 1 of 2 was seen"),
        (
            state("calls-not-recorded", layer=1, said="too\nlarge"),
            "replay pack, layer 1: its calls could not be recorded: too large",
        ),
        (state("calls-failed", layer=2, phase="extend", calls=3, said="no\nimage"), "layer 2, extend, 3 calls: no image"),
        (
            state("difference-known", how="window", phase="decode", layers=[0, 2]),
            "difference from the reference, decode, layers 0, 2: the reference's window is off by one key there, so the difference "
            "is no error of the candidate's, which is compared with the truth alone",
        ),
        (
            state("op-calls-wrong", **OUTSIDE),
            "2 of 9 calls are out of bounds, at worst 37x what noise explains: extend: it is wrong.",
        ),
        (state("op-calls-wrong", **OUTSIDE | {"worst": None, "title": "T"}), '2 of 9 calls are out of bounds: "T".'),
        (
            state("op-calls-unexplained", failing=1, worst=float("inf")),
            "1 call is out of bounds, at worst not finite; no finding explains it.",
        ),
        (
            state("op-calls-within", worst=0.5, calls=9, shapes="float32", refused=2),
            "The worst own error is 0.5x what noise explains, in 9 calls of float32; 2 more were refused.",
        ),
    ],
)  # fmt: skip
def test_an_own_error_is_said_with_what_noise_explains(made: Statement, text: str) -> None:
    assert say(made) == text


@pytest.mark.parametrize(
    ("compared", "found"),
    [
        ([("extend", 4, [], []), ("decode", None, [], [])], "extend: 4 layers; decode: not observed"),
        ([("extend", 4, [0, 1, 2, 3], [2, 3])], "extend: not layer 0-3, head 2-3"),
        ([], "no phase is claimed"),
    ],
)
def test_a_check_says_what_was_compared_in_each_phase(
    compared: list[tuple[str, int | None, list[int], list[int]]], found: str
) -> None:
    check = said_check(Requirement("layers-compared").check("missing", state("phases-compared", phases=compared)))
    assert check.found == found
    assert check.settles.startswith("run so that each of these is shadowed")


@pytest.mark.parametrize(
    ("value", "finite", "text"), [(0.5, True, "0.5x its bound"), (None, True, "not measured"), (None, False, "not finite")]
)
def test_a_number_that_is_not_finite_is_not_one_that_was_not_measured(value: float | None, finite: bool, text: str) -> None:
    said = measured_of(measure("worst", value, part="recorded-call", bound=1.0, finite=finite, calls=8))
    assert (said.title, said.text) == ("worst own error, recorded calls", text)
    assert said.explain.endswith("over 8 recorded calls")


def test_a_finding_says_the_worst_and_how_many_tests_flag_it() -> None:
    finding = Finding(
        id="gain", title="output scaled", severity="serious", where="extend", claim=beyond("worst-gain", 0.001),
        shown_by=(state("tests-flag", flagged=3, tests=1_064),), reproduce="again",
    )  # fmt: skip
    said = said_finding(finding)
    assert said.sentence == "extend: at worst the output is scaled by 0.1 %, 12x what noise explains (4.2 %)."
    assert said.evidence == ("3 of 1,064 tests flag it",)


def test_a_heat_map_is_named_by_its_axes() -> None:
    labels: dict[str, Any] = {"row_labels": (), "column_labels": (), "values": (), "bounds": ()}
    titles = [
        grid_title(ErrorGrid(where="extend", columns=columns, **labels)) for columns in ("head", "prefix", "position", "batch")
    ]
    assert titles == ["layer × head", "layer × cached prefix", "layer × position", "layer × place in the batch"]
