"""Compares the calls that the layer diff recorded with the oracle, and names the bug."""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.evidence.cause import read_cause, write_cause
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.pack import replay_command
from assay.harness.progress import ProgressDisplay


def find_cause(folder: RunFolder, plan: Plan, display: ProgressDisplay) -> None:
    """Examine the recorded calls and write the result, unless that is done or nothing was recorded.

    Raises:
        EvidenceError: the pack is damaged.
    """
    pack = pack_of(folder)
    if pack is None or read_cause(folder) is not None:
        return
    served = pack.is_relative_to(folder.server_folder("candidate"))
    from assay.harness.offline.replay import replay_recorded  # torch, which only a layer diff needs

    result = replay_recorded(pack, plan.candidate, replay_command(pack, plan.candidate.name), served)
    write_cause(folder, result)
    named = "; ".join(finding.title for finding in result.findings) or "nothing"
    display.say(f"Examined {result.calls} recorded calls in {result.seconds:.1f} s: found {named}.")
