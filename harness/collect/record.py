"""Recording a replay pack on its own: one reference server, a short workload, and no verdict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from assay.harness.collect import layer_suite
from assay.harness.collect.interview import Plan, make_engine, running
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.pack import PackManifest, read_manifest
from assay.harness.progress import ProgressDisplay


def record_pack(plan: Plan, pack: Path, display: ProgressDisplay) -> PackManifest:
    """Record calls of a short workload.

    Args:
        plan: the checked run, with the suite layers; its candidate chooses the worst calls.
        pack: a new folder.
        display: shows the progress.

    Returns:
        What the pack holds.

    Raises:
        UsageError: `pack` holds something.
        EngineError: the server failed; its log's last lines are in the message.
        EvidenceError: nothing could be recorded.
    """
    if pack.exists() and (not pack.is_dir() or any(pack.iterdir())):
        raise UsageError(f"{pack} is not empty.", "a new folder for the pack", "name another one")
    with tempfile.TemporaryDirectory(prefix="assay-record-") as made:
        folder = RunFolder(Path(made))
        server = make_engine(plan, folder, "reference")
        display.say(f"Starting {server.backend}.")
        with running([server], plan.spec.device):
            display.say("Asking a short workload.")
            place = folder.server_folder("reference")
            layer_suite.shadow(server, place, [item.prompt for item in plan.of("layers")], plan.spec)
        recorded = layer_suite.pack_of(folder)
        if recorded is None:
            raise EvidenceError(
                "No call was recorded.", "at least one call that a kernel can compute", "see assay diff"
            )
        pack.parent.mkdir(parents=True, exist_ok=True)
        if pack.exists():
            pack.rmdir()
        shutil.move(recorded, pack)
    return read_manifest(pack)
