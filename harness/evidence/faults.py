"""Files about a seeded fault in a running server, in the server's folder.

``faults/<setting>/<pid>.json`` counts the calls that had the fault. ``sensitivity/`` has the record of the answers, a scoring of
logits (`assay.harness.evidence.logit_files`) and the errors of a shadow (`assay.harness.evidence.shadow_errors`). The verdict on
the candidate does not use them.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RunFile, RunRecord

FOLDER = "faults"
SENSITIVITY = "sensitivity"
"""Folder of a shadow's measurements while a fault was switched on, in a server's folder."""


class SeededCalls(RunRecord):
    """A process's calls while a fault was switched on.

    Attributes:
        fault: id of the fault.
        calls: attention calls.
        changed: calls whose output the fault changed.
        refused: calls that stayed right, because the kernel contract cannot express them.
        why: why the first of these was refused, or empty if none was.
    """

    fault: str
    calls: NonNegativeInt
    changed: NonNegativeInt
    refused: NonNegativeInt
    why: str = ""


SEEDED_CALLS = RunFile("*.json", SeededCalls, durable=False)
"""Counts per process, in the folder of one setting of the control."""


def read_seeded_calls(server: Path, token: str, nonce: str = "") -> SeededCalls | None:
    """Read the calls of all processes of a server under one setting of the control, or return None if there were none.

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
    """The record of a server's work under a seeded fault, written at its end.

    Attributes:
        fault: id of the fault.
        served: calls while the fault was in the served backend, or None if it never was.
        answers: the candidate's answers with the fault, in the order of asking.
        scored: number of sequences whose logits were scored with the fault.
        shadowed: calls while the fault was in the shadow's candidate, or None if it never was.
        seconds: time taken.
    """

    fault: str
    served: SeededCalls | None = None
    answers: tuple[Answer, ...] = ()
    scored: int = 0
    shadowed: SeededCalls | None = None
    seconds: float


SENSITIVITY_RECORD = RunFile(f"{SENSITIVITY}/record.json", SensitivityRecord)
