"""The candidate's kernel on the op-level matrix of the run's model -> the suite ``matrix``."""

from __future__ import annotations

from assay.harness.evidence.op_matrix import MatrixRecord
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.stats.noise_bound import FALSE_FLAGS
from assay.harness.text import one_line, two_digits
from assay.harness.verdict import kernel_verdict, serious

SUITE = "matrix"
_WORST = "worst-of-matrix"


def matrix_suite(record: MatrixRecord | None) -> SuiteResult | None:
    """The verdict on the kernel by itself; None where the matrix was not run.

    - *regression*: a call is out of bounds, or the kernel broke its contract.
    - *inconclusive*: the matrix could not be run, or a phase or a cached prefix was not tested.
    """
    if record is None:
        return None
    missing = (record.error,) if record.error else record.missing
    verdict = kernel_verdict(record.findings, missing)
    metrics = []
    if record.worst is not None:
        metrics.append(
            Metric(
                id=_WORST,
                title="worst own error",
                value=record.worst,
                text=f"{two_digits(record.worst)} times its bound",
                bound=1.0,
                bound_is="most",
                explain=f"Relative L1 against fp64, over {len(record.computed)} calls of {record.calls}",
            )
        )
    return SuiteResult(
        id=SUITE,
        title="Op-level matrix",
        synthetic=True,
        verdict=verdict,
        why=_why(record, missing),
        p_regression=FALSE_FLAGS if verdict == "regression" else None,
        metrics=tuple(metrics),
        decided_by=_WORST if metrics else "",
    )


def _why(record: MatrixRecord, missing: tuple[str, ...]) -> str:
    if wrong := serious(record.findings):
        return f"{one_line(wrong[0].where)}: {one_line(wrong[0].diagnosis, 300)}."
    if missing:
        return f"Not tested: {'; '.join(one_line(one, 300) for one in missing)}."
    refused = f"; {len(record.refused)} more were refused" if record.refused else ""
    worst = two_digits(record.worst or 0.0)
    return f"The worst own error is {worst} times what noise explains, in {len(record.computed)} calls of {record.calls}{refused}."
