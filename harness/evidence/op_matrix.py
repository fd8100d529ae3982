"""``matrix.json`` in a run's folder: the candidate's kernel on the op-level matrix of the run's model."""

from __future__ import annotations

from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.run_file import RunFile
from assay.harness.verdict import Finding


class MatrixRecord(RunRecord):
    """A kernel's result on the matrix.

    Attributes:
        kernel: the candidate.
        calls: what the calls had in common, such as "float32, head_dim 64, 4 q heads on 2 kv heads, to 512 tokens".
        computed: names of the calls that it computed.
        failing: names of those that are out of bounds or broken.
        refused: names of the calls that it refused, or that its declaration excludes.
        worst: largest own error as a multiple of its bound; None if nothing was computed.
        missing: requirements of a pass that were not tested.
        findings: what is wrong, named where a hypothesis fits.
        error: why the matrix could not be run; empty if it was.
        seconds: time taken.
    """

    kernel: str
    calls: str
    computed: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    worst: float | None = None
    missing: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str = ""
    seconds: float = 0.0


MATRIX = RunFile("matrix.json", MatrixRecord)
