"""Requests to a running server: write now what the shadow has summed up.

A scheduler reacts to nothing but requests. A write request is therefore a file that every process
checks at the end of a forward pass; any short question causes a pass.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.evidence.shadow_errors import FOLDER, written_requests
from assay.harness.files import write_whole

_FILE = "write-request"
_POLL_INTERVAL_S = 0.05


def latest_write_request(folder: Path) -> str:
    """Read the token of the latest write request; empty if there was none."""
    try:
        return (folder / FOLDER / _FILE).read_text()
    except FileNotFoundError:
        return ""


def _is_written(folder: Path, token: str) -> bool:
    """Return True if every living process that writes has served this request, and at least one has."""
    served = [latest for process, latest in written_requests(folder).items() if Path(f"/proc/{process}").exists()]
    return bool(served) and all(latest == token for latest in served)


def write_now(folder: Path, poke: Callable[[], None], timeout_s: float = 30.0) -> None:
    """Make a running server write its errors and its pack, and wait until it has.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        poke: sends the server a short question and waits for the answer; its errors are summed up like any other. Called once
            or twice: in its first pass a process only learns how many layers there are.
        timeout_s: seconds to wait in total, half of it after each poke.

    Raises:
        EvidenceError: nothing was written in time, or a file is damaged.
    """
    token = secrets.token_hex(8)
    write_whole(folder / FOLDER / _FILE, token, durable=False)
    for _ in range(2):
        poke()
        deadline = time.monotonic() + timeout_s / 2
        while time.monotonic() <= deadline:
            if _is_written(folder, token):
                return
            time.sleep(_POLL_INTERVAL_S)
    raise EvidenceError(
        f"The server's shadow wrote nothing to {folder / FOLDER} in {timeout_s:g} s.",
        "one file per process, written at the end of a forward pass",
        "see the server's log",
    )
