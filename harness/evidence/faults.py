"""Counts of the calls of a running server that had a seeded fault: ``faults/<setting>/<pid>.json`` in the server's folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.run_file import RunFile

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
