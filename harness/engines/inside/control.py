"""Control of a server that the harness started: environment variables at its start, and files while it runs.

The server reads this file, the control, at the start of each pass, because a scheduler reacts only to requests. A request that is
sent after `set_control` has returned is certain to see the new control. A server without the file does nothing.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, field_validator

from assay.harness.errors import EvidenceError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.shadow_errors import FOLDER, written_requests
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

EVIDENCE = "ASSAY_EVIDENCE"
"""Environment variable: the folder to which a server writes its evidence (counters, admissions, ...)."""
DELEGATE = "ASSAY_DELEGATE"
"""Environment variable: the backend that computes the phases that a kernel does not declare."""
KERNEL = "ASSAY_KERNEL"
"""Environment variable: a kernel to register in addition to the published ones, as ``module:function``."""

API_KEY = "ASSAY_API_KEY"
"""Environment variable: the key that a server asks of its clients, so that only this run's requests are answered."""

SHADOW = "ASSAY_SHADOW"
"""Environment variable: a candidate to attach to the serving backend, for shadow and substitution. Needs `EVIDENCE`. It does
nothing until the control says so."""
RECORD = "ASSAY_RECORD"
"""Environment variable: byte budget of the replay pack that is recorded while the control says `shadow`. Needs `EVIDENCE`."""
TRACE = "ASSAY_TRACE"
"""Environment variable: byte budget per process of all traces of attention outputs. Needs `EVIDENCE`. Without it, a trace is
refused."""
FORCED = "ASSAY_FORCED"
"""Environment variable: not empty in a server that may be given tokens to write, if its engine needs to know."""
FORCED_REQUEST = "assay-forced-"
"""How the names of requests begin that may be given tokens to write."""
FORCED_TOKENS = "assay_forced"
"""Key under which a request brings these tokens itself, if its engine passes further arguments on."""
FAULTS = "ASSAY_FAULTS"
"""Environment variable: not empty in a server that may be asked to seed a fault (`Control.fault`). Needs `EVIDENCE`."""
MODEL_HASH = "ASSAY_MODEL_HASH"
"""Environment variable: hash of the model's files, recorded in the replay pack."""

CONTROL = "control.json"
"""File of the control, in a server's folder."""
_SUBSTITUTED = "substituted"
# A write request: every process checks this file at the end of a pass, which any short question causes.
_WRITE_REQUEST = "write-request"
_POLL_INTERVAL_S = 0.05


class TracedRequest(Record):
    """A request whose calls a trace records whole: the inputs of attention, the keys and values it reads, and its output.

    Attributes:
        request: the engine's id. Other requests of its batches are not kept.
        until: position of the last query to keep, from 0. Of the pass that computes it, K and V of all tokens up to it are kept as
            attention reads them.
    """

    request: str
    until: int


class Control(Record):
    """The setting of a server with an attached candidate (``ASSAY_SHADOW``) for the passes that start from now on.

    Attributes:
        shadow: the candidate runs in the shadow: its errors are summed up, and calls are recorded (``ASSAY_RECORD``). Switching it
            off and on again starts a new session, which discards the previous one.
        substitute: layers in which the model uses the candidate's output, in the phases that the candidate computes.
        trace: label under which attention outputs are kept, or empty to keep none. Letters, digits, ``.``, ``_`` and ``-``. A label
            serves one request; the next request needs a new label.
        traced: the request to trace, in any batch, with its inputs; by default the only request of every pass, without inputs.
        fault: id of a fault of `assay.harness.attention.bugs.family.BY_ID` that outputs have, or empty without a fault. With
            `shadow`, only those of the candidate in the shadow have it, in a separate session; otherwise those that the model
            uses.
        profile: label under which the kernels of one pass of each kind are listed, or empty. Same characters. It needs no
            attached candidate.
        fingerprint: label under which each process writes the fingerprint of what it serves, once, after its next pass, or empty
            for none. Same characters. It needs no attached candidate.
    """

    shadow: bool = False
    substitute: tuple[int, ...] = ()
    trace: str = ""
    traced: TracedRequest | None = None
    fault: str = ""
    profile: str = ""
    fingerprint: str = ""

    @property
    def observes(self) -> bool:
        """True if the control asks for something at the calls. A profile does not: it lists the kernels of any pass."""
        return self.shadow or bool(self.substitute or self.trace or self.fault)

    @property
    def replaces(self) -> bool:
        """True if the model gets outputs other than the serving backend's."""
        return bool(self.substitute) or bool(self.fault and not self.shadow)

    @field_validator("substitute")
    @classmethod
    def _layers(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if any(layer < 0 for layer in layers):
            raise ValueError(f"layers are numbered from 0, found {min(layers)}")
        return tuple(sorted(set(layers)))

    @field_validator("trace", "fault", "profile", "fingerprint")
    @classmethod
    def _label(cls, label: str) -> str:
        if label and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", label):
            raise ValueError(f"the label {label!r} is not a plain name; expected letters, digits, '.', '_' and '-'")
        return label


class Setting(Record):
    """A control as it is on disk.

    Attributes:
        token: identifies this setting.
        session: identifies the shadow session. It stays the same while successive settings keep the shadow on, and is empty if it
            is off.
        control: what the server does.
    """

    token: str = ""
    session: str = ""
    control: Control = Field(default_factory=Control)


def set_control(folder: Path, control: Control) -> str:
    """Replace a server's control.

    A caller that changes `substitute` or `fault` must also empty the server's prefix cache, whose K and V were computed under the
    old control.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``), created if it does not exist.

    Returns:
        The token of the setting.

    Raises:
        EvidenceError: it cannot be written.
    """
    token = secrets.token_hex(8)
    # Decided here, not in the server: it may not have run a single pass while the shadow was off.
    session = (_session(folder, control.fault) or token) if control.shadow else ""
    write_whole(
        folder / CONTROL, Setting(token=token, session=session, control=control).model_dump_json(), durable=False
    )
    return token


def read_setting(folder: Path) -> Setting:
    """Read a server's setting; the default, with everything off, if no control was set.

    Raises:
        EvidenceError: the control is damaged.
    """
    path = folder / CONTROL
    return read_json(path, Setting, "delete the file, or set the control again") if path.exists() else Setting()


def substituted_calls(folder: Path) -> dict[int, int]:
    """Count the substituted calls per layer since the control was set. Layers without any are left out.

    Under tensor parallelism each process counts its own share of a call.

    Raises:
        EvidenceError: the control is damaged.
    """
    calls: dict[int, int] = {}
    for count in read_counters(substitution_folder(folder, read_setting(folder).token)):
        for layer, number in count.calls_by_layer.items():
            calls[layer] = calls.get(layer, 0) + number
    return calls


def substitution_folder(folder: Path, token: str) -> Path:
    """Return the folder in which the substituted calls of a setting are counted (`assay.harness.evidence.counters`)."""
    return folder / _SUBSTITUTED / token


def _session(folder: Path, fault: str) -> str:
    """Return the running shadow session with this fault, or an empty string: a damaged file is about to be replaced."""
    try:
        setting = read_setting(folder)
        return setting.session if setting.control.fault == fault else ""
    except EvidenceError:
        return ""


def latest_write_request(folder: Path) -> str:
    """Read the token of the latest write request, or an empty string."""
    try:
        return (folder / FOLDER / _WRITE_REQUEST).read_text()
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
    write_whole(folder / FOLDER / _WRITE_REQUEST, token, durable=False)
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
