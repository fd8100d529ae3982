"""``report.json``: the verdict and everything a reader needs to believe it. Every other report is rendered from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from assay.harness.errors import EvidenceError
from assay.harness.evidence.envelope import EngineLimits, Ranges
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.answers import ConditionRow, Tally
from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.decide import decide
from assay.harness.judge.greedy_texts import TextDivergence
from assay.harness.judge.judgement import WHOLE, Judgement, Metric, SuiteVerdict
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.judge.logits import LogitsRow
from assay.harness.judge.traces import PartingRow
from assay.harness.schema import RULE, Part, read_json
from assay.harness.sides import Role
from assay.harness.statement import Statement
from assay.harness.text import listed
from assay.harness.verdict import Check, Finding

__all__ = [  # all parts of a report, wherever they are defined
    "CallSummary", "Check", "ConditionRow", "DepthRow", "DivergenceRow", "EnvelopeResult", "EnvelopeRow", "Environment",
    "ErrorGrid", "FailureResult", "FaultSeen", "Finding", "Flip", "KernelRow", "LatencyResult", "LayersResult", "LogitsRow",
    "Metric", "PassKernels", "Report", "SensitivityResult", "ServerSummary", "SuiteResult", "Tally", "TruthRow",
]  # fmt: skip

NOT_FINITE: Literal["not finite"] = "not finite"
OwnError = FiniteFloat | Literal["not finite"] | None
"""A relative L1 error in JSON: a number, `NOT_FINITE` if an output is not, or null (never zero) if nothing was observed."""


def out_of_bounds(error: OwnError, bound: float | None) -> bool:
    """Return True if rounding does not explain an error. Non-finite errors exceed any bound; without a bound none does."""
    if error is None or bound is None:
        return False
    return error == NOT_FINITE or error > bound


def excess(error: OwnError, bound: float | None) -> float:
    """Express an error as a multiple of its bound, for sorting: below 0 if nothing was observed, infinite if not finite."""
    if error is None:
        return -1.0
    return math.inf if error == NOT_FINITE else error / (bound or 1.0)


class ServerSummary(Part):
    """One role's server, with the proof of what it ran."""

    backend: str
    engine: str = Field(description='such as "SGLang 0.5.23 on cpu"')
    claimed_phases: tuple[str, ...] = Field(description="phases that this backend's own kernel claims to compute")
    calls: tuple[CallSummary, ...] = Field(description="empty if assay could not instrument the engine")
    startup_s: float | None = None
    launch_command: str = ""


class KernelRow(Part):
    """A kernel that ran in a traced pass."""

    name: str
    kind: Literal["device", "triton", "operator"] = Field(
        description="a kernel on a GPU, a Triton function that the interpreter ran, or an operator of PyTorch"
    )
    launches: int
    attention: bool | None = Field(
        description="whether an attention call launched it; null: unknown, as in a CUDA graph"
    )
    of: Literal["reference", "candidate", "both", ""] = Field(
        description="the role whose backend is known to launch kernels of this name, or empty"
    )


class PassKernels(Part):
    """The kernels of one traced pass."""

    role: Role
    phase: str
    cached_prefix: bool
    kernels: tuple[KernelRow, ...]


class Environment(Part):
    """The environment of the run."""

    device: str
    hardware: str
    python: str
    packages: dict[str, str]
    git: str = Field(description="commit and whether the tree was clean, or empty outside a repository")
    model: str
    model_hash: str = Field(description="SHA-256 over the model folder's weights and tokenizer")
    argument_differences: dict[str, tuple[str, str]] = Field(
        description="server arguments that differ between the roles beyond the treatment: (reference, candidate)"
    )
    derived_arguments: dict[str, tuple[str, str]] = Field(
        {}, description="those that differ because the engine derives them from the treatment: (reference, candidate)"
    )


class Flip(Part):
    """A question with both answers, which one role got right, or both or none. Texts are a model's: never trust them."""

    item: str
    group: str
    direction: Literal["lost", "gained", "both right", "both wrong"]
    prompt: str
    expected: str
    reference_text: str
    candidate_text: str
    reference_parsed: str | None
    candidate_parsed: str | None
    candidate_cached_tokens: int | None


class DivergenceRow(TextDivergence):
    """A greedy prompt on which the roles' texts diverge, with both texts."""

    item: str
    prompt: str
    reference_text: str
    candidate_text: str
    candidate_cached_tokens: int | None


class SuiteResult(SuiteVerdict):
    """A suite's verdict with its evidence."""

    synthetic: bool = Field(description="whether its questions are synthetic")
    metrics: tuple[Metric, ...] = ()
    tallies: tuple[Tally, ...] = ()
    conditions: tuple[ConditionRow, ...] = ()
    flips: tuple[Flip, ...] = ()
    steady: tuple[Flip, ...] = Field((), description="the first questions that both roles got right, or wrong")
    divergences: tuple[DivergenceRow, ...] = ()
    logits: tuple[LogitsRow, ...] = ()
    decided_by: str | None = Field(
        None,
        description="id of the metric that decided, or empty if none did, for example because a finding did",
    )

    @property
    def deciding_metric(self) -> Metric | None:
        """The metric that decided, or, if a report does not name it, the first with a bound."""
        if self.decided_by is None:
            return next((metric for metric in self.metrics if metric.bound is not None), None)
        return next((metric for metric in self.metrics if metric.id == self.decided_by), None)


class ErrorGrid(Part):
    """Errors by layer and one more dimension: a heat map. A value is the worst of the finest cells that it covers."""

    id: str = Field("", description='stable, such as "extend-cached-prefix-by-head"')
    where: str = Field(description='the calls that it covers, such as "extend, cached prefix"')
    columns: Literal["head", "prefix", "position", "batch"]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[OwnError, ...], ...] = Field(
        description='relative L1, rows x columns; null: not observed; "not finite": an output is not'
    )
    bounds: tuple[FiniteFloat | None, ...] = Field(
        description="of each row: the relative L1 that rounding explains, above which a cell is out of bounds; null: unknown"
    )

    @model_validator(mode="after")
    def _is_rectangular(self) -> Self:
        shape = (len(self.row_labels), len(self.column_labels))
        if len(self.bounds) != shape[0] or [len(row) for row in self.values] != [shape[1]] * shape[0]:
            raise ValueError(f"values and bounds do not fit {shape[0]} row and {shape[1]} column labels")
        return self

    def observed(self) -> Iterator[tuple[str, str, OwnError, float | None]]:
        """Yield the labels of the row and the column, the error and the bound of each cell that was observed."""
        for row, bound, errors in zip(self.row_labels, self.bounds, self.values, strict=True):
            for column, error in zip(self.column_labels, errors, strict=True):
                if error is not None:
                    yield row, column, error, bound


class DepthRow(Part):
    """One layer of the error profile along depth, in relative L1."""

    layer: int
    own: OwnError = Field(description="worst finest cell: the candidate on the reference's own q, k and v")
    whole: OwnError = Field(
        None,
        description="error of the layer's whole output against the reference's: with `inherited` it makes up `total`",
    )
    total: OwnError = Field(None, description="the layer's output in a free-running candidate against the reference's")
    inherited: OwnError = Field(None, description="the part of the total error that comes from the layers before")
    bound: FiniteFloat | None = Field(None, description="the error that rounding explains")
    out_of_bounds: bool = Field(description="whether the layer is a source of error")


class TruthRow(Part):
    """A layer in a phase that the candidate claims, against the truth on sampled queries of every call."""

    layer: int
    phase: str
    cells: int = Field(description="cells (head, condition) that were compared")
    own: OwnError = Field(description="relative L1 of the cell that is nearest to its bound or farthest beyond it")
    bound: FiniteFloat | None = Field(description="the error that rounding explains in that cell")
    gain: OwnError = Field(description="slope of the output on the truth, minus 1, over all heads; without its sign")
    gain_bound: FiniteFloat | None = Field(description="the gain that rounding explains")
    reference_own: OwnError = Field(description="the same as `own` for the reference")
    reference_bound: FiniteFloat | None
    out_of_bounds: bool = Field(description="whether any cell, or the gain of any head, is out of bounds")


class LayersResult(Part):
    """The layer diff: errors of every layer on the reference's inputs."""

    reference: str
    candidate: str
    phases: tuple[str, ...] = Field(description="phases that the candidate computes")
    layers: int
    heads: int
    passes: int = Field(description="forward passes in which the candidate ran as a shadow of the reference")
    sources: tuple[int, ...] = Field(description="layers whose error is out of bounds")
    grids: tuple[ErrorGrid, ...]
    depth: tuple[DepthRow, ...]
    not_observed: tuple[Statement, ...] = Field(description='such as "phase-not-computed"')
    pack: str = Field("", description="folder of the replay pack, if any")
    candidate_errors: tuple[Statement, ...] = Field((), description="calls that the candidate did not compute")
    against_truth: tuple[TruthRow, ...] = Field((), description="by phase and layer")


class EnvelopeRow(Part):
    """A condition, and the calls under it that were compared."""

    phase: str
    condition: str = Field(description='id of the condition, such as "new-tokens"')
    title: str
    label: str = Field(description='bucket or kind, such as "129-512"')
    calls: int = Field(description="compared calls, in the layer with the fewest")
    wanted: bool = Field(description="whether the policy requires such a call")


class EnvelopeResult(Part):
    """The coverage of a verdict: the conditions of the calls that were compared in every layer, as counted."""

    policy: str = Field(description='the line of policy, such as "envelope_tokens = 512 (default)"')
    claimed: tuple[str, ...] = Field(description="phases that the candidate claims")
    features: tuple[str, ...] = Field(
        (),
        description="features that compared calls asked for, and those that changed an output in each layer that asked",
    )
    unfelt: dict[str, tuple[str, ...]] = Field(
        {}, description="features that changed no output of some layer by more than rounding -> the phases"
    )
    operations: tuple[str, ...] = Field(
        (),
        description='operations of the model\'s layers, such as "attention", or empty if no server reported them',
    )
    limits: EngineLimits
    compared: dict[str, dict[str, Ranges]] = Field(
        description="phase -> condition, such as a length or the size of a batch -> its values in calls of the shadow"
    )
    served: dict[str, dict[str, Ranges]] = Field(
        default_factory=dict, description="the same for the candidate's own server, if it was compared"
    )
    not_in_shadow: tuple[str, ...] = Field(
        (),
        description="settings of the candidate, other than its backend, that its backend in the shadow did not have",
    )
    served_in_graphs: bool = Field(False, description="whether its decode ran in CUDA graphs")
    reached: dict[str, dict[str, int]] = Field(
        description="phase -> condition -> the largest value that every layer met; of lengths, the largest before the first gap"
    )
    served_reached: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="the same for the candidate's own server, if it was compared"
    )
    gaps: tuple[Statement, ...] = Field((), description="required lengths that some layer did not compare")
    rows: tuple[EnvelopeRow, ...]

    def calls(self, phase: str, condition: str, label: str) -> int:
        """Return the compared calls under a condition, in the layer with the fewest."""
        key = (phase, condition, label)
        return next((row.calls for row in self.rows if (row.phase, row.condition, row.label) == key), 0)


class FaultSeen(Part):
    """Whether a suite detected a fault, with the numbers."""

    suite: Literal["accuracy", "logits", "layers"]
    seen: bool
    numbers: Statement = Field(description='such as "7 of 8 questions lost, p = 0.01"')


class SensitivityResult(Part):
    """Whether each suite detected a fault that was seeded in the running servers."""

    fault: str = Field(description="id of the fault")
    parts: tuple[FaultSeen, ...]


class Report(Judgement):
    __doc__ = f"A complete run. {RULE}"

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    run_id: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    reference: ServerSummary
    candidate: ServerSummary
    environment: Environment
    checks: tuple[Check, ...]
    suites: tuple[SuiteResult, ...]
    findings: tuple[Finding, ...]
    causes: int = Field(description="the number of leading findings that describe bugs of the kernel")
    left_out: tuple[str, ...] = Field((), description="suites of a whole run that were not requested")
    reproduce: str = Field(description="the command that repeats this run")
    treatment: dict[str, tuple[str, str]] = Field(
        description="requested differences between the roles: (reference, candidate) by name of the setting"
    )
    layers: LayersResult | None = Field(None, description="null without a layer diff")
    parting: PartingRow | None = Field(
        None, description="where the two servers first part on a sequence, or null where they were not both traced"
    )
    envelope: EnvelopeResult | None = Field(None, description="coverage of the layer diff, or null without one")
    sensitivity: SensitivityResult | None = Field(
        None, description="whether the suites detected a seeded fault, or null if none was seeded"
    )
    latency: LatencyResult | None = Field(None, description="null if nothing was timed")
    kernels: tuple[PassKernels, ...] = Field(
        (), description="the kernels that ran in the traced passes of each role, as proof that its own kernel ran"
    )
    failure: FailureResult | None = Field(None, description="the failure that ended the run early, or null")

    @property
    def _about(self) -> str:
        return f"{self.candidate.backend} against {self.reference.backend}, run {self.run_id}"

    @classmethod
    def load(cls, run: str | Path) -> Report:
        """Read the report of a run from its folder, or a ``report.json``. Nothing is judged again.

        Raises:
            UsageError: there is no such folder, or it is not a run.
            EvidenceError: the run has no report, or one that cannot be read.
        """
        from assay.harness.judge.history import report_of

        return report_of(Path(run))

    @property
    def asked(self) -> list[str]:
        """The suites that the run was asked for, or that have a separate part."""
        timed = ["latency"] if self.latency is not None else []
        return [*(suite for suite in WHOLE if suite not in self.left_out), *timed]


def read_report(path: Path) -> Report:
    """Read a ``report.json``.

    Raises:
        EvidenceError: the file is missing, is not a report of this schema, or its verdict does not follow.
    """
    rebuild = "rebuild it: assay report RUN"
    report = read_json(path, Report, rebuild)
    absent = [suite for suite in report.asked if suite not in {each.id for each in report.suites}]
    if report.verdict not in (
        "error",
        decide((suite.verdict for suite in report.suites), report.checks, report.failure),
    ):
        contradicted = "which contradicts its suites and checks"
    elif report.verdict == "pass" and absent:
        contradicted = f"and has no result of {listed(absent)}, which the run was asked for"
    else:
        return report
    raise EvidenceError(f"{path} says {report.verdict}, {contradicted}.", "a report as it was written", rebuild)
