"""How many calls of a running server had a seeded fault: ``faults/<setting>/<pid>.json`` in the server's folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt

from assay.harness.evidence.folder import REPEAT_RUN
from assay.harness.evidence.nonce import check_run
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

FOLDER = "faults"
SENSITIVITY = "sensitivity"
"""Folder, in a server's, of what a shadow measured while a fault was switched on."""


class SeededCalls(Record):
    """Calls of a process while a fault was switched on.

    Attributes:
        run: nonce of the run.
        fault: id of the fault.
        calls: attention calls.
        changed: calls whose output the fault changed.
        refused: calls that stayed right, since the kernel contract cannot express them.
        why: why the first of these was refused; empty for none.
    """

    run: str = ""
    fault: str
    calls: NonNegativeInt
    changed: NonNegativeInt
    refused: NonNegativeInt
    why: str = ""


def write_seeded_calls(server: Path, token: str, process: str, counts: SeededCalls) -> None:
    """Replace the counts of a process under one setting of the control.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(server / FOLDER / token / f"{process}.json", counts.model_dump_json(), durable=False)


def read_seeded_calls(server: Path, token: str, nonce: str = "") -> SeededCalls | None:
    """The calls of all processes of a server under one setting of the control; None if there was none.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    found = []
    for path in sorted((server / FOLDER / token).glob("*.json")):
        counts = read_json(path, SeededCalls, REPEAT_RUN)
        check_run(path, counts.run, nonce)
        found.append(counts)
    if not found:
        return None
    return SeededCalls(
        run=found[0].run,
        fault=found[0].fault,
        calls=sum(one.calls for one in found),
        changed=sum(one.changed for one in found),
        refused=sum(one.refused for one in found),
        why=next((one.why for one in found if one.why), ""),
    )
