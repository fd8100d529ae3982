"""Recording a replay pack on its own: one reference server, a short workload, no verdict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.nonce import new_nonce
from assay.harness.evidence.pack import PackManifest, read_manifest
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import check_environment
from assay.harness.run.servers import make_run_engine, running


def record_pack(plan: Plan, pack: Path, display: ProgressDisplay) -> PackManifest:
    """Record calls of a short workload.

    Args:
        plan: the checked run, with the suite layers; calls on which its candidate is worst are kept too.
        pack: a new folder.
        display: shows the progress.

    Returns:
        The manifest of the pack.

    Raises:
        UsageError: `pack` is not empty, or this machine cannot serve the run.
        EngineError: the server failed; the message ends with its log.
        EvidenceError: nothing could be recorded.
    """
    if pack.exists() and (not pack.is_dir() or any(pack.iterdir())):
        raise UsageError(f"{pack} is not empty.", "a new folder for the pack", "name another one")
    check_environment(plan)
    with tempfile.TemporaryDirectory(prefix="assay-record-") as made:
        folder = RunFolder(Path(made), new_nonce())  # which has no manifest
        server = make_run_engine(plan, folder, "reference")
        display.say(f"Starting {server.backend}.")
        with running([server], plan.spec.device, display):
            display.say("Asking a short workload.")
            layer_diff.shadow(server, folder.server_folder("reference"), plan)
        recorded = pack_of(folder)
        if recorded is None:
            raise EvidenceError(
                "No call was recorded.", "at least one call that a kernel can compute", "see assay run --suites layers"
            )
        pack.parent.mkdir(parents=True, exist_ok=True)
        if pack.exists():
            pack.rmdir()
        shutil.move(recorded, pack)
    return read_manifest(pack)
