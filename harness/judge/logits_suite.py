"""Both roles' distributions over the reference's tokens -> the suite ``logits``, to which the probes of two sides belong.

Three numbers decide under each condition, *cold* and *cached*: the mean KL of the next-token distributions, the mean change of
the log-likelihood of the reference's own tokens, and the share of prompts whose KL is far beyond the limit. The first two are means
over prompts, with a bootstrap-t interval, which knows nothing about other prompts: a mean with a heavy tail is not a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import FINGERPRINT
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.probes import passes_of
from assay.harness.evidence.records import FLOOR_REPEAT
from assay.harness.evidence.trace import read_trace
from assay.harness.fingerprint.parts import faults
from assay.harness.judge import side_probes
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.logits import Array, LogitsComparison, LogitsRow, PromptMeans, compare_roles
from assay.harness.judge.noise_limits import EXACT_KL, change_limit, kl_limit
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.traces import least_error, parting
from assay.harness.policy import WIDEST_LOGITS_LIMIT, Policy
from assay.harness.sides import ROLES, Role
from assay.harness.statement import Statement, state
from assay.harness.stats.bootstrap import bootstrap_t
from assay.harness.stats.share import clopper_pearson, p_not_above
from assay.harness.verdict import Requirement, Verdict

MIN_PROMPTS = 64
"""Fewer prompts under a condition give no verdict: the interval's coverage is measured from here on."""
FLOOR_FACTOR = 5.0
"""Mean KL up to this multiple of the reference's own floor does not count as a loss: the floor is a mean over half of the prompts.
A candidate as noisy as the reference then passes in 94 % of runs even if mean KLs of prompts are log-normal with a sigma of 1.2
(measured: 0.8; see ``python benchmarks/logit_verdicts.py``)."""
# A prompt whose mean KL is more than this multiple of the limit is far beyond it, and a candidate with one does not
# pass. If mean KLs are log-normal with a sigma of 1.2, the widest measured for an honest candidate, and a mean of half
# the limit, 1 prompt in 9,000 is.
_FAR = 20.0
# A larger share of such prompts is a regression, by an exact binomial test, even if the mean is within the limit.
_FAR_SHARE = 0.01
# Standard deviation of the logarithms of the larger half of the prompts' mean KLs beyond which a mean proves nothing:
# that of a log-normal distribution with a sigma of 1.6. At the limit with a sigma of 2 or 3, the mean alone passes 11
# and 28 % of runs of 256 prompts; with this rule, under 1 % (``python benchmarks/logit_verdicts.py``).
_WIDEST_SPREAD = 0.95
WITNESS = "witness"
"""Folder of a run with the fingerprint and the scores of transformers, if it was asked."""
# A witness agrees with both sides within so many nats, or else with the side that is this many times nearer to it: a float32 engine
# is within 3e-5 nats of it (measured), and a fault that the suite finds moves a token by 0.02 nats.
_AGREES, _APART = 1e-3, 10
_NOT_FINITE, _FAR_PROMPTS = "not-finite", "far-prompts"
_WORSE: tuple[Verdict, ...] = ("error", "regression", "inconclusive", "pass")

# The verdict, why, the id of the deciding metric, and the p value of a regression.
_Ruling = tuple[Verdict, tuple[Statement, ...], str, float | None]


@dataclass(frozen=True)
class _Test:
    """One number of one condition against its limit.

    Attributes:
        metric: as the report shows it.
        reach: the far end of its interval over the limit: at most 1 passes.
        p: p value of "the true mean, or share, is within the limit", corrected for the number of tests.
        doubt: why it does not pass, whatever its interval, or None if nothing is in doubt.
    """

    metric: Metric
    reach: float
    p: float
    doubt: Statement | None = None


def claim(run: RunEvidence) -> Judged:
    """Judge the logits of prompts and, where the sides differ in more than a backend, those of probes; or demand them."""
    scored, probes = _prompts(run), side_probes.probed(run)
    suites = [judged.suite for judged in (scored, probes) if judged.suite is not None]
    return Judged(
        suite=_joined(suites) if suites else None, checks=[*scored.checks, *probes.checks], parts=probes.parts
    )


def _joined(suites: Sequence[SuiteResult]) -> SuiteResult:
    """Join what prompts and probes show: the worse of the two decides, and either can be a regression by chance."""
    first, *others = sorted(suites, key=lambda suite: _WORSE.index(suite.verdict))
    certain = any(suite.verdict == "regression" and suite.p_regression is None for suite in suites)
    p = [suite.p_regression for suite in suites if suite.p_regression is not None and not certain]
    return first.model_copy(
        update={
            "why": tuple(why for suite in (first, *others) for why in suite.why),
            "p_regression": min(1.0, len(suites) * min(p)) if p else None,
            "metrics": tuple(metric for suite in suites for metric in suite.metrics),
            "logits": tuple(row for suite in suites for row in suite.logits),
        }
    )


def _prompts(run: RunEvidence) -> Judged:
    workload, policy, folder = run.spec.workload, run.spec.policy, run.folder
    if all(logits_path(folder.path, role, 0).exists() for role in ROLES):
        comparison = _compare_logits(folder.path, folder.nonce)
        suite = judge_logits(comparison, policy, run.noise, run.honest_kl, synthetic=workload.synthetic)
        return Judged(suite=suite.model_copy(update={"why": (*suite.why, *_witnessed(run))}))
    if "logits" not in workload.suites:
        return Judged()
    return Judged(checks=[Requirement("logits-compared").check("missing", state("nothing-scored", url=bool(run.urls)))])


def _witnessed(run: RunEvidence) -> Iterator[Statement]:
    """State which side a third implementation of the model agrees with, if one scored the same tokens, or why it is no witness."""
    place, nonce = run.folder.path / WITNESS, run.folder.nonce
    told, path = FINGERPRINT.read(place, nonce), logits_path(place, "candidate", 0)
    if told is None or not path.exists():
        return
    if wrong := [fault.says for fault in faults(told) if fault.counts and fault.part != "folder"]:
        yield state("no-witness", witness=told.engine, wrong=wrong)
        return
    seen, off = read_logits(path, nonce), dict[Role, float]()
    for role in ROLES:
        own = read_logits(logits_path(run.folder.path, role, 0), nonce).by_condition
        far = [np.abs(positions.token - seen.by_condition[condition].token) for condition, positions in own.items()]
        off[role] = float(np.nan_to_num(np.concatenate(far), nan=math.inf).max())
    nearer = (role for role in ROLES if all(_APART * off[role] <= off[other] for other in ROLES if other != role))
    near = "both" if max(off.values()) <= _AGREES else next(nearer, "")
    tokens, where = len(seen.by_condition["cold"].token), [*_where(run, place)]
    yield state("witness", witness=told.engine, near=near, off=list(off.items()), tokens=tokens, where=where)


def _where(run: RunEvidence, place: Path) -> Iterator[tuple[Role, str]]:
    """Yield where in the model each role parts from the witness on the traced sequence, "" for nowhere; nothing without traces."""
    for role in ROLES:
        folder, nonce = run.folder.server_folder(role), run.folder.nonce
        label = next((each.label for each in passes_of(folder, nonce) if each.why == "trace"), "")
        with suppress(EvidenceError, ValueError):  # not traced, or not comparable: layers of another kind
            own = read_trace(folder, label, nonce)
            apart = parting(own, own, read_trace(place, WITNESS, nonce), least_error(run.dtype, another_kernel=True))
            yield role, "" if apart.nowhere else apart.where


def judge_logits(
    comparison: LogitsComparison, policy: Policy, noise: Sequence[str], honest: float = EXACT_KL, *, synthetic: bool
) -> SuiteResult:
    """Judge if the candidate's distributions are as near to the reference's as its declared noise explains.

    - *regression*: a log-probability of the candidate is not finite where the reference's is, or a mean, or the share of prompts
      that are far beyond the limit, is above its own (one-sided, corrected for the number of tests by Bonferroni's rule).
    - *pass*: under both conditions, over at least `MIN_PROMPTS` prompts, the intervals are within the limits, no prompt is far
      beyond, and no tail is heavier than `_WIDEST_SPREAD`.
    - *inconclusive*: anything else, and if the reference's own log-probabilities are not finite.

    `honest` is the mean KL, in nats, that a candidate may cost that declares nothing.
    """
    tests = list(_tests(comparison, policy, noise, honest))
    verdict, why, decided_by, p = _judge(comparison, tests, policy.alpha)
    return SuiteResult(
        id="logits",
        synthetic=synthetic,
        verdict=verdict,
        why=why,
        p_regression=p,
        metrics=(*(test.metric for test in tests), _not_finite(comparison.rows)),
        decided_by=decided_by,
        logits=comparison.rows,
    )


def _compare_logits(folder: Path, run: str = "") -> LogitsComparison:
    """Compare both roles' scorings in a run's folder by condition, with the floor."""
    reference, candidate = (read_logits(logits_path(folder, role, 0), run) for role in ROLES)
    again = logits_path(folder, "reference", FLOOR_REPEAT)
    return compare_roles(reference, candidate, read_logits(again, run) if again.exists() else None)


def _judge(comparison: LogitsComparison, tests: Sequence[_Test], alpha: float) -> _Ruling:
    """Decide by non-finite values and by the number of prompts, or else by the tests."""
    rows = comparison.rows
    fewest = min((row.sequences for row in rows), default=0) if len(rows) == 2 else 0
    if bad := [row for row in rows if row.reference_nonfinite]:
        return "inconclusive", (state("reference-not-finite", places=_places(bad)),), _NOT_FINITE, None
    if bad := [row for row in rows if row.nonfinite]:
        return "regression", (state("candidate-not-finite", places=_places(bad)),), _NOT_FINITE, 0.0
    if fewest < MIN_PROMPTS:
        why = state("too-few-scored", prompts=fewest, least=MIN_PROMPTS, not_observed=comparison.not_observed)
        return "inconclusive", (why,), "", None
    return _judge_tests(tests, alpha, fewest)


def _judge_tests(tests: Sequence[_Test], alpha: float, fewest: int) -> _Ruling:
    """Decide by tests of enough prompts."""
    p = min(test.p for test in tests)
    if worse := [test for test in tests if test.p < alpha]:
        most = max(worse, key=lambda test: test.reach)  # a mean before a share, which reaches nowhere
        if most.metric.quantity == _FAR_PROMPTS:
            far = {name: most.metric.values[name] for name in ("count", "prompts", "times")}
            why = state("prompts-too-far", condition=most.metric.part, share=_FAR_SHARE, p=most.p, **far)
        else:
            why = state("logits-beyond", p=most.p, **_numbers(most.metric, alpha, fewest))
        return "regression", (why,), most.metric.id, p
    if in_doubt := [test for test in tests if test.doubt]:
        doubted = min(in_doubt, key=lambda test: test.reach)  # a prompt that is far beyond, before a tail
        assert doubted.doubt is not None
        return "inconclusive", (doubted.doubt, state("mean-not-shown")), doubted.metric.id, p
    worst = max(tests, key=lambda test: test.reach)
    numbers = _numbers(worst.metric, alpha, fewest)
    if worst.reach <= 1:
        # The share of prompts that may be wrong even though all asked prompts are right.
        unseen = state("bug-unseen", share=clopper_pearson(0, fewest, 2 * alpha).high)
        return "pass", (state("logits-within", **numbers), unseen), worst.metric.id, p
    return "inconclusive", (state("logits-undecided", **numbers),), worst.metric.id, p


def _numbers(metric: Metric, alpha: float, prompts: int) -> dict[str, Any]:
    """Return the values for the statement about a mean."""
    return {
        "quantity": metric.quantity, "condition": metric.part, "value": metric.values.get("change", metric.value),
        "high": metric.high, "level": 1 - alpha, "prompts": prompts, "bound": metric.bound, "policy": metric.policy,
        "limit": metric.values["limit"],
    }  # fmt: skip


def _tests(comparison: LogitsComparison, policy: Policy, noise: Sequence[str], honest: float) -> Iterator[_Test]:
    tested = [prompts for prompts in comparison.prompts if len(prompts.kl)]
    number = 3 * len(tested)
    for prompts in tested:
        limit, source = limit_of(prompts, policy.logits_limit, noise, honest)
        condition, line = prompts.condition, policy.line("logits_limit") if policy.logits_limit else ""
        # Two-sided intervals of level 1 - alpha. A divergence can only be too large; a log-likelihood can change either way.
        kl, change = bootstrap_t(prompts.kl, policy.alpha / 2), bootstrap_t(prompts.change, policy.alpha / 2)
        yield _Test(
            measure(
                "mean-kl", kl.value, part=condition, low=_finite(kl.low), high=_finite(kl.high), bound=limit, policy=line,
                limit=source,
            ),
            kl.high / limit,
            min(1.0, number * kl.p_not_above(limit)),
            _heavy(prompts, limit),
        )  # fmt: skip
        most = change_limit(limit)
        far = max(change.high, -change.low)
        yield _Test(
            measure(
                "likelihood-change", abs(change.value), part=condition, low=_finite(max(change.low, -change.high, 0.0)),
                high=_finite(far), bound=most, policy=line, change=change.value, limit=source,
            ),
            far / most,
            min(1.0, 2 * number * min(change.p_not_above(most), change.p_not_below(-most))),
        )  # fmt: skip
        yield _far(prompts, limit, number, policy.alpha)


def _far(prompts: PromptMeans, limit: float, tests: int, alpha: float) -> _Test:
    """Compute the share of prompts that are far beyond the limit of the mean."""
    n = len(prompts.kl)
    count = int((prompts.kl > _FAR * limit).sum())
    share = clopper_pearson(count, n, alpha)
    worst = float(prompts.kl.max()) if count else None
    far: dict[str, Any] = {"count": count, "prompts": n, "times": _FAR, "worst": worst}
    return _Test(
        measure(
            "far-prompts", count / n, part=prompts.condition, low=share.low, high=share.high, bound=_FAR_SHARE, limit=limit, **far,
        ),
        0.0,
        min(1.0, tests * p_not_above(count, n, _FAR_SHARE)),
        state("prompts-far", condition=prompts.condition, **far) if count else None,
    )  # fmt: skip


def _heavy(prompts: PromptMeans, limit: float) -> Statement | None:
    """State that the tail of the KLs is too heavy for a mean, if it is and a prompt is beyond the limit."""
    spread = _tail_spread(prompts.kl)
    if spread <= _WIDEST_SPREAD or not (prompts.kl > limit).any():
        return None
    return state("heavy-tail", condition=prompts.condition, spread=spread, most=_WIDEST_SPREAD)


def _tail_spread(values: Array) -> float:
    """Compute the standard deviation of the logs of the larger half of the values above 0, [n], or 0.0 if fewer than four are."""
    above = np.sort(values[values > 0])
    return float(np.log(above[len(above) // 2 :]).std(ddof=1)) if len(above) > 3 else 0.0


def limit_of(
    prompts: PromptMeans, limit: float | None, noise: Sequence[str], honest: float = EXACT_KL
) -> tuple[float, Statement]:
    """Compute the limit of the mean KL of prompts, and state its source.

    It is the policy's `limit`, or else the larger of declared noise and floor, which an erratic reference raises to
    `WIDEST_LOGITS_LIMIT` and no further. `honest` is the limit of a candidate that declares nothing, in nats.
    """
    floor = float(prompts.floor.mean()) if len(prompts.floor) else None
    declared = [*filter(None, noise)]
    measured = {"noise": declared, "factor": FLOOR_FACTOR, "floor": floor, "prompts": len(prompts.floor)}
    if limit:
        return limit, state("kl-limit", source="policy", **measured)
    explained, source = kl_limit(declared) if declared else honest, "noise"
    if floor is not None and FLOOR_FACTOR * floor > explained:
        explained, source = min(FLOOR_FACTOR * floor, WIDEST_LOGITS_LIMIT), "floor"
    return explained, state("kl-limit", source=source, **measured)


def _not_finite(rows: Sequence[LogitsRow]) -> Metric:
    count = sum(row.nonfinite - row.reference_nonfinite for row in rows)
    return measure("not-finite", float(count), bound=0.0, positions=sum(row.positions for row in rows))


def _places(rows: Sequence[LogitsRow]) -> list[tuple[int, int, str]]:
    """List the counts of positions that are not finite and of all positions, with the condition."""
    return [(row.nonfinite, row.positions, row.condition) for row in rows]


def _finite(end: float) -> float | None:
    return end if math.isfinite(end) else None
