"""The files of a layer diff in the folders of a run's servers: its record, the errors of the shadow, and the replay pack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from assay.harness.conditions import PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.counters import FOLDER as COUNTERS_FOLDER
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_table import DIMENSIONS
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.pack import MANIFEST, read_manifest
from assay.harness.evidence.run_file import RunFile, RunRecord, check_run
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.shadow_errors import ShadowErrors, read_shadow_errors
from assay.harness.sides import ROLES

PACK_FOLDER = "pack"
"""Replay pack in a server's folder."""


class LayerDiffRecord(RunRecord):
    """``layer-diff.json`` in a server's folder: the record of the layer diff, written at its end.

    Attributes:
        traced: labels of the traced prompts, without the role.
    """

    traced: tuple[str, ...]


LAYER_DIFF = RunFile("layer-diff.json", LayerDiffRecord)


def pack_of(folder: RunFolder) -> Path | None:
    """Return the replay pack that a run recorded, or None if it did not record one.

    Raises:
        EvidenceError: its manifest is damaged, or of another run.
    """
    packs = [folder.server_folder(role) / PACK_FOLDER for role in ROLES]
    pack = next((pack for pack in packs if (pack / MANIFEST).exists()), None)
    if pack is not None:
        check_run(pack / MANIFEST, read_manifest(pack).source.run, folder.nonce)
    return pack


def shadow_errors_of(folder: RunFolder) -> ShadowErrors | None:
    """Read the candidate's errors on the reference's inputs, from either server, or return None without a layer diff.

    Raises:
        EvidenceError: a file is damaged.
    """
    for role in ROLES:
        place = folder.server_folder(role)
        if any((place / SHADOW_FOLDER).glob("*.safetensors")):
            errors = read_shadow_errors(place, folder.nonce)
            servers = {server.role: server for server in folder.progress().servers}
            return errors if role == "reference" else with_roles_exchanged(errors, servers["candidate"].claimed_phases)
    return None


def with_roles_exchanged(errors: ShadowErrors, claimed: Sequence[str]) -> ShadowErrors:
    """Exchange the roles of errors measured in the candidate's server, where the reference was the shadow.

    The result has the candidate's errors, only for the phases that the candidate computes itself.
    """
    phases = [PHASES.index(phase) for phase in claimed]
    headers = (
        header.model_copy(
            update={
                "reference": header.candidate,
                "candidate": header.reference,
                "reference_noise": header.candidate_noise,
                "candidate_noise": header.reference_noise,
                "phases": tuple(claimed),
            }
        )
        for header in errors.headers
    )
    own = np.isin(errors.cells.index[:, DIMENSIONS.index("phase")], phases)
    return ShadowErrors(errors.cells.chosen(own).exchanged(), tuple(headers))


def layers_seen(place: Path) -> tuple[int, ...]:
    """Return the layers that called attention in a server. Raises EvidenceError if no call was counted."""
    counts = read_counters(place / COUNTERS_FOLDER)
    layers = tuple(sorted({layer for count in counts for layer in count.calls_by_layer}))
    if not layers:
        raise EvidenceError(
            f"{place} did not count an attention call.", "a server with assay's plugin", "see the server's log"
        )
    return layers
