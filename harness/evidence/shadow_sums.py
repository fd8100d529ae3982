"""Errors of a shadowed candidate, by layer, head and condition: what a server's process leaves, and how it is read.

A process writes one file, ``shadow/<pid>.safetensors``: sums over the elements of every cell that was observed, so
that cells can be merged by adding, and a legend in the file's metadata. A cell that is not there was not observed, which is
not an error of zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from assay.harness.conditions import CACHED_PREFIX, PHASES, PLACE, POSITION, Buckets
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.files import write_whole
from assay.harness.schema import Record

FOLDER = "shadow"
SCHEMA: Literal["assay.shadow/1"] = "assay.shadow/1"
CONDITIONS = {"phase": PHASES, "prefix": CACHED_PREFIX.labels, "position": POSITION.labels, "batch": PLACE}
"""Dimensions of a cell besides layer and head, with their labels in order."""
DIMENSIONS = ("layer", "head", *CONDITIONS)
SUMS = (
    "dot", "candidate_squared", "reference_squared", "difference", "reference_size", "difference_squared",
    "compared", "nonfinite", "undefined",
)  # fmt: skip
"""Sums over a cell's elements: a b, a^2, b^2, |a - b|, |b|, (a - b)^2 and the count, of the elements where both candidate a and
reference b are finite; counts of elements where only b is finite, and where b is not, which are not compared."""
_D = {name: index for index, name in enumerate(SUMS)}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


_SHAPE = tuple(len(labels) for labels in CONDITIONS.values())
CONDITION_COUNT = math.prod(_SHAPE)


def condition_numbers(phase: str, new: Sequence[int], prefix: Sequence[int]) -> Integers:
    """Number of the condition of each query of a call, int64 [sum(new)]: its index into all of `CONDITIONS`.

    Args:
        phase: "extend" or "decode".
        new: new tokens of each sequence.
        prefix: cached prefix of each sequence.
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
    """The query and head with the largest relative L1 of a layer and phase.

    Attributes:
        relative_l1: sum |candidate - reference| / sum |reference| over the head's dimension; infinite if not finite.
        request: the engine's name for the request.
        position: position in the request, cached prefix included.
        prefix: the request's cached prefix in that call.
        new: its new tokens in that call.
        sequences: sequences in that call.
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


class ShadowError(Record):
    """Calls that the candidate did not compute: how many, and what it said first."""

    layer: int
    phase: Literal["extend", "decode"]
    calls: int
    text: str


class Legend(Record):
    """What the sums of a file are of.

    Attributes:
        phases: phases that the candidate computes; it is not asked for others, so their cells are not observed.
        passes: forward passes that were shadowed.
        unrecorded: layers whose calls could not be recorded, and why.
        answered: the last request to write that was answered; see `assay.harness.server.write_request`.
    """

    schema_id: Literal["assay.shadow/1"] = SCHEMA
    reference: str
    candidate: str
    phases: tuple[str, ...]
    passes: int = 0
    worst: tuple[WorstCase, ...] = ()
    errors: tuple[ShadowError, ...] = ()
    unrecorded: dict[int, str] = Field(default_factory=dict)
    answered: str = ""


@dataclass(frozen=True)
class Table:
    """Errors by one or more dimensions; float64 arrays of one shape, NaN where nothing was observed.

    Attributes:
        axes: dimension -> labels, in the order of the arrays' axes; labels of "layer" and "head" are their numbers.
        cosine: cosine similarity; 1 if both are zero everywhere, 0 if only one of them is or nothing is finite.
        relative_l1: sum |candidate - reference| / sum |reference|, as in arXiv 2410.02367, section 4.4.
        rmse: root of the mean squared difference, in the unit of the output.
        max_abs: largest difference, in the unit of the output.
        nonfinite_share: share of the candidate's elements that are not finite where the reference's are.
        elements: elements observed.
    """

    axes: dict[str, tuple[str, ...]]
    cosine: Floats
    relative_l1: Floats
    rmse: Floats
    max_abs: Floats
    nonfinite_share: Floats
    elements: Floats


@dataclass(frozen=True)
class ShadowSums:
    """What was observed, one row a cell.

    Attributes:
        index: int64 [cells, 6], the columns of `DIMENSIONS`: layer and head by number, the others into `CONDITIONS`.
        sums: float64 [cells, 9], the columns of `SUMS`.
        max_abs: float64 [cells], largest difference.
        legends: one for each process that wrote.
    """

    index: Integers
    sums: Floats
    max_abs: Floats
    legends: tuple[Legend, ...]

    @property
    def worst(self) -> tuple[WorstCase, ...]:
        """Worst case of each layer and phase, over all processes, worst first."""
        found: dict[tuple[int, str], WorstCase] = {}
        for case in (case for legend in self.legends for case in legend.worst):
            known = found.get((case.layer, case.phase))
            if known is None or case.relative_l1 > known.relative_l1:
                found[case.layer, case.phase] = case
        return tuple(sorted(found.values(), key=lambda case: -case.relative_l1))

    @property
    def errors(self) -> tuple[ShadowError, ...]:
        """Calls that the candidate did not compute, of all processes."""
        return tuple(error for legend in self.legends for error in legend.errors)

    def observed(self, dimension: str) -> tuple[str, ...]:
        """Labels of a dimension under which anything was observed.

        Raises:
            KeyError: there is no such dimension.
        """
        labels = self._labels(dimension)
        return tuple(labels[i] for i in np.unique(self.index[:, DIMENSIONS.index(dimension)]))

    def table(
        self, by: Sequence[str] = ("layer", "head"), where: Mapping[str, str | int | Sequence[str | int]] | None = None
    ) -> Table:
        """Errors by some dimensions, over the cells that are asked for. Sums are merged, never ratios.

        Args:
            by: dimensions of the arrays' axes, in order.
            where: dimension -> the label or labels to keep, such as {"phase": "extend", "prefix": ("2-15", ">= 16")}.

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
        largest = np.zeros(math.prod(shape))
        np.add.at(sums, flat, self.sums[keep])
        np.maximum.at(largest, flat, self.max_abs[keep])
        return _table(axes, sums.reshape(*shape, len(SUMS)), largest.reshape(shape))

    def _labels(self, dimension: str) -> tuple[str, ...]:
        column = _column(dimension)
        if dimension in CONDITIONS:
            return CONDITIONS[dimension]
        return tuple(str(number) for number in range(int(self.index[:, column].max(initial=-1)) + 1))

    def _numbers(self, dimension: str, wanted: str | int | Sequence[str | int]) -> list[int]:
        labels = self._labels(dimension)
        asked = [str(label) for label in ([wanted] if isinstance(wanted, (str, int)) else wanted)]
        if unknown := [label for label in asked if label not in labels]:
            raise KeyError(f"{dimension} {unknown[0]!r} does not exist; expected one of {', '.join(labels)}")
        return [labels.index(label) for label in asked]


def _column(dimension: str) -> int:
    if dimension not in DIMENSIONS:
        raise KeyError(f"{dimension!r} is no dimension of a cell; expected one of {', '.join(DIMENSIONS)}")
    return DIMENSIONS.index(dimension)


def _table(axes: dict[str, tuple[str, ...]], sums: Floats, largest: Floats) -> Table:
    """Errors from sums [..., 9] and largest differences [...]."""
    compared, nonfinite = sums[..., _D["compared"]], sums[..., _D["nonfinite"]]
    a, b = sums[..., _D["candidate_squared"]], sums[..., _D["reference_squared"]]
    seen, finite = compared + nonfinite > 0, compared > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where((a == 0) | (b == 0), (a == b).astype(float), sums[..., _D["dot"]] / np.sqrt(a * b))
        size, difference = sums[..., _D["reference_size"]], sums[..., _D["difference"]]
        relative = np.where(difference == 0, 0.0, difference / size)
        rmse = np.sqrt(sums[..., _D["difference_squared"]] / compared)
        share = nonfinite / (compared + nonfinite)

    def present(values: Floats, where_nothing_is_finite: float) -> Floats:
        return np.where(seen, np.where(finite, values, where_nothing_is_finite), np.nan)

    return Table(
        axes=axes,
        cosine=present(cosine, 0.0),
        relative_l1=present(relative, np.inf),
        rmse=present(rmse, np.inf),
        max_abs=present(largest, np.inf),
        nonfinite_share=np.where(seen, share, np.nan),
        elements=np.where(seen, compared + nonfinite, np.nan),
    )


def write_shadow_sums(path: Path, index: Integers, sums: Floats, max_abs: Floats, legend: Legend) -> None:
    """Replace a process's file as a whole.

    Args:
        path: the file.
        index: int64 [cells, 6], as `Cells.index`.
        sums: float64 [cells, 9].
        max_abs: float64 [cells].
        legend: what they are of.
    """
    content = save({"index": index, "sums": sums, "max_abs": max_abs}, {"legend": legend.model_dump_json()})
    write_whole(path, content, durable=False)


def read_shadow_sums(folder: Path) -> ShadowSums:
    """What all processes of a server observed.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).

    Raises:
        UsageError: nothing was shadowed there.
        EvidenceError: a file is damaged, or the processes shadowed different things.
    """
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder} holds no shadow run.",
            f"files {FOLDER}/*.safetensors",
            "start the server with ASSAY_SHADOW=<candidate>, and ask it something",
        )
    read = [_read(file) for file in files]
    if len({(one.legends[0].reference, one.legends[0].candidate) for one in read}) > 1:
        raise EvidenceError(
            f"{folder} holds shadow runs of different backends.", "one reference and one candidate", "use a new folder"
        )
    return reduce(_joined, read)


def _joined(a: ShadowSums, b: ShadowSums) -> ShadowSums:
    return ShadowSums(
        np.concatenate([a.index, b.index]),
        np.concatenate([a.sums, b.sums]),
        np.concatenate([a.max_abs, b.max_abs]),
        a.legends + b.legends,
    )


def _read(path: Path) -> ShadowSums:
    try:
        with safe_open(path, framework="numpy") as file:
            legend = Legend.model_validate_json((file.metadata() or {})["legend"])
            return ShadowSums(
                file.get_tensor("index"), file.get_tensor("sums"), file.get_tensor("max_abs"), legends=(legend,)
            )
    except (SafetensorError, OSError, KeyError, ValidationError) as error:
        raise EvidenceError(
            f"{path} is damaged: {str(error).splitlines()[0]}.", f"a file of {SCHEMA}", "run again"
        ) from None


def answers(folder: Path) -> dict[int, str]:
    """By process id: the last request to write that each process which has written answered.

    Raises:
        EvidenceError: a file is damaged.
    """
    return {int(file.stem): _read(file).legends[0].answered for file in sorted((folder / FOLDER).glob("*.safetensors"))}
