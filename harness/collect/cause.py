"""Naming the cause: what a run recorded in the shadow is held against the truth, and what is wrong gets a name."""

from __future__ import annotations

from pathlib import Path

from assay.harness.collect import layer_suite
from assay.harness.config import RunSpec
from assay.harness.engines.backend import Backend
from assay.harness.evidence.folder import RunFolder
from assay.harness.files import write_whole
from assay.harness.offline.replay import ReplayResult, examine_recorded
from assay.harness.progress import ProgressDisplay

_FILE = "cause.json"


def find_cause(folder: RunFolder, spec: RunSpec, display: ProgressDisplay) -> None:
    """Examine what was recorded, and write down what it came to. Does nothing where that was done, or nothing was recorded.

    Raises:
        EvidenceError: the pack is damaged.
    """
    pack = layer_suite.pack_of(folder)
    if pack is None or (folder.path / _FILE).exists():
        return
    served = pack.is_relative_to(folder.server_folder("candidate"))
    result = examine_recorded(pack, Backend.parse(spec.candidate), layer_suite.reproduced_by(pack, spec.candidate), served)
    write_whole(folder.path / _FILE, result.model_dump_json(indent=1))
    named = "; ".join(finding.title for finding in result.findings) or "nothing"
    display.say(f"Examined {result.calls} recorded calls in {result.seconds:.1f} s: found {named}.")


def read_cause(path: Path) -> ReplayResult | None:
    """What a run's replay came to; None if there was none."""
    file = path / _FILE
    return ReplayResult.model_validate_json(file.read_text()) if file.exists() else None
