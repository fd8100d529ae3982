"""Both roles' distributions over the reference's tokens -> the suite ``logits``.

Two numbers decide under each condition, *cold* and *cached*: the mean KL of the next-token distributions, and the mean change of
the log-likelihood of the reference's own tokens. Both are means over prompts, with a bootstrap-t interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.harness.compare.logits import LogitsComparison, LogitsRow, PromptMeans, compare_roles
from assay.harness.compare.noise_limits import change_limit, kl_limit
from assay.harness.config import RunSpec
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path, read_logits
from assay.harness.evidence.records import FLOOR_REPEAT, ROLES
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.stats.bootstrap import bootstrap_t
from assay.harness.text import percent
from assay.harness.verdict import Verdict

MIN_PROMPTS = 64
"""Fewer prompts under a condition give no verdict: the interval's coverage is measured from here on."""
FLOOR_FACTOR = 5.0
"""Mean KL up to this multiple of the reference's own floor is no loss: the floor is a mean over half of the prompts. A candidate
as noisy as the reference then passes in 94 % of runs even if mean KLs of prompts are log-normal with a sigma of 1.2 (measured: 0.8;
see ``python benchmarks/logit_verdicts.py``)."""
_NOT_FINITE = "not-finite"


@dataclass(frozen=True)
class _Test:
    """One number of one condition against its limit.

    Attributes:
        metric: as the report shows it.
        reach: the far end of its interval over the limit: at most 1 passes.
        p: p value of "the true mean is within the limit", corrected for the number of tests.
    """

    metric: Metric
    reach: float
    p: float


def logits_suite(folder: RunFolder, spec: RunSpec, noise: Sequence[str]) -> SuiteResult | None:
    """The suite of a run's folder; None where nothing was scored. See `judge_logits`.

    Args:
        folder: of the run.
        spec: its policy.
        noise: noise families that the roles declare.

    Raises:
        EvidenceError: a file is damaged, or the roles were scored on different tokens.
    """
    if not all(logits_path(folder.path, role, 0).exists() for role in ROLES):
        return None
    return judge_logits(compare_logits(folder.path, spec.alpha, folder.nonce), spec, noise)


def judge_logits(comparison: LogitsComparison, spec: RunSpec, noise: Sequence[str]) -> SuiteResult:
    """Whether the candidate's distributions are as near to the reference's as its declared noise explains.

    - *regression*: a log-probability of the candidate is not finite where the reference's is, or a mean is above its limit
      (one-sided, corrected for the number of tests by Bonferroni's rule).
    - *pass*: under both conditions, over at least `MIN_PROMPTS` prompts, the intervals are within the limits.
    - *inconclusive*: anything else, and where the reference's own log-probabilities are not finite.

    Args:
        comparison: of both roles' scorings.
        spec: the policy.
        noise: noise families that the roles declare.
    """
    tests = list(_tests(comparison, spec, noise))
    verdict, why, decided_by, p = _judge(comparison, tests, spec)
    return SuiteResult(
        id="logits",
        title="Logits",
        synthetic=spec.synthetic,
        verdict=verdict,
        why=why,
        p_regression=p,
        metrics=(*(test.metric for test in tests), _not_finite(comparison.rows)),
        decided_by=decided_by,
        logits=comparison.rows,
    )


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


def _judge(
    comparison: LogitsComparison, tests: Sequence[_Test], spec: RunSpec
) -> tuple[Verdict, str, str, float | None]:
    """The verdict, the sentence that says why, the id of the metric that decided, and the p value of a regression."""
    rows = comparison.rows
    if bad := [row for row in rows if row.reference_nonfinite]:
        why = f"The reference's own log-probabilities are not finite at {_positions(bad)}, so nothing can be compared with them."
        return "inconclusive", why, _NOT_FINITE, None
    if bad := [row for row in rows if row.nonfinite]:
        why = f"The candidate's log-probabilities are not finite at {_positions(bad)}; the reference's are."
        return "regression", why, _NOT_FINITE, 0.0
    fewest = min((row.sequences for row in rows), default=0) if len(rows) == 2 else 0
    if fewest < MIN_PROMPTS:
        unmet = f" Not observed: {'; '.join(comparison.not_observed)}." if comparison.not_observed else ""
        why = f"{fewest} prompts were scored both cold and cached; at least {MIN_PROMPTS} are needed for a verdict.{unmet}"
        return "inconclusive", why, "", None
    p = min(test.p for test in tests)
    worst = max(tests, key=lambda test: test.reach)
    metric = worst.metric
    number, _, condition = metric.title.rpartition(", ")
    found = (
        f"Scored {condition}, the {number} is {metric.text} (at most {_nats(metric.high)} in size with "
        f"{percent(1 - spec.alpha)} confidence, {fewest} prompts)"
    )
    limit = f"the limit of {_nats(metric.bound)} ({metric.policy or metric.explain})"
    if p < spec.alpha:
        return "regression", f"{found}, above {limit}; p = {p:.2g}.", metric.id, p
    if worst.reach <= 1:
        return "pass", f"{found}, within {limit}.", metric.id, p
    why = f"{found}: neither shown to be within {limit} nor above it; more prompts (--logits-prompts) may resolve this."
    return "inconclusive", why, metric.id, p


def _tests(comparison: LogitsComparison, spec: RunSpec, noise: Sequence[str]) -> Iterator[_Test]:
    tested = [prompts for prompts in comparison.prompts if len(prompts.kl)]
    for prompts in tested:
        limit, explain = limit_of(prompts, spec, noise)
        condition, policy = prompts.condition, spec.policy_line("logits_limit") if spec.logits_limit else ""
        # Two-sided intervals of level 1 - alpha. A divergence can only be too large; a log-likelihood can change either way.
        kl, change = bootstrap_t(prompts.kl, spec.alpha / 2), bootstrap_t(prompts.change, spec.alpha / 2)
        yield _Test(
            Metric(
                id=f"mean-kl-{condition}", title=f"mean KL, {condition}", value=kl.value, text=_nats(kl.value),
                low=_finite(kl.low), high=_finite(kl.high), bound=limit, bound_is="most", policy=policy, explain=explain,
            ),
            kl.high / limit,
            min(1.0, 2 * len(tested) * kl.p_not_above(limit)),
        )  # fmt: skip
        most = change_limit(limit)
        far = max(change.high, -change.low)
        yield _Test(
            Metric(
                id=f"likelihood-change-{condition}", title=f"mean change of the log-likelihood, {condition}",
                value=abs(change.value), text=f"{change.value:+.3g} nats", low=_finite(max(change.low, -change.high, 0.0)),
                high=_finite(far), bound=most, bound_is="most", policy=policy,
                explain=f"In either direction; the bound is the root of twice that of the KL: {explain}",
            ),
            far / most,
            min(1.0, 4 * len(tested) * min(change.p_not_above(most), change.p_not_below(-most))),
        )  # fmt: skip


def limit_of(prompts: PromptMeans, spec: RunSpec, noise: Sequence[str]) -> tuple[float, str]:
    """The limit of the mean KL of prompts, and where it comes from: policy, else the larger of declared noise and floor."""
    floor = float(prompts.floor.mean()) if len(prompts.floor) else None
    measured = "not measured" if floor is None else f"{floor:.2g} nats over {len(prompts.floor)} prompts"
    if spec.logits_limit:
        return spec.logits_limit, f"the reference against itself: {measured}"
    declared = [name for name in noise if name]
    explained = kl_limit(declared)
    if floor is not None and FLOOR_FACTOR * floor > explained:
        return FLOOR_FACTOR * floor, f"{FLOOR_FACTOR:g} times the floor, the reference against itself: {measured}"
    source = f"declared noise {' and '.join(declared)}" if declared else "rounding, since no other noise is declared"
    return explained, f"{source}; the reference against itself: {measured}"


def _not_finite(rows: Sequence[LogitsRow]) -> Metric:
    count = sum(row.nonfinite - row.reference_nonfinite for row in rows)
    return Metric(
        id=_NOT_FINITE,
        title="positions that are not finite",
        value=float(count),
        text=f"{count:,}",
        bound=0.0,
        bound_is="most",
        explain=f"In the candidate alone, of {sum(row.positions for row in rows):,} positions",
    )


def _positions(rows: Sequence[LogitsRow]) -> str:
    return " and ".join(f"{row.nonfinite:,} of {row.positions:,} positions, {row.condition}" for row in rows)


def _nats(value: float | None) -> str:
    """With as many digits as the ends of an interval have in reports: fewer can lie outside of it."""
    return "an unknown number of nats" if value is None else f"{value:.3g} nats"


def _finite(end: float) -> float | None:
    return end if math.isfinite(end) else None
