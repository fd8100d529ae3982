"""Measurements of a server while a fault was switched on in it: ``sensitivity/`` in the server's folder.

The folder holds the record of the answers, a scoring of logits (`assay.harness.evidence.logit_files`) and the errors of a shadow
(`assay.harness.evidence.shadow_errors`). No verdict on the candidate reads them.
"""

from __future__ import annotations

from assay.harness.evidence.faults import SENSITIVITY, SeededCalls
from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RunFile


class SensitivityRecord(RunRecord):
    """The record of what a server did under a seeded fault, written when it was done.

    Attributes:
        fault: id of the fault.
        served: calls while the fault was in what the model used; None if it never was.
        answers: answers of the candidate with the fault, in the order in which the questions were asked.
        scored: number of sequences whose logits were scored with the fault.
        shadowed: calls while the fault was in the candidate in the shadow; None if it never was.
        seconds: time taken.
    """

    fault: str
    served: SeededCalls | None = None
    answers: tuple[Answer, ...] = ()
    scored: int = 0
    shadowed: SeededCalls | None = None
    seconds: float


SENSITIVITY_RECORD = RunFile(f"{SENSITIVITY}/record.json", SensitivityRecord)
