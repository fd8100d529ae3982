"""What a run's folder holds of its layer suite -> the parts of its report: the suite's verdict, the picture, the findings."""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.collect.logit_scoring import compare_logits
from assay.harness.compare.logits import LogitsComparison, LogitsRow
from assay.harness.compare.traces import compare, joined, split
from assay.harness.config import RunSpec
from assay.harness.engines.backend import Backend
from assay.harness.errors import EvidenceError
from assay.harness.evidence import layer_diff
from assay.harness.evidence.cause import ReplayResult, read_cause
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path
from assay.harness.evidence.records import ROLES
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.evidence.trace import read_trace
from assay.harness.judge import report
from assay.harness.judge.error_grids import depth_rows, layers_result
from assay.harness.text import one_line
from assay.harness.verdict import Finding, Verdict


@dataclass(frozen=True)
class Inside:
    """What was found inside the servers of a run.

    Attributes:
        cells: what the shadow observed; None if nobody looked, or the server wrote nothing.
        result: the picture; None without cells.
        suite: the suite's outcome; None if nobody looked.
        findings: what the replay named.
    """

    cells: ShadowErrors | None
    result: report.LayersResult | None
    suite: report.SuiteResult | None
    findings: tuple[Finding, ...]


def inside(folder: RunFolder, spec: RunSpec) -> Inside:
    """Read what the layer suite and the scoring of logits left.

    Raises:
        EvidenceError: a file is damaged.
    """
    cells = layer_diff.own_errors_of(folder)
    if cells is None:
        return Inside(None, None, None, ())
    replay = read_cause(folder)
    logits = _logits(folder)
    bounds = {(one.layer, one.phase): one.bound for one in replay.bounds} if replay else {}
    pack = layer_diff.pack_of(folder)
    not_traced: tuple[str, ...] = ()
    try:
        free = _free_running(folder, cells)
    except EvidenceError as error:  # own errors and the cause stand without it
        free, not_traced = ({}, {}), (f"inherited error: {error.found}",)
    result = layers_result(
        cells,
        bounds,
        depth=depth_rows(cells, bounds, *free),
        logits=[_logits_row(row) for row in logits.rows] if logits else [],
        pack=str(pack) if pack else "",
    )
    unseen = (*result.not_observed, *not_traced, *(logits.not_observed if logits else ()))
    result = result.model_copy(update={"not_observed": unseen})
    suite = _suite(spec, result, cells, replay)
    return Inside(cells, result, suite, replay.findings if replay else ())


def _free_running(folder: RunFolder, cells: ShadowErrors) -> tuple[dict[int, float], dict[int, float]]:
    """By layer: what its output is off by when the candidate runs free, and how much of that it inherited; empty if not traced."""
    looked = {role: layer_diff.read_record(folder, role) for role in ROLES}
    if all(one is None for one in looked.values()):
        return {}, {}
    # The candidate's own server, where there is one: it writes keys and values by itself.
    where = {role: role if looked[role] else next(r for r in ROLES if looked[r]) for role in ROLES}
    labels = next(one.traced for one in looked.values() if one)
    pairs = [[read_trace(folder.server_folder(where[role]), f"{role}-{label}") for role in ROLES] for label in labels]
    free = joined([compare(reference, candidate) for reference, candidate in pairs])
    parts = split(free.layers, free.relative_l1, cells.table(("layer",)).relative_l1)
    named = [dict(zip(parts.layers, map(float, values), strict=True)) for values in (parts.total, parts.inherited)]
    return named[0], named[1]


def _logits(folder: RunFolder) -> LogitsComparison | None:
    scored = all(logits_path(folder.path, role, 0).exists() for role in ROLES)
    return compare_logits(folder.path) if scored else None


def _logits_row(row: LogitsRow) -> report.LogitsRow:
    return report.LogitsRow(
        **{name: value for name, value in vars(row).items() if name in report.LogitsRow.model_fields}
    )


def _suite(
    spec: RunSpec, result: report.LayersResult, cells: ShadowErrors, replay: ReplayResult | None
) -> report.SuiteResult:
    verdict, why = judge_layers(spec, result, cells, replay)
    metrics = [] if replay is None else [_worst(replay)]
    return report.SuiteResult(
        id="layers",
        title="Layers: own error",
        synthetic=spec.synthetic,
        verdict=verdict,
        why=why,
        metrics=(*metrics, *(_kl(row) for row in result.logits)),
    )


def judge_layers(
    spec: RunSpec, result: report.LayersResult, cells: ShadowErrors, replay: ReplayResult | None
) -> tuple[Verdict, str]:
    """Whether the candidate's own error is within what noise explains, in every replayed call.

    *regression*: a replayed call is out of bounds or behaves otherwise wrongly, or an own error is above the policy's bound of the
    kernel's family; *inconclusive*: nothing was replayed, the candidate did not compute a call, or no call had a cached prefix.
    """
    if replay is None:
        return "inconclusive", "No recorded call was replayed, so no own error was held against a bound."
    serious = [finding for finding in replay.findings if finding.severity != "info"]
    if serious:
        return "regression", f"{one_line(serious[0].where)}: {one_line(serious[0].diagnosis, 300)}."
    # Only where the policy has a bound: a report can be made where the kernel cannot be imported.
    family = family_of(spec.candidate) if spec.bounds else ""
    if family in spec.bounds:
        largest = max((row.own for row in result.depth if isinstance(row.own, float)), default=0.0)
        if not largest <= spec.bounds[family]:
            return "regression", f"The largest own error is {largest:.3g}, above {spec.policy_line(family)}."
    if cells.failed_calls:
        return "inconclusive", f"The candidate did not compute a call: {one_line(cells.failed_calls[0].text)}."
    calls = f"{replay.calls} of {replay.recorded} recorded calls"
    measured = f"the worst own error is {replay.worst:.2g} of what noise explains, in {calls}"
    if not replay.with_prefix:
        return "inconclusive", f"No recorded call had a cached prefix; {measured}."
    return "pass", f"{measured[0].upper()}{measured[1:]}, {replay.with_prefix} of them with a cached prefix."


def family_of(candidate: str) -> str:
    """The kernel family that the policy's bounds know a candidate by: the noise that it declares, or "exact"."""
    return Backend.parse(candidate).noise or "exact"


def _worst(replay: ReplayResult) -> report.Metric:
    return report.Metric(
        name="worst own error",
        value=replay.worst,
        text=f"{replay.worst:.2g} of its bound",
        bound=1.0,
        bound_is="most",
        explain=f"relative L1 against fp64 on the same inputs, by cell and head, over {replay.calls} recorded calls",
    )


def _kl(row: report.LogitsRow) -> report.Metric:
    floor = "not measured" if row.floor_mean_kl is None else f"{row.floor_mean_kl:.2g}"
    return report.Metric(
        name=f"mean KL of the logits, {row.condition}",
        value=row.mean_kl,
        text="none" if row.mean_kl is None else f"{row.mean_kl:.2g} nats",
        explain=f"over {row.positions} positions of {row.sequences} prompts; the reference against itself: {floor}",
    )
