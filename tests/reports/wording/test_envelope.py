"""The words of what a verdict covers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from assay.harness.evidence.envelope import EngineLimits, Ranges
from assay.harness.judge.report import EnvelopeResult
from assay.harness.statement import Statement, state
from assay.reports.wording.envelope import envelope_lines

LINE = "envelope_tokens = 512 (default)"
LIMITS = EngineLimits(chunk_tokens=512, context_tokens=4096)


def lines(
    claimed: Sequence[str] = ("extend",), limits: EngineLimits = LIMITS, gaps: Sequence[Statement] = (), **features: Any
) -> list[str]:
    """What is said where ends of blocks and some lengths between were compared, and those of decode up to 200 and from 577."""
    whole: Ranges = ((1, 1), (40, 40), (63, 65), (100, 100), (127, 128))
    extend = dict.fromkeys(("new-tokens", "new-behind-prefix", "prefix-tokens", "total-tokens"), whole)
    batches: Ranges = ((1, 2), (6, 6), (9, 9))
    compared = {"extend": extend | {"batch": batches}, "decode": {"total-tokens": ((1, 200), (577, 584)), "batch": batches}}
    reached = {"extend": dict.fromkeys(extend, 512) | {"batch": 9}, "decode": {"total-tokens": 200, "batch": 9, "depth": 2000}}
    kept = {phase: compared[phase] for phase in claimed}
    result = EnvelopeResult(
        policy=LINE, claimed=tuple(claimed), limits=limits, compared=kept, served=kept, gaps=tuple(gaps), rows=(),
        reached={phase: reached[phase] for phase in claimed}, served_reached={phase: reached[phase] for phase in claimed},
        **features,
    )  # fmt: skip
    return envelope_lines(result)


def test_it_is_said_how_far_an_envelope_reaches_and_what_lies_outside() -> None:
    shadow, served, outside = lines()
    some = "8 of 1 to 128"
    lengths = f"extend at {some} new tokens, at {some} behind a cached prefix, at {some} cached and at {some} in all"
    assert shadow == f"Compared in every layer: {lengths}, in batches of 1 to 2, 6 and 9; decode is the reference's. Set by {LINE}."
    assert "lengths that no call had: the ends of a block of 64, and others that each run draws, stand for those in it" in outside
    assert served == f"Served by the candidate's own server: {lengths}; decode is the reference's."
    assert "extend: more than 512 new tokens at once" in outside
    assert "decode by the candidate: it claims none" in outside
    assert "decode at 1 to 200 and 577 to 584 tokens and to a depth of 2,000" in lines(["extend", "decode"])[0]


def test_a_feature_that_changed_no_output_is_not_covered() -> None:
    covered, *_, outside = lines(features=("sinks",), unfelt={"window": ("decode",)})
    assert "; layers have attention sinks." in covered
    assert "sliding windows in decode: in some layer they changed no output that was compared" in outside
    assert "attention that this model's calls lack: logit caps, cross attention" in outside


def test_what_the_engine_cannot_do_is_said() -> None:
    outside = lines(limits=EngineLimits(chunk_tokens=None, context_tokens=4096, page_tokens=64))[-1]
    assert "extend: a prompt in chunks: it is switched off" in outside
    assert "page sizes other than 64" in outside


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
    said = lines(["extend", "decode"], LIMITS.model_copy(update={"graphs": graphs}))[-1]
    assert [line for line in expected if line not in said] == []
    assert said.count("in CUDA graphs:") == len(expected)


def test_gaps_are_said_beside_what_was_compared() -> None:
    gap = state("calls-lacking", phase="extend", condition="batch", lacking=1024)
    assert "Gaps: extend: batch size up to 1,024; extend: batch size up to 1,024." in lines(gaps=(gap, gap))
