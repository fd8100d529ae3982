"""Errors of a candidate in the shadow: what a server's processes write, and how it is read.

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
"""What a backend computed that is known, and is not exactly what the layer asks for: a window of one key fewer or more, or
attention to new K and V as they were given, and not as the cache stores them, in fewer bits. Its own error is that from this."""


class WorstCase(Record):
    """The query and head with the largest relative L1 in a layer and phase.

    It is shown; what is judged is the worst query against the truth (`RoleErrors.worst`), among which the worst of each call is, by
    this measure and by the absolute one.

    Attributes:
        relative_l1: sum |candidate - reference| / sum |reference| over the head's dimension; infinite if not finite.
        request: the engine's request id.
        position: position in the request, cached prefix included.
        prefix: cached prefix of the request in that call.
        new: new tokens of the request in that call.
        sequences: sequences in the call.
    """

    layer: int
    phase: Literal["extend", "decode"]
    relative_l1: float
    head: int
    request: str
    position: int
    prefix: int
    new: int
    sequences: int


class FailedCalls(Record):
    """Calls of a layer and phase that the candidate did not compute: how many, and the first error."""

    layer: int
    phase: Literal["extend", "decode"]
    calls: int
    text: str


class ShadowHeader(RunRecord):
    """The description of the sums of a file.

    Attributes:
        reference: the serving backend, or backends.
        candidate: what ran in the shadow; empty if calls were only recorded.
        phases: phases that the candidate computes. The cells of other phases are not observed.
        passes: forward passes with the shadow on.
        worst: worst case of each layer and phase.
        failed: calls that the candidate did not compute.
        unrecorded: layers whose calls could not be recorded, and why.
        untested: layers with a call that could not be compared with the truth, and why.
        known: layers and phases in which one of both computed something else that is known: the difference of both there is an
            error of neither.
        candidate_noise: the candidate's noise family.
        reference_noise: the reference's, in the phases that it computes itself.
        dtype: dtype of the calls that are compared with the truth; empty if none is.
        accumulation: arithmetic that the candidate's noise family has on this device, such as "tf32".
        features: what calls that were compared with the truth asked for beyond plain attention; see `CallSpec.features`.
        effects: layer, phase and feature that its calls asked for -> whether it changed the output of a query by more than its
            bound.
        heads: q heads of each layer that was observed, over all processes that share them.
        rows: queries of the observed passes.
        sampled_rows: those of them that are compared with the truth.
        write_request: the latest write request that was served; see `assay.harness.engines.inside.control`.
    """

    reference: str
    candidate: str
    phases: tuple[str, ...]
    passes: int = 0
    worst: tuple[WorstCase, ...] = ()
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
    """What the shadows of a server observed.

    Attributes:
        cells: their sums.
        headers: one per process.
    """

    cells: ErrorTable
    headers: tuple[ShadowHeader, ...]

    @property
    def worst(self) -> tuple[WorstCase, ...]:
        """Worst case of each layer and phase over all processes, worst first."""
        by_place: dict[tuple[int, str], WorstCase] = {}
        for case in (case for header in self.headers for case in header.worst):
            known = by_place.get((case.layer, case.phase))
            if known is None or case.relative_l1 > known.relative_l1:
                by_place[case.layer, case.phase] = case
        return tuple(sorted(by_place.values(), key=lambda case: -case.relative_l1))

    @property
    def failed_calls(self) -> tuple[FailedCalls, ...]:
        """Calls that the candidate did not compute, in all processes."""
        return tuple(calls for header in self.headers for calls in header.failed)

    @property
    def known(self) -> set[tuple[int, str, Known]]:
        """See `ShadowHeader.known`, of all processes."""
        return {place for header in self.headers for place in header.known}

    @property
    def heads(self) -> dict[int, int]:
        """Q heads of each layer that was observed, in all processes together."""
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
        run: the nonce that each file must carry; empty to accept any.

    Raises:
        UsageError: the shadow never ran there.
        EvidenceError: a file is damaged or of another run, or the processes ran different backends.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder} has no errors of a shadow.",
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
    """Read the latest write request that each process served, by process id. Processes that wrote nothing are left out.

    Raises:
        EvidenceError: a file is damaged.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    return {int(file.stem): _read(file)[0].write_request for file in files}
