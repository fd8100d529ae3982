"""A run compared with the accepted baselines: the suite ``baseline``, and the checks that a baseline matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.harness.evidence import baseline as stored
from assay.harness.judge.accuracy_suite import loss_metric
from assay.harness.judge.answers import pair
from assay.harness.judge.baselines import Status, growth, own_errors_of, since_accepted
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import BASELINE, measure
from assay.harness.judge.paired_accuracy import Accuracy, accuracy_of, beginning, state_accuracy
from assay.harness.judge.report import SuiteResult
from assay.harness.policy import Policy
from assay.harness.sides import Role, Side
from assay.harness.statement import state
from assay.harness.verdict import Check, Requirement, Verdict

_LOSS, _GROWTH = "loss-since-accepted", "own-error-growth"


def claim(run: RunEvidence) -> Judged:
    """Compare the candidate with its accepted baseline, and check which baselines match, if the run asked for this comparison."""
    if run.baselines is None:
        return Judged()
    if "candidate" not in run.baselines.used:
        return Judged(checks=_check_baselines(run.spec.sides, run.spec.policy, run.baselines))
    place = run.folder.baseline("candidate")
    accepted = stored.read_baseline(place)
    told = run.fingerprints.get("candidate")
    other = since_accepted(accepted.fingerprint, told).undeclared if accepted.fingerprint and told else ()
    served = [difference.says for difference in other]
    checks = _check_baselines(run.spec.sides, run.spec.policy, run.baselines, served)
    before = [answer.model_copy(update={"role": "reference"}) for answer in stored.read_answers(place)]
    now = [answer for answer in run.answers if answer.role == "candidate"]
    read = beginning(run.questions, pair(run.items, [*before, *now]).pairs)
    answers = accuracy_of(read, run.accuracy.rule) if read else None
    non_inferior = run.accuracy.verdict == "pass"
    own_errors = own_errors_of(run.folder, "candidate")
    suite = _compare_accepted(
        answers, accepted.own_errors, own_errors, run.spec.policy, non_inferior, synthetic=run.spec.workload.synthetic
    )
    return Judged(suite=suite, checks=checks)


def _compare_accepted(
    answers: Accuracy | None,
    before: Mapping[str, float],
    now: Mapping[str, float],
    policy: Policy,
    non_inferior: bool = False,
    *,
    synthetic: bool,
) -> SuiteResult:
    """Compare the accepted run with this one: paired answers, and errors by layer and condition."""
    worst, most = max(
        ((name, growth(before[name], now[name])) for name in before if name in now),
        key=lambda named: named[1],
        default=("", None),
    )
    grown = most is not None and not most <= policy.growth
    verdict, decided_by, p_regression = _judge(answers, most is not None, grown, non_inferior)
    why, lines, metrics = [], [], []
    if answers is not None:
        lines.append(policy.line("margin"))
        why += [state("against-accepted"), state_accuracy(answers)]
        metrics.append(loss_metric(policy, answers, _LOSS))
    if most is not None:
        lines.append(policy.line("growth"))
        shares = {"accepted": before[worst], "now": now[worst]}
        why.append(state("own-error-grew", where=worst, above=grown, line=policy.line("growth"), **shares))
        metrics.append(measure(_GROWTH, most, bound=policy.growth, policy=policy.line("growth")))
    if answers is not None and answers.verdict == "inconclusive" and non_inferior:
        why.append(state("non-inferior-anyway"))
    why.append(state("policy", lines=lines) if lines else state("nothing-in-common"))
    return SuiteResult(
        id=BASELINE,
        synthetic=synthetic,
        verdict=verdict,
        why=tuple(why),
        metrics=tuple(metrics),
        decided_by=decided_by,
        p_regression=p_regression,
    )


def _judge(
    answers: Accuracy | None, measured: bool, grown: bool, non_inferior: bool
) -> tuple[Verdict, str, float | None]:
    """Decide the verdict, with the id of the deciding metric and the p value of a regression."""
    if answers is None:
        return ("regression" if grown else "pass", _GROWTH, None) if measured else ("inconclusive", "", None)
    verdict = "pass" if answers.verdict == "inconclusive" and non_inferior else answers.verdict
    if not grown:
        return verdict, _LOSS, answers.p_regression
    return "regression", _LOSS if verdict == "regression" else _GROWTH, None


def _check_baselines(
    sides: Mapping[Role, Side], policy: Policy, status: Status, served: Sequence[str] = ()
) -> list[Check]:
    """Check that accepted baselines match: the candidate's, and the reference's if it should be stored, or is stale.

    A stale baseline of the candidate rules out a pass. If the reference's is stale, its server was asked instead.

    Args:
        served: differences between the candidate's server and the accepted one.
    """
    required, used = Requirement("candidate-baseline"), status.used.get("candidate")
    others = {"unused": status.unused, "damaged": status.damaged}
    known, stale = {"backend": sides["candidate"].backend, **others}, status.stale.get("candidate", ())
    if served or stale:
        outcome = state("baseline-stale", differs=stale, served=served, folder=policy.baselines, **known)
        checks = [required.check("missing", outcome)]
    elif used:
        checks = [required.check("ok", state("baseline-matches", name=used, **others))]
    else:
        checks = [required.check("not checked", state("no-baseline-accepted", **known))]
    required, used = Requirement("reference-baseline"), status.used.get("reference")
    stale = status.stale.get("reference", ())
    if policy.reference_from != "baseline" and not stale:
        return checks
    if used:
        return [*checks, required.check("ok", state("reference-stored", name=used, needed=status.stored_reference))]
    backend = sides["reference"].backend
    outcome = state("reference-not-stored", backend=backend, differs=stale, folder=policy.baselines)
    return [*checks, required.check("not checked", outcome)]
