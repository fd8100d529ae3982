"""Naming the cause: the calls that the layer diff recorded are compared with the oracle, and what is wrong gets a name."""

from __future__ import annotations

from pathlib import Path

from assay.harness.collect import layer_diff
from assay.harness.collect.plan import Plan
from assay.harness.evidence.folder import RunFolder
from assay.harness.files import write_whole
from assay.harness.offline.replay import ReplayResult, examine_recorded
from assay.harness.progress import ProgressDisplay

_FILE = "cause.json"


def find_cause(folder: RunFolder, plan: Plan, display: ProgressDisplay) -> None:
    """Examine the recorded calls and write down the result, unless that was done or nothing was recorded.

    Raises:
        EvidenceError: the pack is damaged.
    """
    pack = layer_diff.pack_of(folder)
    if pack is None or (folder.path / _FILE).exists():
        return
    served = pack.is_relative_to(folder.server_folder("candidate"))
    result = examine_recorded(pack, plan.candidate, layer_diff.replay_command(pack, plan.candidate), served)
    write_whole(folder.path / _FILE, result.model_dump_json(indent=1))
    named = "; ".join(finding.title for finding in result.findings) or "nothing"
    display.say(f"Examined {result.calls} recorded calls in {result.seconds:.1f} s: found {named}.")


def read_cause(path: Path) -> ReplayResult | None:
    """The result of a run's examination; None if there was none."""
    file = path / _FILE
    return ReplayResult.model_validate_json(file.read_text()) if file.exists() else None
