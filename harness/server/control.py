"""What a running server's attached candidate shall do from now on: set by the harness in a file, read at the start of each pass.

A scheduler listens to nothing but requests, so the control lies in a file that a server looks at when a forward pass begins: a
request that is sent after `set_control` has returned is certain to see it. A server without the file does nothing.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from pydantic import Field, ValidationError, field_validator

from assay.harness.errors import EvidenceError
from assay.harness.evidence.counters import read_counters
from assay.harness.files import write_whole
from assay.harness.schema import Record

_FILE = "control.json"
_SUBSTITUTED = "substituted"


class Control(Record):
    """What a server that has a candidate beside it (``ASSAY_SHADOW``) does in the passes that begin from now on.

    Attributes:
        watch: the candidate runs in the shadow: its errors are summed up, and calls are recorded (``ASSAY_RECORD``). Switched on
            after it was off, a watch begins anew: nothing of an earlier one is in what it writes.
        substitute: layers in which the candidate's output is what the model uses, in the phases that the candidate computes.
        trace: label under which attention outputs are kept; empty for none. Letters, digits, ``.``, ``_`` and ``-``. A label is
            for one request: the next one needs a new label.
    """

    watch: bool = False
    substitute: tuple[int, ...] = ()
    trace: str = ""

    @field_validator("substitute")
    @classmethod
    def _layers(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if any(layer < 0 for layer in layers):
            raise ValueError(f"layers are numbered from 0, found {min(layers)}")
        return tuple(sorted(set(layers)))

    @field_validator("trace")
    @classmethod
    def _label(cls, label: str) -> str:
        if label and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", label):
            raise ValueError(f"the label {label!r} is no plain name; expected letters, digits, '.', '_' and '-'")
        return label


class Setting(Record):
    """A control as it lies on disk.

    Attributes:
        token: tells this time of setting it from any other.
        watch: tells this watch from any other; it stays the same while one setting after another says `watch`. Empty for none.
        control: what the server shall do.
    """

    token: str = ""
    watch: str = ""
    control: Control = Field(default_factory=Control)


def set_control(folder: Path, control: Control) -> None:
    """Replace a server's control.

    Whoever changes `substitute` also empties the server's prefix cache: what lies there was computed under the control before.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``); made if it is not there.
        control: what the server shall do.

    Raises:
        EvidenceError: it cannot be written.
    """
    token = secrets.token_hex(8)
    # Here and not in the server, which may not have looked at all while the watch was off.
    watch = (_watch_of(folder) or token) if control.watch else ""
    write_whole(folder / _FILE, Setting(token=token, watch=watch, control=control).model_dump_json())


def read_control(folder: Path) -> Control:
    """A server's control; everything is off where there is none.

    Raises:
        EvidenceError: the file is damaged.
    """
    return _read(folder).control


def substituted(folder: Path) -> dict[int, int]:
    """Calls by layer whose output the candidate gave since the control was set; layers without any are left out.

    Under tensor parallelism each process counts its own share of a call.

    Raises:
        EvidenceError: the control is damaged.
    """
    calls: dict[int, int] = {}
    for count in read_counters(substitution_folder(folder, _read(folder).token)):
        for layer, number in count.calls_by_layer.items():
            calls[layer] = calls.get(layer, 0) + number
    return calls


def substitution_folder(folder: Path, token: str) -> Path:
    """Where the calls that were substituted under one setting are counted (`assay.harness.evidence.counters`)."""
    return folder / _SUBSTITUTED / token


class ControlReader:
    """The server's side: the latest setting, for one look at the file's status where it did not change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[int, int] | None = None
        self._setting = Setting()

    def latest(self) -> Setting:
        """The setting that holds now.

        Raises:
            EvidenceError: the file is damaged.
        """
        try:
            status = os.stat(self._folder / _FILE)
            found = (status.st_mtime_ns, status.st_ino)
        except FileNotFoundError:
            found = None
        if found != self._read:
            self._read, self._setting = found, _read(self._folder)
        return self._setting


def _watch_of(folder: Path) -> str:
    """The watch that is on; empty if none is, or if the file is damaged: it is about to be replaced."""
    try:
        return _read(folder).watch
    except EvidenceError:
        return ""


def _read(folder: Path) -> Setting:
    try:
        return Setting.model_validate_json((folder / _FILE).read_text())
    except FileNotFoundError:
        return Setting()
    except (OSError, ValidationError) as error:
        raise EvidenceError(
            f"{folder / _FILE} cannot be read: {str(error).splitlines()[0]}.",
            "what set_control wrote",
            "delete the file, or set the control again",
        ) from None
