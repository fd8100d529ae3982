"""The latency suite of a run: a bench in the run's folder, on separate servers.

Nothing else may compute while servers are timed: no shadow, no tracer, no third server. So timing waits until the run's own
servers have stopped, and starts both roles again without what the layer diff adds to them.
"""

from __future__ import annotations

import shutil

from assay.harness.bench.bench_plan import BenchPlan, plan_bench, timed_spec
from assay.harness.bench.drive import bench
from assay.harness.collect.plan import Plan, ask
from assay.harness.collect.run_folder import recorded
from assay.harness.evidence.bench_folder import BenchFolder, bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.progress import ProgressDisplay


def plan_latency(plan: Plan) -> BenchPlan | None:
    """Check and plan the bench of a run; None if latency was not requested.

    Raises:
        UsageError: see `plan_bench`.
    """
    if "latency" not in plan.spec.workload.suites:
        return None
    return plan_bench(ask(plan, timed_spec(plan.spec).workload))


def time_servers(plan: BenchPlan | None, folder: RunFolder, display: ProgressDisplay) -> None:
    """Time both servers, unless the run has failed or they were timed already. What ends it early is recorded, not raised.

    An interrupted bench starts over: its first blocks were played by other servers.

    Args:
        plan: the bench; None if none was requested.
        folder: the run's folder.
        display: shows the progress.

    Raises:
        KeyboardInterrupt: after the servers were stopped and the interruption was recorded.
    """
    timed = bench_folder(folder)
    if plan is None or folder.progress().failure or timed.complete:
        return
    with recorded(folder):
        shutil.rmtree(timed.path, ignore_errors=True)
        bench(plan, BenchFolder.new(timed.path, folder.nonce), display)
