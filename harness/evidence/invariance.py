"""The evidence of ``assay invariance``: the plan, and the answers of each variant.

``manifest.json`` is the plan, ``probes/<number>.json`` one pass over the probes in one server with some features on, and
``servers/<number>/`` a server's files. ``end.json`` seals all of it once the whole plan was run.
"""

from __future__ import annotations

from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.folder import EndedFolder
from assay.harness.evidence.manifest import Origin
from assay.harness.reading import whole_file

FOLDER = "invariance"


class InvarianceManifest(Origin):
    """The planned comparison.

    Attributes:
        backend: attention backend of the base.
        features: ids of the features that arms switch.
        not_covered: features that cannot be switched here: id -> reason.
        arms: the planned arms after the base, each as the ids of its features.
        dtype: dtype of the activations, such as "float32".
        lengths: probe id -> tokens in its prompt, in its shared prefix, and in its answer.
    """

    backend: str
    features: tuple[str, ...]
    not_covered: dict[str, str]
    arms: tuple[tuple[str, ...], ...]
    dtype: str
    lengths: dict[str, tuple[int, int, int]]


class InvarianceFolder(EndedFolder[InvarianceManifest]):
    """The folder of an invocation."""

    kind = InvarianceManifest

    def server_folder(self, number: int) -> Path:
        """Return the folder of a server's evidence."""
        return self.path / "servers" / f"{number:02d}"

    def log(self, number: int) -> Path:
        """Return the log of a server."""
        return self.path / f"server-{number:02d}.log"

    def fingerprint(self, number: int) -> Fingerprint | None:
        """Read a server's fingerprint, if it reported one. Raises EvidenceError if it is damaged, or of another run."""
        return FINGERPRINT.read(self.server_folder(number), self.nonce)


def compares_features(folder: Path) -> bool:
    """Return True if ``assay invariance`` wrote the folder. Only its manifest lists features that are not covered."""
    try:
        return b'"not_covered"' in whole_file(folder / "manifest.json")
    except (OSError, EvidenceError):
        return False
