"""The layer diff in a run's folder -> its part of the report: the suite ``layers``, the error profile, the findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from assay.harness.compare.traces import compare, joined, split
from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.cause import CAUSE, foreign_cause
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF, pack_of, shadow_errors_of
from assay.harness.evidence.pack import replay_command
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.error_grids import bounds_of, depth_rows, layers_result, truth_rows
from assay.harness.judge.layer_verdict import LayerEvidence, findings, judge_layers, metrics_of
from assay.harness.judge.report import LayersResult, SuiteResult
from assay.harness.judge.truth_bounds import compare_with_noise
from assay.harness.sides import ROLES
from assay.harness.text import one_line
from assay.harness.verdict import Finding


@dataclass(frozen=True)
class LayerDiff:
    """The layer diff of a run.

    Attributes:
        errors: the candidate's errors on the reference's inputs.
        result: own errors by layer and condition.
        suite: the suite's verdict.
        findings: what the replay named, and what the cells show.
    """

    errors: ShadowErrors
    result: LayersResult
    suite: SuiteResult
    findings: tuple[Finding, ...]


def layer_diff(folder: RunFolder, spec: RunSpec) -> LayerDiff | None:
    """Judge what the layer diff left; None without one.

    Raises:
        EvidenceError: a file is damaged.
    """
    errors = shadow_errors_of(folder)
    if errors is None:
        return None
    replay, pack = folder.read(CAUSE), pack_of(folder)
    foreign = foreign_cause(replay, spec.candidate.backend, errors.headers[0].phases, pack) if replay else ""
    evidence = LayerEvidence(errors, compare_with_noise(errors), replay, foreign)
    rows = truth_rows(evidence.against)
    bounds = bounds_of(evidence.against)
    not_traced: tuple[str, ...] = ()
    try:
        free = _free_running(folder, errors)
    except EvidenceError as error:  # own errors and the cause do not depend on it
        free, not_traced = ({}, {}), (f"inherited error: {error.found}",)
    result = layers_result(
        errors,
        bounds,
        depth=depth_rows(errors, bounds, *free, rows),
        pack=str(pack) if pack else "",
        not_observed=(*not_traced, *_untested(errors)),
        against_truth=rows,
    )
    named = replay.findings if replay and not foreign else ()
    again = replay_command(pack, spec.candidate.backend) if pack else folder.manifest().command
    return LayerDiff(errors, result, _suite(spec, evidence), (*named, *findings(evidence, again)))


def _untested(errors: ShadowErrors) -> Iterator[str]:
    for header in errors.headers:
        for layer, why in sorted(header.untested.items()):
            yield f"truth, layer {layer}: a call could not be compared with it: {one_line(why)}"


def _free_running(folder: RunFolder, errors: ShadowErrors) -> tuple[dict[int, float], dict[int, float]]:
    """Compute by layer the error of its output in a free-running candidate, and its inherited part; empty if not traced."""
    records = {role: folder.read(LAYER_DIFF, role) for role in ROLES}
    if not any(records.values()):
        return {}, {}
    # Prefer the candidate's own server: there it wrote the keys and values too.
    where = {role: role if records[role] else next(r for r in ROLES if records[r]) for role in ROLES}
    labels = next(record.traced for record in records.values() if record)
    pairs = [
        [read_trace(folder.server_folder(where[role]), f"{role}-{label}", folder.nonce) for role in ROLES]
        for label in labels
    ]
    free = joined([compare(reference, candidate) for reference, candidate in pairs])
    parts = split(free.layers, free.relative_l1, errors.table(("layer",)).relative_l1)
    by_layer = [dict(zip(parts.layers, map(float, values), strict=True)) for values in (parts.total, parts.inherited)]
    return by_layer[0], by_layer[1]


def _suite(spec: RunSpec, evidence: LayerEvidence) -> SuiteResult:
    judged = judge_layers(spec, evidence)
    return SuiteResult(
        id="layers",
        title="Own error",
        synthetic=spec.workload.synthetic,
        verdict=judged.verdict,
        why=judged.why,
        p_regression=judged.p_regression,
        metrics=tuple(metrics_of(spec, evidence)),
        decided_by=judged.decided_by,
    )
