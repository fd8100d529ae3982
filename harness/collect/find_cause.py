"""Compares the calls that the layer diff recorded with the oracle, and names the bug."""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.evidence.cause import CAUSE, ReplayResult
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_jobs import CauseJob
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.pack import replay_command
from assay.harness.progress import ProgressDisplay


def cause_job(plan: Plan, folder: RunFolder) -> CauseJob | None:
    """Return the recorded calls that are still to be examined; None if that is done, or if nothing was recorded.

    Raises:
        EvidenceError: the pack is damaged.
    """
    pack = pack_of(folder)
    if pack is None or folder.read(CAUSE) is not None:
        return None
    served = pack.is_relative_to(folder.server_folder("candidate"))
    # The kernel's process has a working directory of its own.
    return CauseJob(pack=pack.resolve(), served=served, reproduce=replay_command(pack, plan.candidate.name))


def examine_here(job: CauseJob, plan: Plan, not_run: str = "") -> ReplayResult:
    """Diagnose outputs without a call of the kernel: one of the engine's own backends, or one that is not to be run, and why."""
    from assay.harness.offline.replay import replay_recorded  # torch, which only a layer diff needs

    return replay_recorded(job.pack, plan.candidate, job.reproduce, job.served, not_run)


def keep_cause(folder: RunFolder, result: ReplayResult, display: ProgressDisplay) -> None:
    """Write the result, and show it.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    folder.write(CAUSE, result)
    named = "; ".join(finding.title for finding in result.findings) or "nothing"
    display.say(f"Examined {result.calls} recorded calls in {result.seconds:.1f} s: found {named}.")
    if result.not_run:
        display.say(f"The kernel was not tested on them: {result.not_run}.")
