"""The nonce: the random name of a run. Every file of its evidence carries it as ``run``, so a file of another run is noticed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.schema import Record

RUN = "ASSAY_RUN"
"""Environment variable: the nonce of the run whose evidence a server's processes write."""


class RunRecord(Record):
    """Base of what the files of a run hold: it carries the nonce of the run, empty where it belongs to none."""

    run: str = ""


def new_nonce() -> str:
    """Draw a name that no other run has: 64 random bits in hexadecimal."""
    return secrets.token_hex(8)


def nonce_of_process() -> str:
    """Return the nonce of the run that started this process; empty in a process that belongs to no run."""
    return os.environ.get(RUN, "")


def check_run(path: Path, carried: str, nonce: str) -> None:
    """Refuse evidence of another run.

    Args:
        carried: the nonce that it carries.
        nonce: the run's; empty where files belong to no run, and nothing is checked.

    Raises:
        EvidenceError: they differ.
    """
    if nonce and carried != nonce:
        raise EvidenceError(
            f"{path} belongs to {f'run {carried}' if carried else 'no run'}, but its folder to run {nonce}.",
            "evidence of this run alone",
            "restore the file, or run again with a new --out",
        )
