"""What the process of a command hands over to the one that supervises it: a kernel may end its process at any call.

The supervisor then runs the command once more, in another process, which calls no kernel and renders what was handed over.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.harness.attention.call import AttentionCall
    from assay.harness.attention.matrix import Case
    from assay.harness.evidence.cause import ReplayResult
    from assay.harness.offline.check import CheckResult
    from assay.harness.offline.interrupted import Known
    from assay.harness.offline.watcher import Watcher


class Handover:
    """A file without a name that both processes hold. Records are pickled: only the command's own process writes them."""

    def __init__(self) -> None:
        self.how = ""
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Begin to keep records; before the process of the command is forked."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)

    def put(self, *record: object) -> None:
        """Add a record; nothing happens in a process that is not supervised."""
        if self._file is not None:
            with suppress(OSError):  # a full disk: the check goes on
                os.write(self._file.fileno(), pickle.dumps(record))

    def ended(self, how: str) -> bool:
        """Remember how the process ended, for the next one. Whether there is anything to say of it."""
        if self._file is None or not os.fstat(self._file.fileno()).st_size:
            return False
        self.how = how
        return True

    def records(self) -> list[tuple[Any, ...]]:
        """The records of the process that ended, as far as they are whole; empty if this is the first process."""
        found: list[tuple[Any, ...]] = []
        if self._file is None or not self.how:
            return found
        self._file.seek(0)
        while True:
            try:
                found.append(pickle.load(self._file))
            except Exception:  # the end of the file, or of a record that was being written
                return found


handover = Handover()


def watcher() -> Watcher:
    """A watcher that hands over what it is told."""
    from assay.harness.localize.diagnose import describe
    from assay.harness.offline.watcher import Watcher

    class Hands(Watcher):
        def begins(self, call: AttentionCall) -> None:
            handover.put("begins", describe(call))

        def ends(self) -> None:
            handover.put("ends")

        def computed(self, case: Case, fails: bool, own: float, bound: float) -> None:
            handover.put("computed", case.name, fails, own, bound)

        def stands(self, result: CheckResult | ReplayResult) -> None:
            handover.put("stands", result)

    return Hands()


def known() -> Known | None:
    """What a check left whose process ended; None if this is the first process of the command."""
    from assay.harness.offline.interrupted import Known

    if not (records := handover.records()):
        return None
    last = [record for record in records if record[0] in ("begins", "ends")][-1:]
    call = last[0][1] if last and last[0][0] == "begins" else ""
    results = [record[1] for record in records if record[0] == "stands"]
    computed = tuple(record[1:] for record in records if record[0] == "computed")
    return Known(handover.how, call, computed, results[-1] if results else None)
