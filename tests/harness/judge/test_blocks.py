from __future__ import annotations

import math
from typing import Any

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import Timing
from assay.harness.judge.blocks import blocks_of, side_by_side, throughput
from assay.harness.sides import Role


def timing(
    role: Role = "reference",
    again: bool = False,
    block: int = 0,
    round: int = 0,
    index: int = 0,
    scale: float = 1.0,
    sent_s: float = 100.0,
    cached: int | None = 8,
) -> Timing:
    """Five tokens in three chunks: after 20 ms one, after 30 ms three, after 70 ms one; the end after 71 ms."""
    return Timing(
        role=role,
        again=again,
        round=round,
        block=block,
        shape="short",
        concurrency=2,
        index=index,
        sent_s=sent_s,
        latency_s=0.071 * scale,
        chunk_s=(0.020 * scale, 0.030 * scale, 0.070 * scale),
        chunk_tokens=(1, 4, 5),
        prompt_tokens=10,
        completion_tokens=5,
        cached_tokens=cached,
    )


def test_the_times_of_a_block() -> None:
    (block,) = blocks_of([timing(index=1, sent_s=100.05), timing(index=0)])
    assert block.ttft_s == pytest.approx(0.020)
    assert block.itl_s == pytest.approx(0.050 / 4)
    assert block.itl_p99_s == pytest.approx(0.040)
    assert block.e2e_s == pytest.approx(0.071)
    assert block.seconds == pytest.approx(0.121), "from the first sending to the last end"
    assert block.time("throughput") == pytest.approx(0.121 / 10)
    assert block.time("throughput") == pytest.approx(0.121 / 10)
    assert block.cached_tokens == 16
    assert [blocks_of([timing(cached=each)])[0].cached_tokens for each in (0, None)] == [0, None]
    assert throughput([block, *blocks_of([timing(block=1, sent_s=500.0)])]) == pytest.approx(15 / (0.121 + 0.071))


def test_chunks_that_a_busy_client_read_at_once_do_not_change_the_inter_token_latency() -> None:
    bunched = timing().model_copy(update={"chunk_s": (0.020, 0.0699, 0.070)})
    assert blocks_of([bunched])[0].itl_s == pytest.approx(blocks_of([timing()])[0].itl_s)


@pytest.mark.parametrize(
    ("chunks", "says"),
    [({"chunk_s": (0.07,), "chunk_tokens": (5,)}, "in one chunk"), ({"chunk_s": (0.07, 0.07, 0.07)}, "at one instant")],
)
def test_answers_that_came_at_once_have_no_inter_token_latency(chunks: dict[str, Any], says: str) -> None:
    with pytest.raises(EvidenceError, match=says):
        blocks_of([timing().model_copy(update=chunks)])


def test_ratios_are_of_blocks_of_the_same_round() -> None:
    scales: list[tuple[Role, bool, float]] = [
        ("reference", False, 1.0), ("candidate", False, 1.5), ("reference", True, 1.2), ("candidate", True, 1.2)
    ]  # fmt: skip
    played = [
        timing(role, again, block=10 * round + number, round=round, scale=(1 + round) * scale)
        for round in range(2)
        for number, (role, again, scale) in enumerate(scales)
    ]
    found = side_by_side(blocks_of(played))["short", 2]
    assert [one.round for one in found] == [0, 1]
    for one in found:
        for metric in ("ttft", "itl", "e2e", "throughput"):
            assert [math.exp(log) for log in one.slowdowns(metric)] == pytest.approx([1.5, 1.0])
            assert math.exp(one.floor(metric)) == pytest.approx(1.2)


def test_what_was_cut_off_in_the_middle_is_left_out() -> None:
    cut: list[Timing] = [timing(block=0), timing("candidate", block=1), timing(again=True, block=2)]
    assert side_by_side(blocks_of(cut)) == {("short", 2): []}
