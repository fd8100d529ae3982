"""Errors of a candidate in the shadow, by layer, head and condition: what a server's processes write, and how it is read.

Each process writes one file, ``shadow/<pid>.safetensors``, with a header in its metadata. The file holds sums over the elements of
each observed cell, so that cells are merged by adding: against the reference, over all queries, and against the truth, over sampled
queries of every call. A missing cell was not observed; it is not an error of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from assay.harness.conditions import CACHED_PREFIX, PHASES, PLACE, POSITION, Buckets
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence import error_sums
from assay.harness.evidence.error_sums import SUMS, Floats
from assay.harness.evidence.nonce import RunRecord, check_run
from assay.harness.evidence.truth_errors import TruthErrors, joined
from assay.harness.evidence.worst_queries import WorstQueries, joined_queries
from assay.harness.files import write_whole
from assay.harness.schema import Record

FOLDER = "shadow"
SCHEMA: Literal["assay.shadow/6"] = "assay.shadow/6"
CONDITIONS = {"phase": PHASES, "prefix": CACHED_PREFIX.labels, "position": POSITION.labels, "batch": PLACE}
"""Dimensions of a cell besides layer and head, with their labels in order. Files hold indices into the labels."""
DIMENSIONS = ("layer", "head", *CONDITIONS)
Integers = NDArray[np.int64]

_SHAPE = tuple(len(labels) for labels in CONDITIONS.values())
CONDITION_COUNT = math.prod(_SHAPE)
_TRUTH = "truth."  # begins the names of the tensors with errors against the truth
_QUERIES = "queries."  # and of those with the worst queries


def _calls(cells: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str], int]:
    by_place: dict[tuple[int, str], int] = {}
    for layer, phase, calls in cells:
        by_place[layer, phase] = by_place.get((layer, phase), 0) + calls
    return by_place


def condition_numbers(phase: str, new: Sequence[int], prefix: Sequence[int]) -> Integers:
    """Number the condition of each query of a call, int64 [sum(new)]: its index into the product of `CONDITIONS`.

    Args:
        phase: "extend" or "decode".
        new: new tokens per sequence.
        prefix: cached prefix per sequence.
    """
    place = np.full(len(new), PLACE.index("between"))
    place[0], place[-1] = PLACE.index("first"), PLACE.index("last")
    if len(new) == 1:
        place[0] = PLACE.index("only")
    positions = np.concatenate([np.arange(n) for n in new])
    parts = (
        np.full(len(positions), PHASES.index(phase)),
        np.repeat(_bucket(np.asarray(prefix), CACHED_PREFIX), new),
        _bucket(positions, POSITION),
        np.repeat(place, new),
    )
    return np.ravel_multi_index(parts, _SHAPE).astype(np.int64)


def _bucket(values: NDArray[np.int_], buckets: Buckets) -> NDArray[np.int_]:
    return np.searchsorted(buckets.starts, values, side="right") - 1


class WorstCase(Record):
    """The query and head with the largest relative L1 in a layer and phase.

    It is shown; what is judged is the worst query against the truth (`assay.harness.evidence.worst_queries`), among which the worst
    of each call is, by this measure and by the absolute one.

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
        off_by_a_key: calls of a layer and phase in which the reference's window was off by one key: what it computed is known, and
            its own error is that from attention with such a window. Its difference from the candidate is no error of either.
        as_given: calls of a layer and phase in which the reference, or a candidate of the engine's own, read new K and V as they
            were given, and not as the cache stores them, in fewer bits. Its own error is that from attention to these, likewise.
        candidate_noise: the candidate's noise family.
        reference_noise: the reference's, in the phases that it computes itself.
        dtype: dtype of the calls that are compared with the truth; empty if none is.
        accumulation: arithmetic that the candidate's noise family has on this device, such as "tf32".
        features: what calls that were compared with the truth asked for beyond plain attention; see `CallSpec.features`.
        heads: q heads of each layer that was observed, over all processes that share them.
        seed: of the draw of queries that are compared with the truth.
        rows: queries of the observed passes.
        sampled_rows: those of them that are compared with the truth.
        write_request: the latest write request that was served; see `assay.harness.server.write_request`.
    """

    schema_id: Literal["assay.shadow/6"] = SCHEMA
    reference: str
    candidate: str
    phases: tuple[str, ...]
    passes: int = 0
    worst: tuple[WorstCase, ...] = ()
    failed: tuple[FailedCalls, ...] = ()
    unrecorded: dict[int, str] = Field(default_factory=dict)
    untested: dict[int, str] = Field(default_factory=dict)
    off_by_a_key: tuple[tuple[int, Literal["extend", "decode"], int], ...] = ()
    as_given: tuple[tuple[int, Literal["extend", "decode"], int], ...] = ()
    candidate_noise: str = ""
    reference_noise: str = ""
    dtype: str = ""
    accumulation: str = ""
    features: tuple[str, ...] = ()
    heads: dict[int, int] = Field(default_factory=dict)
    seed: int = 0
    rows: int = 0
    sampled_rows: int = 0
    write_request: str = ""


@dataclass(frozen=True)
class _ErrorTable:
    """Errors by one or more dimensions: float64 arrays of one shape, NaN where nothing was observed.

    Attributes:
        axes: dimension -> labels, in the order of the arrays' axes. Layers and heads are labelled by number.
        relative_l1: sum |candidate - reference| / sum |reference|, as in arXiv 2410.02367, section 4.4.
        nonfinite_share: share of the candidate's elements that are not finite where the reference's are.
        elements: elements observed.
    """

    axes: dict[str, tuple[str, ...]]
    relative_l1: Floats
    nonfinite_share: Floats
    elements: Floats


@dataclass(frozen=True)
class ShadowErrors:
    """All observed cells, one row each.

    Attributes:
        index: int64 [cells, 6], the columns of `DIMENSIONS`: layer and head by number, the others into `CONDITIONS`.
        sums: float64 [cells, 5], the columns of `SUMS`.
        headers: one per process.
        truth: errors against the truth.
        queries: the worst query of each cell, against the truth.
    """

    index: Integers
    sums: Floats
    headers: tuple[ShadowHeader, ...]
    truth: TruthErrors = field(default_factory=TruthErrors.none)
    queries: WorstQueries = field(default_factory=WorstQueries.none)

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
    def off_by_a_key(self) -> dict[tuple[int, str], int]:
        """Calls of each layer and phase in which the reference's window was off by one key."""
        return _calls(cell for header in self.headers for cell in header.off_by_a_key)

    @property
    def as_given(self) -> dict[tuple[int, str], int]:
        """Calls of each layer and phase in which new K and V were read before they were stored in fewer bits."""
        return _calls(cell for header in self.headers for cell in header.as_given)

    @property
    def heads(self) -> dict[int, int]:
        """Q heads of each layer that was observed, in all processes together."""
        return {layer: heads for header in self.headers for layer, heads in header.heads.items()}

    def observed(self, dimension: str) -> tuple[str, ...]:
        """Return the labels of a dimension that were observed.

        Raises:
            KeyError: there is no such dimension.
        """
        labels = self._labels(dimension)
        return tuple(labels[i] for i in np.unique(self.index[:, DIMENSIONS.index(dimension)]))

    def table(
        self, by: Sequence[str] = ("layer", "head"), where: Mapping[str, str | int | Sequence[str | int]] | None = None
    ) -> _ErrorTable:
        """Tabulate the errors by some dimensions over selected cells. Sums are merged, never ratios.

        Args:
            by: dimensions of the result, one per axis, in order.
            where: dimension -> the label or labels to select, for example {"phase": "extend", "prefix": ("2-15", ">= 16")}.

        Raises:
            KeyError: there is no such dimension or label.
        """
        keep = np.ones(len(self.index), bool)
        for dimension, wanted in (where or {}).items():
            keep &= np.isin(self.index[:, _column(dimension)], self._numbers(dimension, wanted))
        axes = {dimension: self._labels(dimension) for dimension in by}
        shape = tuple(len(labels) for labels in axes.values())
        columns = self.index[keep][:, [_column(dimension) for dimension in by]]
        flat = np.ravel_multi_index(tuple(columns.T), shape) if shape else np.zeros(int(keep.sum()), np.int64)
        sums = np.zeros((math.prod(shape), len(SUMS)))
        np.add.at(sums, flat, self.sums[keep])
        sums = sums.reshape(*shape, len(SUMS))
        return _ErrorTable(
            axes, error_sums.relative_l1(sums), error_sums.nonfinite_share(sums), error_sums.elements(sums)
        )

    def _labels(self, dimension: str) -> tuple[str, ...]:
        column = _column(dimension)
        if dimension in CONDITIONS:
            return CONDITIONS[dimension]
        return tuple(str(number) for number in range(int(self.index[:, column].max(initial=-1)) + 1))

    def _numbers(self, dimension: str, wanted: str | int | Sequence[str | int]) -> list[int]:
        labels = self._labels(dimension)
        labels_wanted = [str(label) for label in ([wanted] if isinstance(wanted, (str, int)) else wanted)]
        if unknown := [label for label in labels_wanted if label not in labels]:
            raise KeyError(f"{dimension} {unknown[0]!r} does not exist; expected one of {', '.join(labels)}")
        return [labels.index(label) for label in labels_wanted]


def _column(dimension: str) -> int:
    if dimension not in DIMENSIONS:
        raise KeyError(f"{dimension!r} is not a dimension of a cell; expected one of {', '.join(DIMENSIONS)}")
    return DIMENSIONS.index(dimension)


def write_shadow_errors(
    path: Path, index: Integers, sums: Floats, header: ShadowHeader, truth: TruthErrors | None = None,
    queries: WorstQueries | None = None,
) -> None:  # fmt: skip
    """Replace the file of a process.

    Args:
        path: the file.
        index: int64 [cells, 6], as in `ShadowErrors`.
        sums: float64 [cells, 5].
        header: what they describe.
        truth: errors against the truth; None for none.
        queries: the worst queries; None for none.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    truth = truth or TruthErrors.none()
    against_truth = {
        _TRUTH + column.name: np.ascontiguousarray(getattr(truth, column.name)) for column in fields(TruthErrors)
    }
    queries = queries or WorstQueries.none()
    worst = {
        _QUERIES + column.name: np.ascontiguousarray(getattr(queries, column.name)) for column in fields(WorstQueries)
    }
    tensors = {"index": index, "sums": sums, **against_truth, **worst}
    content = save(tensors, {"header": header.model_dump_json()})
    write_whole(path, content, durable=False)


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
    read = [_read(file) for file in files]
    for file, table in zip(files, read, strict=True):
        check_run(file, table.headers[0].run, run)
    if len({(table.headers[0].reference, table.headers[0].candidate) for table in read}) > 1:
        raise EvidenceError(
            f"{folder} has errors of different backends.", "one reference and one candidate", "use a new folder"
        )
    return ShadowErrors(
        np.concatenate([table.index for table in read]),
        np.concatenate([table.sums for table in read]),
        tuple(header for table in read for header in table.headers),
        joined([table.truth for table in read]),
        joined_queries([table.queries for table in read]),
    )


def _read(path: Path) -> ShadowErrors:
    try:
        with safe_open(path, framework="numpy") as file:
            header = ShadowHeader.model_validate_json((file.metadata() or {})["header"])
            return ShadowErrors(
                file.get_tensor("index"),
                file.get_tensor("sums"),
                headers=(header,),
                truth=TruthErrors(*(file.get_tensor(_TRUTH + column.name) for column in fields(TruthErrors))),
                queries=WorstQueries(*(file.get_tensor(_QUERIES + column.name) for column in fields(WorstQueries))),
            )
    except (SafetensorError, OSError, KeyError, ValidationError) as error:
        raise EvidenceError(
            f"{path} is damaged: {str(error).splitlines()[0]}.", f"a file of {SCHEMA}", "run again in a new folder"
        ) from None


def written_requests(folder: Path) -> dict[int, str]:
    """Read the latest write request that each process served, by process id. Processes that wrote nothing are left out.

    Raises:
        EvidenceError: a file is damaged.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    return {int(file.stem): _read(file).headers[0].write_request for file in files}
