"""Timed requests -> the times of each block, and ratios of blocks that were played side by side.

A *load* is a shape at a concurrency; a *block* is a few requests of one load on one server. In each round, each role plays every
load twice, in random order. Every ratio is a ratio of times (for throughput, seconds per token), so that above 1 is always slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import get_args

from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import Timing
from assay.harness.judge.latency_result import TimeMetric
from assay.harness.sides import Role
from assay.harness.stats.ratio import warm_up

METRICS: tuple[TimeMetric, ...] = get_args(TimeMetric)
"""The metrics. Input and output throughput are one: with fixed lengths, both are the block's seconds."""
Load = tuple[str, int]
"""Shape, by name, and concurrency."""


class ReadAtOnce(EvidenceError):
    """The tokens of a block were read at once, too late to time them."""


@dataclass(frozen=True)
class Block:
    """The times of one block; medians are over its requests.

    Attributes:
        again: whether it is the role's second block of the round.
        order: position in the order of blocks.
        ttft_s: median time to first token.
        itl_s: median of the requests' mean inter-token latencies. (A median of single gaps would be wrong by any factor if a
            busy client reads several chunks at once, since most gaps are then nearly 0.)
        itl_p99_s: 99th percentile (nearest rank) of the single gaps of all requests.
        e2e_s: median latency of a complete answer.
        seconds: from sending the first request to the end of the last one.
        cached_tokens: prompt tokens from the prefix cache, or None if the server does not report them.
        means: means over the requests, by metric, of the times whose medians `time` returns.
    """

    role: Role
    again: bool
    round: int
    order: int
    load: Load
    ttft_s: float
    itl_s: float
    itl_p99_s: float
    e2e_s: float
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    means: Mapping[TimeMetric, float]

    def time(self, metric: TimeMetric) -> float:
        """Return the seconds of a metric; for throughput, seconds per token of the answer."""
        times = {
            "ttft": self.ttft_s,
            "itl": self.itl_s,
            "e2e": self.e2e_s,
            "throughput": self.seconds / self.output_tokens,
        }
        return times[metric]


def _gaps(timing: Timing) -> list[float]:
    """Return the inter-token latencies of a request: each gap between chunks, divided evenly among the later chunk's tokens."""
    chunks = list(zip(timing.chunk_s, timing.chunk_tokens, strict=True))
    return [
        (later - earlier) / (tokens - before)
        for (earlier, before), (later, tokens) in pairwise(chunks)
        for _ in range(tokens - before)
    ]


def blocks_of(timings: Iterable[Timing]) -> list[Block]:
    """List the blocks in the order in which they were played.

    Raises:
        ReadAtOnce: most answers of a block came in one chunk, or at one instant, so inter-token latency is unknown.
    """
    ordered = sorted(timings, key=lambda timing: (timing.block, timing.index))
    return [_block(list(group)) for _, group in groupby(ordered, key=lambda timing: timing.block)]


def _block(timings: Sequence[Timing]) -> Block:
    first, by_request = timings[0], [_gaps(timing) for timing in timings]
    all_gaps = sorted(chain(*by_request))
    gaps = [statistics.fmean(own) for own in by_request if own] or [0.0]
    itl_s, seconds = (
        statistics.median(gaps),
        max(t.sent_s + t.latency_s for t in timings) - min(t.sent_s for t in timings),
    )
    if itl_s <= 0:  # on a busy machine, chunks are held back and read together
        raise ReadAtOnce(
            f"Block {first.block}: most answers came in one chunk, or at one instant, so inter-token latency is unknown.",
            "answers that are streamed token by token",
            "remove the cause of the delay: a proxy, --stream-interval, or other work on this machine",
        )
    reported = [timing.cached_tokens for timing in timings if timing.cached_tokens is not None]
    return Block(
        role=first.role,
        again=first.again,
        round=first.round,
        order=first.block,
        load=(first.shape, first.concurrency),
        ttft_s=statistics.median(timing.chunk_s[0] for timing in timings),
        itl_s=itl_s,
        itl_p99_s=all_gaps[math.ceil(0.99 * len(all_gaps)) - 1],
        e2e_s=statistics.median(timing.latency_s for timing in timings),
        seconds=seconds,
        input_tokens=sum(timing.prompt_tokens for timing in timings),
        output_tokens=(tokens := sum(timing.completion_tokens for timing in timings)),
        cached_tokens=sum(reported) if reported else None,
        means={
            "ttft": statistics.fmean(timing.chunk_s[0] for timing in timings),
            "itl": statistics.fmean(gaps),
            "e2e": statistics.fmean(timing.latency_s for timing in timings),
            "throughput": seconds / tokens,
        },
    )


@dataclass(frozen=True)
class SideBySide:
    """One load in one round: two blocks of each role, played one after the other in random order."""

    reference: tuple[Block, Block]
    candidate: tuple[Block, Block]

    @property
    def round(self) -> int:
        """Number of the round."""
        return self.reference[0].round

    def slowdowns(self, metric: TimeMetric) -> list[float]:
        """Return log(candidate / reference) of both pairs.

        Either block of a pair may have come first, so that a disturbance is as likely to raise the ratio as to lower it.
        """
        pairs = zip(self.candidate, self.reference, strict=True)
        return [math.log(theirs.time(metric) / ours.time(metric)) for theirs, ours in pairs]

    def means(self, metric: TimeMetric) -> list[float]:
        """Return the means of the four blocks, the reference's first."""
        return [block.means[metric] for block in (*self.reference, *self.candidate)]

    def floor(self, metric: TimeMetric) -> float:
        """Compute log(reference again / reference)."""
        first, again = self.reference
        return math.log(again.time(metric) / first.time(metric))


def side_by_side(blocks: Iterable[Block]) -> dict[Load, list[SideBySide]]:
    """Group blocks played side by side, by load, in the order of rounds; incomplete rounds are left out."""
    by_load: dict[Load, dict[int, dict[tuple[Role, bool], Block]]] = {}
    for block in blocks:
        by_load.setdefault(block.load, {}).setdefault(block.round, {})[block.role, block.again] = block
    complete: dict[Load, list[SideBySide]] = {}
    for load, rounds in by_load.items():
        complete[load] = [
            SideBySide(
                (parts["reference", False], parts["reference", True]),
                (parts["candidate", False], parts["candidate", True]),
            )
            for _, parts in sorted(rounds.items())
            if len(parts) == 4
        ]
    return complete


def first_warm(played: Mapping[Load, Sequence[SideBySide]]) -> int:
    """Return the first round that counts: the number of warm-up rounds, by either role's seconds in all loads."""
    return warm_up(
        [
            [[sum(block.seconds for block in rounds.reference) for rounds in load] for load in played.values()],
            [[sum(block.seconds for block in rounds.candidate) for rounds in load] for load in played.values()],
        ]
    )


def throughput(blocks: Sequence[Block]) -> float:
    """Compute the answers' tokens per second over blocks played one after the other, or 0 without blocks."""
    seconds = sum(block.seconds for block in blocks)
    return sum(block.output_tokens for block in blocks) / seconds if seconds else 0.0
