"""The layer diff in a run's folder -> its part of the report: the suite ``layers``, the error profile, the findings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from assay.harness.compare.logits import LogitsComparison, LogitsRow, compare_roles
from assay.harness.compare.traces import compare, joined, split
from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.cause import ReplayResult, read_cause
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import pack_of, read_record, shadow_errors_of
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import FLOOR_REPEAT, ROLES
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.error_grids import depth_rows, layers_result
from assay.harness.judge.report import NOT_FINITE, LayersResult, Metric, SuiteResult, excess
from assay.harness.text import one_line, two_digits
from assay.harness.verdict import Finding, Verdict, serious

_WORST = "worst-own-error"


@dataclass(frozen=True)
class LayerDiff:
    """The layer diff of a run.

    Attributes:
        errors: the candidate's errors on the reference's inputs.
        result: own errors by layer and condition, and their effect on the logits.
        suite: the suite's verdict.
        findings: what the replay named.
    """

    errors: ShadowErrors
    result: LayersResult
    suite: SuiteResult
    findings: tuple[Finding, ...]


def layer_diff(folder: RunFolder, spec: RunSpec) -> LayerDiff | None:
    """Judge what the layer diff and the scoring of logits left; None without a layer diff.

    Raises:
        EvidenceError: a file is damaged.
    """
    errors = shadow_errors_of(folder)
    if errors is None:
        return None
    replay = read_cause(folder)
    scored = all(logits_path(folder.path, role, 0).exists() for role in ROLES)
    logits = compare_logits(folder.path, spec.alpha, folder.nonce) if scored else None
    bounds = {(one.layer, one.phase): one.bound for one in replay.bounds} if replay else {}
    pack = pack_of(folder)
    not_traced: tuple[str, ...] = ()
    try:
        free = _free_running(folder, errors)
    except EvidenceError as error:  # own errors and the cause do not depend on it
        free, not_traced = ({}, {}), (f"inherited error: {error.found}",)
    result = layers_result(
        errors,
        bounds,
        depth=depth_rows(errors, bounds, *free),
        logits=logits.rows if logits else (),
        pack=str(pack) if pack else "",
        not_observed=(*not_traced, *(logits.not_observed if logits else ())),
    )
    return LayerDiff(errors, result, _suite(spec, result, errors, replay), replay.findings if replay else ())


def _free_running(folder: RunFolder, errors: ShadowErrors) -> tuple[dict[int, float], dict[int, float]]:
    """By layer: the error of its output in a free-running candidate, and its inherited part; empty if nothing was traced."""
    records = {role: read_record(folder, role) for role in ROLES}
    if not any(records.values()):
        return {}, {}
    # Prefer the candidate's own server: there it wrote the keys and values too.
    where = {role: role if records[role] else next(r for r in ROLES if records[r]) for role in ROLES}
    labels = next(one.traced for one in records.values() if one)
    pairs = [
        [read_trace(folder.server_folder(where[role]), f"{role}-{label}", folder.nonce) for role in ROLES]
        for label in labels
    ]
    free = joined([compare(reference, candidate) for reference, candidate in pairs])
    parts = split(free.layers, free.relative_l1, errors.table(("layer",)).relative_l1)
    by_layer = [dict(zip(parts.layers, map(float, values), strict=True)) for values in (parts.total, parts.inherited)]
    return by_layer[0], by_layer[1]


def compare_logits(folder: Path, alpha: float, run: str = "") -> LogitsComparison:
    """Both roles' scorings in a run's folder, compared by condition, with the floor.

    Args:
        folder: the run's.
        alpha: error rate of each interval.
        run: the run's nonce; empty to accept any.

    Raises:
        EvidenceError: a role was not scored, a file is damaged or of another run, or the roles were scored on different tokens.
    """
    reference, candidate = (read_logits(logits_path(folder, role, 0), run) for role in ROLES)
    again = logits_path(folder, "reference", FLOOR_REPEAT)
    return compare_roles(reference, candidate, read_logits(again, run) if again.exists() else None, alpha=alpha)


def _suite(spec: RunSpec, result: LayersResult, errors: ShadowErrors, replay: ReplayResult | None) -> SuiteResult:
    judged = judge_layers(spec, result, errors, replay)
    metrics = [] if replay is None else [_worst_metric(replay), *_policy_metric(spec, result, replay)]
    return SuiteResult(
        id="layers",
        title="Own error",
        synthetic=spec.synthetic,
        verdict=judged.verdict,
        why=judged.why,
        metrics=(*metrics, *(_kl_metric(row) for row in result.logits)),
        decided_by=judged.decided_by,
    )


class LayersJudgement(NamedTuple):
    """The verdict on own errors, why, and the id of the metric that decided: empty where a finding did."""

    verdict: Verdict
    why: str
    decided_by: str


def judge_layers(
    spec: RunSpec, result: LayersResult, errors: ShadowErrors, replay: ReplayResult | None
) -> LayersJudgement:
    """Whether the candidate's own error is no larger than noise explains, in every replayed call.

    - *regression*: a replayed call is out of bounds or behaves otherwise wrongly, or an own error is above the policy's bound of
      the kernel's family.
    - *inconclusive*: nothing was replayed, the candidate did not compute a call, or no call had a cached prefix.
    """
    if replay is None:
        return LayersJudgement(
            "inconclusive", "No recorded call was replayed, so no own error was compared with a bound.", ""
        )
    if wrong := serious(replay.findings):
        why = f"{one_line(wrong[0].where)}: {one_line(wrong[0].diagnosis, 300)}."
        return LayersJudgement("regression", why, "" if replay.worst <= 1 else _WORST)
    for metric in _policy_metric(spec, result, replay):
        if metric.value is None or not metric.value <= spec.bounds[_family(replay)]:
            return LayersJudgement(
                "regression", f"The largest own error is {metric.text}, above {metric.policy}.", metric.id
            )
    if errors.failed_calls:
        why = f"The candidate did not compute a call: {one_line(errors.failed_calls[0].text)}."
        return LayersJudgement("inconclusive", why, _WORST)
    calls = f"{replay.calls} of {replay.recorded} recorded calls"
    measured = f"the worst own error is {two_digits(replay.worst)} times what noise explains, in {calls}"
    if not replay.with_prefix:
        return LayersJudgement("inconclusive", f"No recorded call had a cached prefix; {measured}.", _WORST)
    why = f"{measured[0].upper()}{measured[1:]}, {replay.with_prefix} of them with a cached prefix."
    return LayersJudgement("pass", why, _WORST)


def _family(replay: ReplayResult) -> str:
    """The kernel family by which the policy's bounds know a candidate: the noise that it declares, or "exact"."""
    return replay.noise or "exact"


def _policy_metric(spec: RunSpec, result: LayersResult, replay: ReplayResult) -> list[Metric]:
    """The largest own error, where the policy bounds that of the kernel's family."""
    family = _family(replay)
    if family not in spec.bounds:
        return []
    observed = [row.own for row in result.depth if row.own is not None]
    largest = max(observed, key=lambda error: excess(error, None), default=0.0)
    value = None if largest == NOT_FINITE else float(largest)
    return [
        Metric(
            id="largest-own-error",
            title="largest own error",
            value=value,
            text=NOT_FINITE if value is None else f"{value:.3g}",
            bound=spec.bounds[family],
            bound_is="most",
            policy=spec.policy_line(family),
            explain="Relative L1 of the worst cell of any layer, over all shadowed calls",
        )
    ]


def _worst_metric(replay: ReplayResult) -> Metric:
    return Metric(
        id=_WORST,
        title="worst own error",
        value=replay.worst,
        text=f"{two_digits(replay.worst)} times its bound",
        bound=1.0,
        bound_is="most",
        explain=f"Relative L1 against fp64 on the same inputs, by cell and head, over {replay.calls} recorded calls",
    )


def _kl_metric(row: LogitsRow) -> Metric:
    floor = "not measured" if row.floor_mean_kl is None else f"{row.floor_mean_kl:.2g}"
    return Metric(
        id=f"mean-kl-{row.condition}",
        title=f"mean KL of the logits, {row.condition}",
        value=row.mean_kl,
        text="not measured" if row.mean_kl is None else f"{row.mean_kl:.2g} nats",
        explain=f"Over {row.positions} positions of {row.sequences} prompts; the reference against itself: {floor}",
    )
