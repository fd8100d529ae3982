"""What a running server did while a fault was seeded in it, in the server's folder.

``faults/<setting>/<pid>.json`` counts the calls that had the fault. ``sensitivity/`` has the record of the answers, a scoring of
logits (`assay.harness.evidence.logit_files`) and the errors of a shadow (`assay.harness.evidence.shadow_errors`). No verdict on the
candidate reads them.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RunFile, RunRecord

FOLDER = "faults"
SENSITIVITY = "sensitivity"
"""Folder, in a server's, of what a shadow measured while a fault was switched on."""


class SeededCalls(RunRecord):
    """Calls of a process while a fault was switched on.

    Attributes:
        fault: id of the fault.
        calls: attention calls.
        changed: calls whose output the fault changed.
        refused: calls that stayed right, since the kernel contract cannot express them.
        why: why the first of these was refused; empty for none.
    """

    fault: str
    calls: NonNegativeInt
    changed: NonNegativeInt
    refused: NonNegativeInt
    why: str = ""


SEEDED_CALLS = RunFile("*.json", SeededCalls, durable=False)
"""In the folder of one setting of the control."""


def read_seeded_calls(server: Path, token: str, nonce: str = "") -> SeededCalls | None:
    """Read the calls of all processes of a server under one setting of the control; None if there was none.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    by_process = list(SEEDED_CALLS.read_each(server / FOLDER / token, nonce).values())
    if not by_process:
        return None
    return SeededCalls(
        run=by_process[0].run,
        fault=by_process[0].fault,
        calls=sum(calls.calls for calls in by_process),
        changed=sum(calls.changed for calls in by_process),
        refused=sum(calls.refused for calls in by_process),
        why=next((calls.why for calls in by_process if calls.why), ""),
    )


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
