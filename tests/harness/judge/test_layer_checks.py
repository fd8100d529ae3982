"""What a pass asks of the layer suite: every layer, with a cached prefix, and no call that the candidate did not compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from assay.harness.conditions import CACHED_PREFIX, PHASES
from assay.harness.evidence.error_table import SUMS, ErrorTable, RoleErrors
from assay.harness.evidence.records import Answer
from assay.harness.evidence.shadow_errors import FailedCalls, ShadowErrors, ShadowHeader
from assay.harness.judge import own_error as checks
from assay.harness.statement import Statement, state

HEADS = 4


def cells(
    layers: list[int], prefix: str = ">= 16", phase: str = "extend", failed: bool = False, heads: Sequence[int] = range(HEADS),
    members: int = 2, untested: bool = False,
) -> ShadowErrors:  # fmt: skip
    places = [(layer, head) for layer in layers for head in heads]
    condition = [PHASES.index(phase), CACHED_PREFIX.labels.index(prefix), 0, 0]
    index = np.array([[layer, head, *condition] for layer, head in places], np.int64).reshape(-1, 6)
    error = (FailedCalls(layer=0, phase="extend", calls=2, text="it raised"),) if failed else ()
    legend = ShadowHeader(
        reference="r", candidate="c", phases=("extend",), failed=error, heads=dict.fromkeys(layers, HEADS),
        untested={3: "a window"} if untested else {},
    )  # fmt: skip
    sums = np.ones((len(index), len(SUMS)))
    role = RoleErrors(sums, 0 * sums, np.ones((len(index), members, len(SUMS))), RoleErrors.none(len(index)).worst)
    return ShadowErrors(ErrorTable(index, sums[:, :5], role, role), (legend,))


def phases(*compared: tuple[str, int | None, list[int], list[int]]) -> Statement:
    return state("phases-compared", phases=compared)


ALL = [0, 1, 2, 3]
EXTEND: Any = ("extend", 4, [], [])
NOT_EXTEND: Any = ("extend", None, [], [])


@pytest.mark.parametrize(
    ("seen", "claimed", "status", "found"),
    [
        (cells(ALL), ["extend"], "ok", phases(EXTEND)),
        (cells([0, 1, 3]), ["extend"], "missing", phases(("extend", 4, [2], [0]))),
        (cells([]), ["extend"], "missing", phases(NOT_EXTEND)),
        (cells(ALL, phase="decode"), ["extend"], "missing", phases(NOT_EXTEND)),
        (cells(ALL), ["extend", "decode"], "missing", phases(EXTEND, ("decode", None, [], []))),
        (cells(ALL), [], "missing", phases()),
        (cells(ALL, heads=(0, 1)), ["extend"], "missing", phases(("extend", 4, ALL, [2, 3]))),
        (cells(ALL, failed=True), ["extend"], "failed", state("calls-not-computed", calls=2, said="it raised")),
        (cells(ALL, members=0), ["extend"], "missing", phases(NOT_EXTEND)),
        (cells(ALL, untested=True), ["extend"], "missing", state("calls-not-comparable", layers=[3], layer=3, said="a window")),
        (None, ["extend"], "missing", state("layers-not-compared", why="no call")),
    ],
)
def test_every_layer_and_head_in_a_phase_that_the_candidate_claims(
    seen: ShadowErrors | None, claimed: list[str], status: str, found: Statement
) -> None:
    check = checks._check_layers(("accuracy", "layers"), seen, claimed, range(4))
    assert (check.status, check.outcome) == (status, found)
    assert checks._check_layers(("accuracy",), seen, claimed, range(4)).status == "not checked"


@pytest.mark.parametrize(("prefix", "status"), [(">= 16", "ok"), ("2-15", "missing"), ("1", "missing"), ("0", "missing")])
def test_a_cached_prefix_was_met_in_the_layer_diff(prefix: str, status: str) -> None:
    assert checks._check_cached_prefix([], cells([0], prefix)).status == status


def answer(cached: int | None) -> Answer:
    return Answer(
        suite="accuracy", role="candidate", item="i", prompt_hash="h", text="", finish_reason="stop", prompt_tokens=100,
        completion_tokens=5, cached_tokens=cached, latency_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cached", "status", "found"),
    [
        ([54] * 10, "ok", "questions-cached"),
        ([1] * 4 + [16] * 4, "ok", "questions-cached"),
        ([1] * 5 + [54] * 4, "missing", "questions-cached"),
        ([15] * 10, "missing", "questions-cached"),
        ([1] * 10, "missing", "questions-cached"),
        ([None] * 10, "missing", "cached-tokens-not-reported"),
        ([], "missing", "no-question-answered"),
    ],
)
def test_cached_prefix(cached: list[int | None], status: str, found: str) -> None:
    check = checks._check_cached_prefix([answer(tokens) for tokens in cached])
    assert (check.status, check.outcome.id) == (status, found)
