"""``bench.json``: what a bench came to, with everything a reader needs to believe it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.judge.calls import CallSummary
from assay.harness.verdict import Check, Finding, Part, Verdict

SCHEMA: Literal["assay.bench/1"] = "assay.bench/1"


class LatencyRow(Part):
    """One metric of one shape at one concurrency: the ratio candidate over reference, above 1 is slower."""

    shape: str
    concurrency: int
    metric: Literal["ttft", "itl", "e2e", "throughput"]
    title: str = Field(description="the metric in words")
    reference_s: float = Field(description="median seconds; of throughput the seconds a token of the answer")
    candidate_s: float
    ratio: float | None = Field(description="Hodges and Lehmann's estimate; null where nothing was measured")
    low: float | None
    high: float | None = Field(description="null where too few ratios were measured")
    floor: float | None = Field(description="the reference over itself")
    floor_low: float | None
    floor_high: float | None
    p: float = Field(description='of "at most the bound", corrected for the number of ratios (Holm)')
    bound: float
    verdict: Verdict
    why: str
    ratios: int = Field(description="ratios measured; a round gives two")
    ratios_effective: float = Field(description="independent ratios that they are worth")
    ratios_needed: int | None = Field(description="for an inconclusive verdict; a round gives two")


class LoadRow(Part):
    """One shape at one concurrency: what was asked, and the throughputs."""

    shape: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    concurrency: int
    rounds: int = Field(description="rounds that count; each has two blocks of either role")
    reference_input_throughput: float = Field(description="prompt tokens a second")
    candidate_input_throughput: float
    reference_output_throughput: float = Field(description="answer tokens a second")
    candidate_output_throughput: float
    reference_itl_p99_s: float
    candidate_itl_p99_s: float
    reference_cached: float | None = Field(description="share of the prompt tokens that came from the prefix cache")
    candidate_cached: float | None


class LengthRow(Part):
    """Lengths of answers that may end when they like, in tokens."""

    prompts: int
    reference: float
    candidate: float
    longer: int
    shorter: int
    reference_cut: int
    candidate_cut: int
    p: float
    differ: bool


class LatencyResult(Part):
    """A whole bench."""

    schema_id: Literal["assay.bench/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    created: str = Field(description="ISO 8601, UTC")
    verdict: Verdict
    exit_code: int
    headline: str
    reasons: tuple[str, ...]
    reference: str
    candidate: str
    device: str
    hardware: str
    packages: dict[str, str]
    git: str
    model: str
    eager: bool = Field(description="whether both servers ran without CUDA graphs")
    engine_args: tuple[str, ...]
    bound: float
    policy: str = Field("", description='the line of policy that the bound is, such as "latency_bound = 1.1 (default)"')
    note: str = Field("", description="what must be known before a ratio is believed; empty for nothing")
    alpha: float
    rounds: int
    warm_up_rounds: int
    seconds: float = Field(description="seconds in which a server was loaded")
    loads: tuple[LoadRow, ...]
    rows: tuple[LatencyRow, ...]
    lengths: LengthRow | None
    reference_calls: tuple[CallSummary, ...] = Field((), description="attention calls counted in the server")
    candidate_calls: tuple[CallSummary, ...] = ()
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    reproduce: str


class ShapeRow(Part):
    """A kernel on calls of one shape: its time beside the reference kernel's, and its own error on the same calls."""

    phase: str
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    heads: tuple[int, int] = Field(description="q heads and kv heads")
    head_dim: int
    dtype: str
    layers: tuple[int, ...]
    repeats: int
    reference_s: float
    candidate_s: float
    ratio: float
    low: float
    high: float
    floor: float
    verdict: Verdict
    reference_tflops: float = Field(description="of the work that the right mask needs, 1e12 operations a second")
    candidate_tflops: float
    reference_share: float | None = Field(description="of the device's limit; null where none is stated")
    candidate_share: float | None
    own_error: float | None = Field(
        description="largest own error as a multiple of its bound; null if it is not finite"
    )
    right: bool


class KernelTimingResult(Part):
    """Timing a kernel without a server."""

    schema_id: Literal["assay.kernel-timing/1"] = Field("assay.kernel-timing/1", alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    verdict: Verdict
    exit_code: int
    candidate: str
    reference: str
    device: str
    bound: float
    shapes: tuple[ShapeRow, ...]
    refused: tuple[str, ...]
    findings: tuple[Finding, ...]
