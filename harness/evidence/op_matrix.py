"""A kernel's result on the op-level matrix: ``matrix.json`` in a run's folder, and part of what a check prints as JSON."""

from __future__ import annotations

from pydantic import Field

from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.run_file import RunFile
from assay.harness.schema import Part
from assay.harness.verdict import KernelOnCalls


class CaseWhy(Part):
    """A case that was not computed, or broke the contract, and why."""

    case: str
    why: str


class MatrixResult(KernelOnCalls):
    """A kernel's result on the matrix."""

    failing: tuple[str, ...] = Field((), description="names of the cases that are out of bounds or broken")
    where: str = Field(
        "",
        description="values of at most two axes that cover all failing cases and no correct one; empty if there are none, or if "
        "what was read off the kernel tells which cases fail",
    )
    worst_own: float | None = Field(
        None,
        description="relative L1 of the case that is worst relative to its bound; null if none was computed or it is not finite",
    )
    worst_bound: float | None = None
    broken: tuple[CaseWhy, ...] = ()
    refused: tuple[CaseWhy, ...] = ()
    excluded: tuple[CaseWhy, ...] = Field((), description="cases that its declaration excludes")
    missing: tuple[str, ...] = Field((), description="requirements of a pass that were not tested")
    again: str = Field("", description="a command that repeats the check; empty for a kernel that no command can name")

    @property
    def computed(self) -> int:
        """Number of cases that it computed."""
        return self.calls - len(self.broken)

    @property
    def worst(self) -> float | None:
        """The largest own error as a multiple of its bound; None if nothing was computed."""
        return None if self.worst_own is None or self.worst_bound is None else self.worst_own / self.worst_bound


class MatrixRecord(MatrixResult, RunRecord):
    """The result of a run's candidate on the matrix of the run's model.

    Attributes:
        shapes: what the calls had in common, such as "float32, head_dim 64, 4 q heads on 2 kv heads, to 512 tokens".
        error: why the matrix could not be run; empty if it was.
    """

    shapes: str
    error: str = ""


MATRIX = RunFile("matrix.json", MatrixRecord)
