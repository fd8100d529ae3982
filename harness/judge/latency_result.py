"""The part of a report on latency: ratios of times, and everything a reader needs to believe them."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from assay.harness.judge.call_counts import CallSummary
from assay.harness.schema import Part
from assay.harness.statement import Statement, Worded
from assay.harness.verdict import WORST_FIRST, Check, Finding, Verdict

TimeMetric = Literal["ttft", "itl", "e2e", "throughput"]
"""The times measured for an answer."""


class _OfLoad(Part):
    """Base of the measurements of one load."""

    shape: str
    concurrency: int

    @property
    def where(self) -> str:
        """Describe the load, such as "short, 4 in flight"."""
        return f"{self.shape}, {self.concurrency} in flight"


class LatencyRow(_OfLoad, Worded):
    """One metric of one load: the ratio candidate over reference, above 1 is slower."""

    words = ("title",)

    metric: TimeMetric
    reference_s: float = Field(description="median seconds; for throughput, seconds per token of the answer")
    candidate_s: float
    ratio: float | None = Field(description="Hodges and Lehmann's estimate, or null if nothing was measured")
    low: float | None
    high: float | None = Field(description="null if too few ratios were measured")
    mean: float | None = Field(None, description="ratio of the means over all requests, which rare slow requests raise")
    floor: float | None = Field(description="the reference over itself")
    floor_low: float | None
    floor_high: float | None
    verdict: Verdict
    why: Statement = Field(description="with the number of ratios, two of each round, and Holm's p value")


class LoadRow(_OfLoad):
    """One load: its requests and throughputs."""

    prompt_tokens: int = Field(description="tokens of each prompt, or of the longest one")
    shortest_tokens: int = Field(0, description="tokens of the shortest prompt, or 0 if all have the same length")
    output_tokens: int
    shared_tokens: int
    rounds: int = Field(description="rounds that count; each has two blocks of either role")
    reference_output_throughput: float = Field(description="answer tokens per second")
    candidate_output_throughput: float
    reference_itl_p99_s: float = Field(description="99th percentile of inter-token latency, the median over blocks")
    candidate_itl_p99_s: float
    reference_cached: float | None = Field(
        description="share of the prompt tokens that came from the prefix cache, or null if the server does not report it"
    )
    candidate_cached: float | None


class LatencyResult(Part):
    """A complete bench: both servers of a run, timed side by side."""

    verdict: Verdict
    device: str
    eager: bool = Field(description="whether both servers ran without CUDA graphs")
    bound: float
    policy: str = Field(
        "", description='the line of policy that sets the bound, such as "latency_bound = 1.1 (default)"'
    )
    note: Statement | None = Field(None, description="why these ratios cannot pass, or null")
    rounds: int
    warm_up_rounds: int
    seconds: float = Field(description="seconds in which a server was loaded")
    loads: tuple[LoadRow, ...]
    rows: tuple[LatencyRow, ...]
    reference_calls: tuple[CallSummary, ...] = Field((), description="attention calls counted in the server")
    candidate_calls: tuple[CallSummary, ...] = ()
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    reproduce: str = Field(description="the command that repeats the timing alone")


def worst_ratio(latency: LatencyResult) -> LatencyRow | None:
    """Return the deciding ratio: among those with the worst verdict, the one whose interval reaches furthest up."""
    return max(
        latency.rows,
        key=lambda row: (-WORST_FIRST.index(row.verdict), math.inf if row.high is None else row.high, row.ratio or 0.0),
        default=None,
    )
