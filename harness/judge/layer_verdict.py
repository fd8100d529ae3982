"""The verdict of the suite ``layers``: errors and gains against what rounding explains, and the results of a replay of calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.harness.conditions import CACHED_PREFIX
from assay.harness.evidence.error_table import CONDITIONS, DIMENSIONS, QUERY
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.truth_bounds import HEAD, LAYER, PHASE, AgainstNoise, MeasuredCells
from assay.harness.policy import Policy
from assay.harness.sides import Role
from assay.harness.statement import Statement, state
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.text import some
from assay.harness.verdict import Finding, Verdict, serious

_WORST_CELL, _WORST_GAIN, _WORST_APART = "worst-own-error", "worst-gain", "worst-difference"
_WORST_QUERY = "worst-query"
_WORST_CALL = "worst-recorded-call"
# Ids of findings from the cells.
OUT_OF_BOUNDS, GAIN, TOO_QUIET, WRONG_REFERENCE = "own-error-out-of-bounds", "gain", "noise-missing", "reference-wrong"
_QUERY_OUT_OF_BOUNDS = "query-out-of-bounds"
# From this multiple of the reference's own excess over its bounds on, a candidate's cannot have the same origin.
_DECADE = 10.0
_CACHED = (DIMENSIONS.index("prefix"), CACHED_PREFIX.labels.index(CACHED_PREFIX.labels[-1]))


@dataclass(frozen=True)
class LayerEvidence:
    """The evidence for the verdict on layers.

    Attributes:
        errors: the errors that the shadow summed up.
        against: the same, compared with noise.
        replay: the examination of recorded calls, or None if none was recorded.
        foreign: why the examination does not belong to these calls, or empty if it does.
    """

    errors: ShadowErrors
    against: AgainstNoise
    replay: KernelResult | None
    foreign: str = ""

    @property
    def examined(self) -> KernelResult | None:
        """The examination, if it belongs to these calls."""
        return None if self.foreign else self.replay


# The verdict, why, the deciding metric (empty if a finding decided), and the p value of no regression.
_Ruling = tuple[Verdict, tuple[Statement, ...], str, float | None]


def judge_layers(policy: Policy, evidence: LayerEvidence, *, synthetic: bool) -> SuiteResult:
    """Judge if the candidate is as right as noise allows, in every layer, head and condition that the shadow saw.

    - *regression*: in a cell the candidate's own error is out of bounds, or that of a single query, or its gain in a head, layer or
      phase; or over all queries it is farther from the reference than the bounds of both allow; or a recorded call is out of
      bounds, or has another defect; or an error is above the policy's bound of the kernel's family.
    - *inconclusive*: the reference itself is out of bounds, unless the candidate's own error is so by ten times more; or nothing
      was compared with the truth or examined, the candidate did not compute a call, no call had a cached prefix; or its error is
      smaller than its declared quantisation must cost.
    """
    verdict, why, decided_by, p_regression = _judge(policy, evidence)
    return SuiteResult(
        id="layers",
        synthetic=synthetic,
        verdict=verdict,
        why=why,
        p_regression=p_regression,
        metrics=tuple(_metrics(policy, evidence)),
        decided_by=decided_by,
    )


def _judge(policy: Policy, evidence: LayerEvidence) -> _Ruling:
    against, replay = evidence.against, evidence.examined
    if (wrong := _wrong_reference(evidence)) is not None:
        why = state("reference-not-right", where=wrong.where, claim=wrong.claim)
        return _far_beyond_the_reference(evidence) or ("inconclusive", (why,), "", None)
    for metric, measured in _tests(against).items():
        if measured.flagged.any():
            return "regression", (_beyond(metric, measured, evidence.errors),), metric, FALSE_FLAGS
    if replay is not None and (regressed := _judge_replay(replay)):
        return regressed
    for largest in _policy_metrics(policy, evidence):
        if largest.value is None or not largest.value <= (largest.bound or 0.0):
            why = state("own-error-above-policy", value=largest.value, line=largest.policy)
            return "regression", (why,), largest.id, None
    if lacking := _missing(evidence):
        return "inconclusive", (lacking,), _WORST_CELL, None
    cells, header = against.cells, evidence.errors.headers[0]
    why = state(
        "own-errors-within", worst=cells.excess.max(), query=against.queries.excess.max(initial=0.0),
        gain=against.gains.excess.max(initial=0.0), cells=len(cells.index), sampled=header.sampled_rows, queries=header.rows,
        passes=header.passes,
    )  # fmt: skip
    return "pass", (why,), _WORST_CELL, None


def _far_beyond_the_reference(evidence: LayerEvidence) -> _Ruling | None:
    """Return regression if an error of the candidate is out of bounds by ten times as much as the worst of the reference."""
    against, replay = evidence.against, evidence.examined
    reference = max(
        float(measured.excess.max(initial=0.0)) for measured in (against.reference, against.reference_queries)
    )
    for measured, metric in ((against.cells, _WORST_CELL), (against.queries, _WORST_QUERY)):
        if measured.excess.max(initial=0.0) > _DECADE * reference:
            why = _beyond(metric, measured, evidence.errors), state("reference-off", times=reference)
            return "regression", why, metric, None
    if replay is not None and replay.worst > _DECADE * reference:
        return _judge_replay(replay)
    return None


def _judge_replay(replay: KernelResult) -> _Ruling | None:
    """Return regression if a recorded call is out of bounds, whatever the findings state, or if there is a serious finding."""
    outside = not replay.worst <= 1
    if wrong := serious(replay.findings):
        why = state("recorded-calls-wrong", said=wrong[0].sentence)
        return "regression", (why,), _WORST_CALL if outside else "", None
    if outside:
        return "regression", (state("recorded-call-out-of-bounds", worst=replay.worst),), _WORST_CALL, None
    return None


def _missing(evidence: LayerEvidence) -> Statement | None:
    """State what a pass lacks, or return None."""
    errors, against, replay = evidence.errors, evidence.against, evidence.replay
    if not len(against.cells.index):
        return _lacking("truth")
    if quiet := _quiet_finding(evidence):
        return state("found-at", where=quiet.where, claim=quiet.claim)
    if errors.failed_calls:
        return _lacking("calls", errors.failed_calls[0].text)
    if not (against.cells.index[:, _CACHED[0]] == _CACHED[1]).any():
        return _lacking("cached prefix", CACHED_PREFIX.labels[-1])
    if replay is None:
        return _lacking("examination")
    if evidence.foreign:
        return _lacking("examination of these calls", evidence.foreign)
    if replay.not_run:
        return _lacking("examined calls", replay.not_run)
    return None


def _lacking(what: str, said: str = "") -> Statement:
    return state("evidence-lacking", what=what, said=said)


def findings(evidence: LayerEvidence, reproduce: str) -> list[Finding]:
    """List the findings of the cells, in addition to those of a replay."""
    against, errors = evidence.against, evidence.errors
    shown = [_wrong_reference(evidence), _quiet_finding(evidence)]
    if (rest := _unnamed(evidence, against.cells)).flagged.any():
        shown.append(_finding(OUT_OF_BOUNDS, "error beyond rounding", _WORST_CELL, rest, errors))
    if not against.cells.flagged.any():  # otherwise the error of cells explains those of queries, and the gain
        if (queries := _unnamed(evidence, against.queries)).flagged.any():
            shown.append(_finding(_QUERY_OUT_OF_BOUNDS, "single queries out of bounds", _WORST_QUERY, queries, errors))
        if against.gains.flagged.any():
            shown.append(_finding(GAIN, "output scaled", _WORST_GAIN, against.gains, errors))
    return [finding.model_copy(update={"reproduce": reproduce}) for finding in shown if finding]


def _unnamed(evidence: LayerEvidence, cells: MeasuredCells) -> MeasuredCells:
    """Return the tests of layers and phases in which no recorded call was out of bounds: the replay has no finding on them."""
    replay = evidence.examined
    named = set(replay.outside) if replay else set()
    places = [(int(row[LAYER]), CONDITIONS["phase"][row[PHASE]]) for row in cells.index]
    rest = np.array([place not in named for place in places], bool)
    return MeasuredCells(cells.index[rest], cells.observed[rest], cells.bound[rest])


def _wrong_reference(evidence: LayerEvidence) -> Finding | None:
    """Make the finding that the reference is out of its own bounds, if it is; that shows nothing about the candidate."""
    against, title = evidence.against, "the reference is wrong, so it proves nothing about the candidate"
    for measured, metric in ((against.reference, _WORST_CELL), (against.reference_queries, _WORST_QUERY)):
        if measured.flagged.any():
            return _finding(WRONG_REFERENCE, title, metric, measured, evidence.errors, "reference")
    return None


def _quiet_finding(evidence: LayerEvidence) -> Finding | None:
    """Make the finding that the candidate's declared quantisation cannot be seen, if so."""
    quiet = evidence.against.quiet
    if not quiet:
        return None
    own, least = min(((own, least) for _, _, own, least in quiet), key=lambda pair: pair[0] / pair[1])
    layers, phases = sorted({layer for layer, *_ in quiet}), sorted({phase for _, phase, *_ in quiet})
    where = f"{' and '.join(phases)}, {some('layer', layers, _layers(evidence.errors))}"
    noise = evidence.errors.headers[0].candidate_noise
    return Finding(
        id=TOO_QUIET,
        title="error smaller than the declared quantisation must cost",
        severity="warning",
        where=where,
        claim=state("error-below-noise", own=own, noise=noise, least=least),
        reproduce="",
    )


def _finding(
    id_: str, title: str, metric: str, measured: MeasuredCells, errors: ShadowErrors, role: Role = "candidate"
) -> Finding:
    return Finding(
        id=id_,
        title=title,
        severity="serious" if role == "candidate" else "warning",
        where=_where(measured.index[measured.flagged], errors),
        claim=_worst_of(metric, measured, errors, role),
        shown_by=(state("tests-flag", flagged=measured.flagged.sum(), tests=len(measured.index)),),
        reproduce="",
    )


def _beyond(metric: str, measured: MeasuredCells, errors: ShadowErrors) -> Statement:
    return state(
        "found-at", where=_where(measured.index[measured.flagged], errors), claim=_worst_of(metric, measured, errors)
    )


def _worst_of(metric: str, measured: MeasuredCells, errors: ShadowErrors, role: Role = "candidate") -> Statement:
    """State the worst number, its bound, and, for a query, its place."""
    worst = int(np.argmax(measured.excess))
    query = _query(measured, worst, errors, role) if metric == _WORST_QUERY else None
    numbers = {name: getattr(measured, name)[worst] for name in ("observed", "bound", "excess")}
    return state("beyond-noise", test=metric, query=query, **numbers)


def _query(measured: MeasuredCells, worst: int, errors: ShadowErrors, role: Role) -> list[int]:
    """Return the position, cached prefix, layer and head of the query of a test; head -1 is all heads together."""
    row = int(np.flatnonzero((errors.cells.index == measured.index[worst]).all(1))[0])
    of_role = errors.cells.reference if role == "reference" else errors.cells.candidate
    query = dict(zip(QUERY, of_role.worst[row], strict=True))
    index = measured.index[worst]
    return [round(query["position"]), round(query["prefix"]), int(index[LAYER]), int(index[HEAD])]


def _where(index: NDArray[np.int64], errors: ShadowErrors) -> str:
    """Describe the tests: "extend, layer 2 of 4, all 4 heads, cached prefix >= 16"."""
    phases = [CONDITIONS["phase"][number] for number in np.unique(index[:, PHASE])]
    parts = [" and ".join(phases)]
    if (layers := _numbers(index, LAYER)) is not None:
        parts.append(some("layer", layers, _layers(errors)))
    if (heads := _numbers(index, HEAD)) is not None:
        parts.append(some("head", heads, range(max(errors.heads.values(), default=max(heads) + 1))))
    prefixes = _numbers(index, _CACHED[0])
    if prefixes is not None and len(prefixes) < len(CACHED_PREFIX.labels) and phases != ["decode"]:
        parts.append(f"cached prefix {', '.join(CACHED_PREFIX.labels[number] for number in prefixes)}")
    return ", ".join(parts)


def _numbers(index: NDArray[np.int64], column: int) -> list[int] | None:
    """List the indices that tests cover in a dimension, or return None if one of them covers all of it."""
    numbers = sorted({int(number) for number in index[:, column]})
    return None if -1 in numbers else numbers


def _layers(errors: ShadowErrors) -> Collection[int]:
    return sorted({int(layer) for layer in errors.cells.index[:, LAYER]})


def _tests(against: AgainstNoise) -> dict[str, MeasuredCells]:
    return {
        _WORST_CELL: against.cells,
        _WORST_QUERY: against.queries,
        _WORST_GAIN: against.gains,
        _WORST_APART: against.apart,
    }


def _metrics(policy: Policy, evidence: LayerEvidence) -> list[Metric]:
    """List the numbers of the suite."""
    metrics = [
        times_bound(id_, measured.excess.max() if len(measured.index) else None)
        for id_, measured in _tests(evidence.against).items()
    ]
    if replay := evidence.examined:
        metrics.append(times_bound(_WORST_CALL, replay.worst, calls=replay.calls))
    return [*metrics, *_policy_metrics(policy, evidence)]


def times_bound(id_: str, worst: float | None, **values: Any) -> Metric:
    """Measure a multiple of a bound, for the metric with an id such as "worst-query", or return None without a measurement."""
    finite = worst is None or bool(np.isfinite(worst))
    part = id_.removeprefix("worst-")
    return measure("worst", worst if finite else None, part=part, bound=1.0, finite=finite, **values)


def _policy_metrics(policy: Policy, evidence: LayerEvidence) -> Sequence[Metric]:
    """Return the largest error, where the policy bounds that of the kernel's family."""
    family = evidence.errors.headers[0].candidate_noise or "exact"
    if family not in policy.bounds:
        return ()
    largest = float(evidence.against.cells.observed.max(initial=0.0))
    value = largest if np.isfinite(largest) else None
    return (measure("largest-own-error", value, bound=policy.bounds[family], policy=policy.line(family)),)
