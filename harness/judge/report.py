"""``report.json``: the verdict and everything a reader needs to believe it. Every other report is rendered from it."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from assay.harness.judge.calls import CallSummary
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.verdict import Check, CheckStatus, Finding, Part, Severity, Verdict

__all__ = ["Check", "CheckStatus", "Finding", "Part", "Severity", "Verdict"]

SCHEMA: Literal["assay.report/1"] = "assay.report/1"


NOT_FINITE: Literal["not finite"] = "not finite"
OwnError = FiniteFloat | Literal["not finite"] | None
"""A relative L1 error in JSON: a number; `NOT_FINITE` where an output is not; null where nothing was observed, never zero."""


def out_of_bounds(error: OwnError, bound: float | None) -> bool:
    """Whether noise does not explain an error: what is not finite is beyond any bound, and without a bound nothing is."""
    if error is None or bound is None:
        return False
    return error == NOT_FINITE or error > bound


def excess(error: OwnError, bound: float | None) -> float:
    """An error as a multiple of its bound, to order by: below zero where nothing was observed, infinite if not finite."""
    if error is None:
        return -1.0
    return math.inf if error == NOT_FINITE else error / (bound or 1.0)


class ServerSummary(Part):
    """One role's server, as it was proven to run."""

    backend: str
    engine: str = Field(description='such as "SGLang 0.5.23 on cpu"')
    claimed_phases: tuple[str, ...] = Field(description="phases that this backend's own kernel claims to compute")
    calls: tuple[CallSummary, ...] = Field(description="empty where the engine cannot be looked into")
    startup_s: float | None = None
    launch_command: str = ""


class Environment(Part):
    """Where the run took place."""

    device: str
    hardware: str
    python: str
    packages: dict[str, str]
    git: str = Field(description="commit and whether the tree was clean; empty outside a repository")
    model: str
    model_hash: str = Field(description="SHA-256 over the model folder's weights and tokenizer")
    argument_differences: dict[str, tuple[str, str]] = Field(
        description="server arguments that differ between the roles beyond the backend: (reference, candidate)"
    )


class Metric(Part):
    """A measured number with its interval and the bound that it was held against."""

    name: str
    value: float | None
    text: str = Field(description="the number as a person reads it, with its unit")
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    bound_is: Literal["least", "most"] | None = Field(
        None, description="whether the bound is the least or the most that the whole interval may reach"
    )
    policy: str = Field(
        "",
        description='where the bound comes from: a line of policy such as "margin = 0.05 (default)"; empty for no bound',
    )
    explain: str = ""


class ConditionRow(Part):
    """How both roles did on the items of one condition, by the candidate's own condition."""

    by: str = Field(description='what the items were split by, such as "cached prefix"')
    bucket: str
    items: int
    reference_right: int
    candidate_right: int
    candidate_unparsed: int


class Tally(Part):
    """One role's answers, counted apart."""

    role: Literal["reference", "candidate"]
    right: int
    wrong: int
    unparsed: int
    ran_to_limit: int = Field(description="answers cut at the token limit; counted within the other three as well")
    total: int


class Flip(Part):
    """A question that one role got right and the other did not, with both answers. Texts are a model's: never trust them."""

    item: str
    group: str
    direction: Literal["lost", "gained"]
    prompt: str
    expected: str
    reference_text: str
    candidate_text: str
    reference_parsed: str | None
    candidate_parsed: str | None
    candidate_cached_tokens: int | None


class DivergenceRow(Part):
    """A greedy prompt on which the roles' texts part."""

    item: str
    kind: Literal["tie", "close", "apart"]
    position: int = Field(description="index of the first differing token")
    gap: float | None = Field(description="log-probability gap of the two tokens there, in the reference, in nats")
    prompt: str
    reference_text: str
    candidate_text: str
    candidate_cached_tokens: int | None


class SuiteResult(Part):
    """One suite's outcome."""

    id: str
    title: str
    synthetic: bool = Field(description="whether its questions are synthetic")
    verdict: Verdict
    why: str = Field(description="one sentence: the number that decided, and the bound that it was held against")
    metrics: tuple[Metric, ...] = ()
    tallies: tuple[Tally, ...] = ()
    conditions: tuple[ConditionRow, ...] = ()
    flips: tuple[Flip, ...] = ()
    divergences: tuple[DivergenceRow, ...] = ()


class ErrorGrid(Part):
    """Own errors by layer and one more dimension: a heat map. A value is the worst of the finest cells that it covers."""

    title: str = Field(description='such as "layer x head"')
    where: str = Field(description='the calls that it is of, such as "extend, cached prefix"')
    rows: Literal["layer"] = "layer"
    columns: Literal["head", "prefix", "position", "batch"]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[OwnError, ...], ...] = Field(
        description='relative L1, rows x columns; null: not observed; "not finite": an output is not'
    )
    bounds: tuple[FiniteFloat | None, ...] = Field(
        description="of each row: the relative L1 that noise explains; what is above is out of bounds; null: not known"
    )

    @model_validator(mode="after")
    def _is_rectangular(self) -> Self:
        shape = (len(self.row_labels), len(self.column_labels))
        if len(self.bounds) != shape[0] or [len(row) for row in self.values] != [shape[1]] * shape[0]:
            raise ValueError(f"values and bounds do not fit {shape[0]} row and {shape[1]} column labels")
        return self


class DepthRow(Part):
    """One layer of the error profile along depth, in relative L1."""

    layer: int
    own: OwnError = Field(description="worst finest cell: the candidate on the reference's own q, k and v")
    total: OwnError = Field(None, description="the layer's output in a free-running candidate against the reference's")
    inherited: OwnError = Field(None, description="what the total error has from the layers before")
    bound: FiniteFloat | None = Field(None, description="the own error that noise explains")
    out_of_bounds: bool = Field(description="whether the layer is a source of error")


class WorstCall(Part):
    """The query and head with the largest error of a layer and phase."""

    layer: int
    phase: str
    head: int
    relative_l1: OwnError = Field(description="of this one query and head; the bound holds for a cell of many queries")
    bound: FiniteFloat | None
    request: str
    position: int = Field(description="of the query in its request, cached prefix included")
    prefix: int
    new: int
    sequences: int = Field(description="sequences in the call")


class LogitsRow(Part):
    """How far the candidate's next-token distributions are from the reference's, over the reference's own tokens."""

    condition: str
    positions: int
    sequences: int
    mean_kl: float | None = Field(description="KL(reference || candidate), in nats, as are the next five")
    stderr: float | None
    median: float | None
    p90: float | None = None
    p99: float | None
    p999: float | None
    max: float | None
    max_at: str = ""
    same_top: float | None = Field(description="share of positions with the same first token")
    same_top_low: float | None = None
    same_top_high: float | None = None
    rms_dp: float | None = Field(None, description="root mean square of the change of a token's probability")
    top_k: int = Field(description="the reference's most probable tokens that are told apart; all others are one")
    mass: float | None = Field(None, description="mean probability that the reference gives them")
    nonfinite: int = Field(0, description="positions with a log-probability that is not finite; in no other number")
    floor_mean_kl: float | None = Field(None, description="mean KL of the reference against itself")


class LayersResult(Part):
    """What is inside: own errors of every layer, and what they do to the logits."""

    reference: str
    candidate: str
    phases: tuple[str, ...] = Field(description="phases that the candidate computes")
    layers: int
    heads: int
    passes: int = Field(description="forward passes in which the candidate ran in the reference's shadow")
    sources: str = Field(description="layers whose own error is out of bounds, in words; empty for none")
    grids: tuple[ErrorGrid, ...]
    depth: tuple[DepthRow, ...]
    worst: tuple[WorstCall, ...]
    logits: tuple[LogitsRow, ...] = ()
    not_observed: tuple[str, ...] = Field(description='such as "decode: sage_attn does not compute it"')
    pack: str = Field("", description="folder of the replay pack; empty for none")
    candidate_errors: tuple[str, ...] = Field((), description="calls that the candidate did not compute")


class Report(Part):
    """A whole run."""

    schema_id: Literal["assay.report/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(
        populate_by_name=True, serialize_by_alias=True, json_schema_serialization_defaults_required=True
    )

    run_id: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    verdict: Verdict
    exit_code: int
    headline: str = Field(description="the verdict in one sentence")
    reasons: tuple[str, ...] = Field(description="why, most important first")
    reference: ServerSummary
    candidate: ServerSummary
    environment: Environment
    checks: tuple[Check, ...]
    suites: tuple[SuiteResult, ...]
    findings: tuple[Finding, ...]
    reproduce: str = Field(description="the command that repeats this run")
    layers: LayersResult | None = Field(None, description="null where nobody looked inside")
    latency: LatencyResult | None = Field(None, description="null where nothing was timed")
