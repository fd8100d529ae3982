"""A candidate's errors in the shadow: the files that a server's processes write, and their reader.

Each process writes one file, ``shadow/<pid>.safetensors``: a table of errors (`assay.harness.evidence.error_table`), against the
reference over all queries and against the truth over sampled queries of every call, with a header in its metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.error_table import ErrorTable, RoleErrors, joined
from assay.harness.evidence.run_file import RunRecord, damaged, read_arrays, write_arrays
from assay.harness.schema import Record

FOLDER = "shadow"
_DO = "run again in a new folder"
_ROLES = ("candidate", "reference")
Known = Literal["window", "given"]
"""Known deviations of a backend from the layer's request: a window with one key fewer or more, or attention to new K and V as given
instead of as the cache stores them, in fewer bits. The backend's own error is measured against the deviation."""


class FailedCalls(Record):
    """Calls of a layer and phase that the candidate did not compute: their number, and the first error."""

    layer: int
    phase: Literal["extend", "decode"]
    calls: int
    text: str


class ShadowHeader(RunRecord):
    """The description of a file's sums.

    Attributes:
        reference: the serving backend, or backends.
        candidate: the kernel in the shadow, or empty if calls were only recorded.
        phases: phases that the candidate computes. The cells of other phases are not observed.
        passes: forward passes with the shadow on.
        failed: calls that the candidate did not compute.
        unrecorded: layers whose calls could not be recorded, and why.
        untested: layers with a call that could not be compared with the truth, and why.
        known: layers and phases where either side has a known deviation, so that their difference is not an error of either.
        candidate_noise: the candidate's noise family.
        reference_noise: the reference's noise family, in the phases that it computes itself.
        dtype: dtype of the calls compared with the truth, or empty without such calls.
        accumulation: arithmetic of the candidate's noise family on this device, such as "tf32".
        features: features beyond plain attention in calls that were compared with the truth; see `CallSpec.features`.
        effects: layer, phase and feature of its calls -> whether the feature changed a query's output by more than its bound.
        heads: q heads of each observed layer, over all processes that share them.
        rows: queries in the observed passes.
        sampled_rows: queries among them that are compared with the truth.
        write_request: the latest write request served; see `assay.harness.engines.inside.control`.
    """

    reference: str
    candidate: str
    phases: tuple[str, ...]
    passes: int = 0
    failed: tuple[FailedCalls, ...] = ()
    unrecorded: dict[int, str] = Field(default_factory=dict)
    untested: dict[int, str] = Field(default_factory=dict)
    known: tuple[tuple[int, Literal["extend", "decode"], Known], ...] = ()
    candidate_noise: str = ""
    reference_noise: str = ""
    dtype: str = ""
    accumulation: str = ""
    features: tuple[str, ...] = ()
    effects: tuple[tuple[int, Literal["extend", "decode"], str, bool], ...] = ()
    heads: dict[int, int] = Field(default_factory=dict)
    rows: int = 0
    sampled_rows: int = 0
    write_request: str = ""


@dataclass(frozen=True)
class ShadowErrors:
    """The observations of a server's shadows.

    Attributes:
        cells: the sums by cell.
        headers: one per process.
    """

    cells: ErrorTable
    headers: tuple[ShadowHeader, ...]

    @property
    def failed_calls(self) -> tuple[FailedCalls, ...]:
        """Calls that the candidate did not compute, in all processes."""
        return tuple(calls for header in self.headers for calls in header.failed)

    @property
    def known(self) -> set[tuple[int, str, Known]]:
        """`ShadowHeader.known` of all processes."""
        return {place for header in self.headers for place in header.known}

    @property
    def heads(self) -> dict[int, int]:
        """The q heads of each observed layer, in all processes together."""
        return {layer: heads for header in self.headers for layer, heads in header.heads.items()}


def write_shadow_errors(path: Path, cells: ErrorTable, header: ShadowHeader) -> None:
    """Replace the file of a process. Raises EvidenceError if the disk is full or not writable."""
    arrays = {"index": cells.index, "apart": cells.apart} | {
        f"{role}.{column.name}": getattr(getattr(cells, role), column.name)
        for role in _ROLES
        for column in fields(RoleErrors)
    }
    write_arrays(path, arrays, header, durable=False)


def read_shadow_errors(folder: Path, run: str = "") -> ShadowErrors:
    """Read the errors that all processes of a server observed.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        run: the nonce that each file must carry, or empty to accept any.

    Raises:
        UsageError: the shadow never ran there.
        EvidenceError: a file is damaged or of another run, or the processes ran different backends.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder} has no shadow errors.",
            f"files {FOLDER}/*.safetensors",
            "start the server with ASSAY_SHADOW=<candidate>, switch the shadow on and send a request",
        )
    headers, tables = zip(*(_read(file, run) for file in files), strict=True)
    if len({(header.reference, header.candidate) for header in headers}) > 1:
        raise EvidenceError(
            f"{folder} has errors of different backends.", "one reference and one candidate", "use a new folder"
        )
    return ShadowErrors(joined(tables), headers)


def _read(path: Path, run: str = "") -> tuple[ShadowHeader, ErrorTable]:
    header, arrays = read_arrays(path, ShadowHeader, run, _DO)
    try:
        roles = (RoleErrors(*(arrays[f"{role}.{column.name}"] for column in fields(RoleErrors))) for role in _ROLES)
        return header, ErrorTable(arrays["index"], arrays["apart"], *roles)
    except KeyError as error:
        raise damaged(path, f"{error} is missing", _DO) from None


def written_requests(folder: Path) -> dict[int, str]:
    """Read the latest write request that each process served, by process id, without processes that wrote nothing.

    Raises:
        EvidenceError: a file is damaged.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    return {int(file.stem): _read(file)[0].write_request for file in files}
