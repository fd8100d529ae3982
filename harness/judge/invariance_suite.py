"""Features of the candidate that must change nothing -> their part of the report: the suite, and the check that they ran."""

from __future__ import annotations

from assay.harness.errors import EvidenceError
from assay.harness.evidence.invariance import invariance_folder
from assay.harness.judge.decide import INVARIANCE
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.text import counted, listed
from assay.harness.verdict import Check, Requirement

_SWITCHED = Requirement(
    "features-switched",
    "the candidate's features that must change nothing were switched",
    unchecked="the candidate's features that must change nothing were not switched",
)
_LARGEST = "largest-divergence"


def claim(run: RunEvidence) -> Judged:
    """Judge the features that the policy names; nothing if it names none."""
    wanted, line = run.spec.policy.invariance, run.spec.policy.line("invariance")
    if not wanted:
        return Judged()
    folder = invariance_folder(run.folder)
    again = "repeat the command, which switches them again"
    try:
        if not folder.complete:
            return Judged(checks=[_SWITCHED.check("missing", f"it was not done, or not to its end; {line}", again)])
        result = judge_invariance(folder)
    except EvidenceError as error:
        return Judged(checks=[_SWITCHED.check("missing", str(error), again)])
    on = {feature.id for feature in result.features if feature.arms}
    if missing := [id_ for id_ in wanted if id_ not in on]:
        said = f"{listed(missing)} in no arm that was run to its end; {line}"
        return _judged(result, line, _SWITCHED.check("missing", said, again))
    said = f"{counted(len(wanted), 'feature')} in {counted(len(result.arms), 'arm')} of {counted(result.servers, 'server')}"
    return _judged(result, line, _SWITCHED.check("ok", said))


def _judged(result: InvarianceResult, line: str, check: Check) -> Judged:
    means = [mean for arm in result.arms for mean in (arm.prefill_kl, arm.decode_kl) if mean is not None]
    largest = max(means, default=None)
    metric = Metric(
        id=_LARGEST,
        title="largest mean divergence with features on",
        value=largest,
        text="not measured" if largest is None else f"{largest:.2g} nats",
        explain="Mean KL of the arm that is farthest from the candidate without any feature, on the same tokens",
    )
    suite = SuiteResult(
        id=INVARIANCE,
        title="Invariance",
        synthetic=False,
        verdict=result.verdict,
        why=f"{result.headline} Policy: {line}.",
        metrics=(metric,),
        decided_by=_LARGEST,
    )
    return Judged(suite=suite, checks=[check], findings=result.findings, parts={"invariance": result})
