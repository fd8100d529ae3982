"""What was measured of a server while a fault was switched on in it: ``sensitivity/`` in the server's folder.

The folder holds the record of the answers, a scoring of logits (`assay.harness.evidence.logit_files`) and the errors of a shadow
(`assay.harness.evidence.shadow_errors`). No verdict on the candidate reads them.
"""

from __future__ import annotations

from pathlib import Path

from assay.harness.evidence.faults import SENSITIVITY, SeededCalls
from assay.harness.evidence.folder import REPEAT_RUN, RunFolder
from assay.harness.evidence.nonce import check_run
from assay.harness.evidence.records import Answer
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json
from assay.harness.sides import Role

_RECORD = "record.json"


class SensitivityRecord(Record):
    """What a server did under a seeded fault, written when it was done.

    Attributes:
        run: nonce of the run.
        fault: id of the fault.
        served: calls while the fault was in what the model used; None if it never was.
        answers: answers of the candidate with the fault, in the order in which the questions were asked.
        scored: number of sequences whose logits were scored with the fault.
        shadowed: calls while the fault was in the candidate in the shadow; None if it never was.
        seconds: time taken.
    """

    run: str = ""
    fault: str
    served: SeededCalls | None = None
    answers: tuple[Answer, ...] = ()
    scored: int = 0
    shadowed: SeededCalls | None = None
    seconds: float


def sensitivity_folder(server: Path) -> Path:
    """The folder of what was measured under a fault, in a server's folder."""
    return server / SENSITIVITY


def write_sensitivity(server: Path, record: SensitivityRecord) -> None:
    """Write the record into a server's folder.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(sensitivity_folder(server) / _RECORD, record.model_dump_json(indent=1))


def read_sensitivity(folder: RunFolder, role: Role) -> SensitivityRecord | None:
    """The record of a role's server; None if nothing was measured under a fault there, or not to the end.

    Raises:
        EvidenceError: the file is damaged, or of another run.
    """
    path = sensitivity_folder(folder.server_folder(role)) / _RECORD
    if not path.exists():
        return None
    record = read_json(path, SensitivityRecord, REPEAT_RUN)
    check_run(path, record.run, folder.nonce)
    return record
