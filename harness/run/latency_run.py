"""The latency suite of a run: a bench in the run's folder, on separate servers.

Nothing else may compute while servers are timed: no shadow, no tracer, no third server. So timing waits until the run's own
servers have stopped, and starts both roles again without what the layer diff adds to them.
"""

from __future__ import annotations

from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.progress import ProgressDisplay
from assay.harness.run.bench_drive import bench
from assay.harness.run.bench_plan import BenchPlan, plan_bench, timed_spec
from assay.harness.run.plan import Plan, ask
from assay.harness.run.run_folder import make_part


def plan_latency(plan: Plan) -> BenchPlan | None:
    """Check and plan the bench of a run; None if latency was not requested.

    Raises:
        UsageError: see `plan_bench`.
    """
    if "latency" not in plan.spec.workload.suites:
        return None
    return plan_bench(ask(plan, timed_spec(plan.spec).workload))


def time_servers(plan: BenchPlan | None, folder: RunFolder, display: ProgressDisplay) -> None:
    """Time both servers, as a part of a run: see `make_part`.

    Args:
        plan: the bench; None if none was requested.
        folder: the run's folder.
        display: shows the progress.
    """
    if plan is not None:
        make_part(folder, bench_folder(folder), lambda empty: bench(plan, empty, display))
