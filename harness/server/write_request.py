"""Asking a running server's processes to write what their shadow has summed up.

A scheduler is a busy loop, or sleeps, and listens to nothing but requests. So a request to write lies in a file, which is looked at
at the end of every forward pass; any small question brings a pass about.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from assay.harness.errors import EvidenceError
from assay.harness.evidence.shadow_sums import FOLDER, answers
from assay.harness.files import write_whole

_FILE = "ask"
_POLL_EVERY_S = 0.05


def ask_to_write(folder: Path, token: str) -> None:
    """Leave a request to write in a server's folder (``ASSAY_EVIDENCE``); `token` names it, and is new each time."""
    write_whole(folder / FOLDER / _FILE, token)


def asked(folder: Path) -> str:
    """The token of the latest request to write; empty if there was none."""
    try:
        return (folder / FOLDER / _FILE).read_text()
    except FileNotFoundError:
        return ""


def answered(folder: Path, token: str) -> bool:
    """Whether every living process that has written has answered this request, and at least one has."""
    given = [answer for process, answer in answers(folder).items() if psutil.pid_exists(process)]
    return bool(given) and all(answer == token for answer in given)


def bring_up_to_date(folder: Path, poke: Callable[[], None], timeout_s: float = 30.0) -> None:
    """Have a running server write its cells and its pack, and return when that is done.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        poke: sends the server a small question and returns when it is answered; its own errors are summed up too. Called once
            or twice: the first pass of a process only teaches it how many layers there are.
        timeout_s: seconds to wait after each.

    Raises:
        EvidenceError: nothing was written in time, or a file is damaged.
    """
    token = secrets.token_hex(8)
    ask_to_write(folder, token)
    for _ in range(2):
        poke()
        deadline = time.monotonic() + timeout_s / 2
        while not answered(folder, token):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_EVERY_S)
        else:
            return
    raise EvidenceError(
        f"the server's shadow wrote nothing to {folder / FOLDER} in {timeout_s:g} s.",
        "one file a process, at the end of a forward pass",
        "see the server's log; a backend whose passes are replayed CUDA graphs cannot be watched: start without them",
    )
