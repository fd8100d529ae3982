"""The candidate's kernel on the op-level matrix of the run's model -> the suite ``matrix``, and the check that it ran."""

from __future__ import annotations

from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.run_file import REPEAT_RUN
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.text import one_line, two_digits
from assay.harness.verdict import Check, Requirement, kernel_verdict, serious

_RAN = Requirement(
    "matrix-ran",
    "the candidate's kernel ran on the op-level matrix",
    unchecked="the candidate's kernel did not run on the op-level matrix",
)
_SUITE = "matrix"
_WORST = "worst-of-matrix"


def claim(run: RunEvidence) -> Judged:
    """Judge the kernel by itself, and check that it was run."""
    record = run.matrix
    suite, causes = (_suite(record), record.findings) if record else (None, ())
    return Judged(suite=suite, checks=_check_ran(run), causes=causes)


def _suite(record: KernelResult) -> SuiteResult:
    """Judge the kernel by itself.

    - *regression*: a call is out of bounds, or the kernel broke its contract, whatever the findings state.
    - *inconclusive*: the matrix could not be run, or computed no call, or a phase or a cached prefix was not tested.
    """
    missing = (record.not_run,) if record.not_run else record.missing if record.computed else ("no call was computed",)
    verdict = "regression" if _outside(record) else kernel_verdict(record.findings, missing)
    metrics = []
    if record.worst_own is not None:
        metrics.append(
            Metric(
                id=_WORST,
                title="worst own error, op-level calls",
                value=record.worst,
                text=f"{two_digits(record.worst)}x its bound",
                bound=1.0,
                bound_is="most",
                explain=f"Relative L1 against fp64, over {record.computed} calls of {record.shapes}",
            )
        )
    return SuiteResult(
        id=_SUITE,
        title="Op-level matrix",
        synthetic=True,
        verdict=verdict,
        why=_why(record, missing),
        p_regression=FALSE_FLAGS if verdict == "regression" else None,
        metrics=tuple(metrics),
        decided_by=_WORST if metrics else "",
    )


def _check_ran(run: RunEvidence) -> list[Check]:
    """Check that the matrix ran with the candidate; no check where that is no kernel, or no layers were asked for."""
    candidate, record = run.spec.candidate.backend, run.matrix
    if "candidate" not in run.manifest.code or "layers" not in run.spec.workload.suites:
        return []
    ran, settles = record is not None and record.kernel == candidate, REPEAT_RUN
    observed = f"{record.computed} calls were computed" if record else "no result of it"
    if record and not ran:
        observed = f"a result of {record.kernel}, not of {candidate}"
    elif record and record.not_run:
        ran, observed = False, one_line(record.not_run, 300)
        settles = f"see what assay check {candidate} reports, and repeat the run with a new --out"
    return [_RAN.met(ran, observed, settles)]


def _outside(record: KernelResult) -> bool:
    """Return True if a call is out of bounds or broken: the numbers count, also without a finding."""
    return bool(record.failing) or not record.worst <= 1


def _why(record: KernelResult, missing: tuple[str, ...]) -> str:
    if wrong := serious(record.findings):
        named = one_line(f'"{wrong[0].title}"' if wrong[0].does else wrong[0].sentence, 300)
        worst = f", at worst {two_digits(record.worst)}x what noise explains" if record.worst_own is not None else ""
        return f"{len(record.failing)} of {record.computed} calls are out of bounds{worst}: {named.rstrip('.')}."
    if _outside(record):
        worst = two_digits(record.worst)
        return f"{len(record.failing)} calls are out of bounds, at worst {worst}x what noise explains; no finding explains it."
    if missing:
        return f"Not tested: {'; '.join(one_line(requirement, 300) for requirement in missing)}."
    refused = len(record.refused) + len(record.excluded)
    more = f"; {refused} more were refused" if refused else ""
    worst = two_digits(record.worst)
    return f"The worst own error is {worst}x what noise explains, in {record.computed} calls of {record.shapes}{more}."
