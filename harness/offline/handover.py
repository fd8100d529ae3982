"""Passes on what a process that runs a kernel has found, to the one that waits: a kernel may end its process at any call."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.harness.offline.interrupted import Known


class _Pickler(pickle.Pickler):
    """Pickles objects that both processes hold as their numbers: a kernel or a case may be a function without a name."""

    def __init__(self, file: IO[bytes], shared: Sequence[object]) -> None:
        super().__init__(file)
        self._number = {id(item): number for number, item in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self._number.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], shared: Sequence[object]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> object:
        return self.shared[pid]


def dumps(what: object, shared: Sequence[object] = ()) -> bytes:
    """Pickle something for another process; objects that both hold, `shared`, stay themselves."""
    file = io.BytesIO()
    _Pickler(file, shared).dump(what)
    return file.getvalue()


def loads(data: bytes, shared: Sequence[object] = ()) -> Any:
    """Unpickle what another process has pickled with `dumps`, and the same `shared`."""
    return _Unpickler(io.BytesIO(data), shared).load()


class Handover:
    """A file without a name that both processes hold. Records are pickled: only the process of the kernel writes them.

    Args:
        shared: objects that both processes hold.
    """

    def __init__(self, shared: Sequence[object] = ()) -> None:
        self.how = ""
        self.shared = shared
        self._file: IO[bytes] | None = None

    def open(self, descriptor: int | None = None) -> int:
        """Begin to keep records, before the other process is started; or, in that process, in its file.

        Returns:
            The descriptor of the file.
        """
        self._file = tempfile.TemporaryFile() if descriptor is None else os.fdopen(descriptor, "r+b")  # noqa: SIM115 (it lives as long as the process)
        return self._file.fileno()

    def close(self) -> None:
        """Keep no more records."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Forget all records."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()

    def put(self, *record: object) -> None:
        """Add a record; nothing happens in a process that is not supervised."""
        if self._file is not None:
            with suppress(OSError):  # a full disk: the check goes on
                os.write(self._file.fileno(), dumps(record, self.shared))

    def ended(self, how: str) -> bool:
        """Remember how the process ended, for the next one. Whether there is anything to say of it."""
        if self._file is None or not os.fstat(self._file.fileno()).st_size:
            return False
        self.how = how
        return True

    def known(self) -> Known | None:
        """Read what a process left that has ended; None if none has, or it left nothing."""
        from assay.harness.offline.interrupted import Known

        if not (records := self._records()):
            return None
        last = [record for record in records if record[0] in ("begins", "ends")][-1:]
        call = last[0][1] if last and last[0][0] == "begins" else ""
        results = [record[1] for record in records if record[0] == "stands"]
        computed = tuple(record[1:] for record in records if record[0] == "computed")
        asked = next((record[1:] for record in records if record[0] == "asked"), None)
        return Known(self.how, call, computed, results[-1] if results else None, asked)

    def _records(self) -> list[tuple[Any, ...]]:
        """Read the records of the process that ended, as far as they are whole; empty if this is the first process."""
        records: list[tuple[Any, ...]] = []
        if self._file is None or not self.how:
            return records
        self._file.seek(0)
        while True:
            try:
                records.append(_Unpickler(self._file, self.shared).load())
            except Exception:  # the end of the file, or of a record that was being written
                return records
