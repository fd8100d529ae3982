"""The files of a run: each one's place, its contents, and the advice if it is damaged.

Every file carries its run's nonce, a random name, as ``run``, so that a file from another run is noticed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.files import write_whole
from assay.harness.reading import regular_file
from assay.harness.schema import Record, read_json

if TYPE_CHECKING:
    import numpy as np

RUN = "ASSAY_RUN"
"""Environment variable: nonce of the run for which a server's processes write evidence."""
REPEAT_RUN = "remove it and repeat the run's command with --out set to this folder"
"""Advice for a damaged part of a run's folder that the run can make again."""
RUN_AGAIN = "run again with a new --out"
"""Advice for a damaged part that the run cannot make again."""
RESUME = "repeat the run's command with --out set to its folder, which resumes"
"""Advice for a part that does not exist yet."""


class RunRecord(Record):
    """Base class for the contents of a run's files. It carries the run's nonce, or "" if it does not belong to a run."""

    run: str = ""


def new_nonce() -> str:
    """Draw a unique name: 64 random bits in hexadecimal."""
    return secrets.token_hex(8)


def nonce_of_process() -> str:
    """Return the nonce of the run that started this process, or "" if it does not belong to a run."""
    return os.environ.get(RUN, "")


def check_run(path: Path, carried: str, nonce: str) -> None:
    """Refuse evidence of another run.

    Args:
        carried: the nonce in the evidence.
        nonce: the run's nonce, or empty to check nothing, if the files do not belong to a run.

    Raises:
        EvidenceError: the nonces differ.
    """
    if nonce and carried != nonce:
        raise EvidenceError(
            f"{path} belongs to {f'run {carried}' if carried else 'no run'}, but its folder to run {nonce}.",
            "evidence of this run only",
            "restore the file, or run again with a new --out",
        )


Kind = TypeVar("Kind", bound=RunRecord)


@dataclass(frozen=True)
class RunFile(Generic[Kind]):
    """A JSON file in the folder of a run or of one of its servers.

    Attributes:
        name: its path in that folder. A ``*`` stands for the process if each server process writes a separate file.
        kind: type of its contents.
        do: advice if it is damaged.
        durable: see `assay.harness.files.write_whole`; also whether it is indented for people.
    """

    name: str
    kind: type[Kind]
    do: str = REPEAT_RUN
    durable: bool = True

    def write(self, folder: Path, record: Kind, nonce: str = "", process: str = "") -> None:
        """Replace the file.

        Args:
            nonce: the run's nonce, which the record gets, or empty to keep the record's own.
            process: replacement for the ``*`` in the name, or empty for this process's id.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        path = folder / self.name.replace("*", process or str(os.getpid()))
        record = record.model_copy(update={"run": nonce}) if nonce else record
        write_whole(path, record.model_dump_json(indent=1 if self.durable else None), durable=self.durable)

    def read(self, folder: Path, nonce: str = "") -> Kind | None:
        """Read the file, or return None if it does not exist.

        Args:
            nonce: the run's nonce, which the file must carry, or empty to accept any.

        Raises:
            EvidenceError: the file is damaged, or of another run.
        """
        path = folder / self.name
        return self._read(path, nonce) if path.exists() else None

    def read_each(self, folder: Path, nonce: str = "") -> dict[str, Kind]:
        """Read the file of each process, keyed and sorted by the text that matches the ``*``.

        For arguments and errors, see `read`.
        """
        head, tail = (folder / self.name).name.split("*")
        return {
            path.name.removeprefix(head).removesuffix(tail): self._read(path, nonce)
            for path in sorted(folder.glob(self.name))
        }

    def _read(self, path: Path, nonce: str) -> Kind:
        record = read_json(path, self.kind, self.do)
        check_run(path, record.run, nonce)
        return record


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], header: RunRecord, *, durable: bool = True) -> None:
    """Replace a safetensors file of arrays, with their description in its metadata.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    import numpy as np
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(path, save(contiguous, {"header": header.model_dump_json()}), durable=durable)


def read_arrays(path: Path, kind: type[Kind], run: str, do: str) -> tuple[Kind, dict[str, Any]]:
    """Read the header and the arrays of a file, by name.

    Args:
        kind: type of its header.
        run: the nonce that it must carry, or empty to accept any.
        do: advice if it is damaged.

    Raises:
        EvidenceError: the file is missing, damaged or of another run.
    """
    from safetensors import SafetensorError, safe_open

    try:
        regular_file(path)
        with safe_open(path, framework="numpy") as file:
            header = kind.model_validate_json((file.metadata() or {})["header"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, KeyError, ValidationError) as error:
        raise damaged(path, str(error), do) from None
    check_run(path, header.run, run)
    return header, arrays


def damaged(path: Path, what: str, do: str) -> EvidenceError:
    """Make the error for a damaged file of arrays."""
    return EvidenceError(f"{path} is damaged: {what.splitlines()[0]}.", "a file from this version of assay", do)
