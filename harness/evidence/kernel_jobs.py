"""The jobs that a run gives the process in which it runs the candidate's kernel, and the notes of that process.

See `assay.harness.offline.kernel_jobs`. Notes are lines: the call that the kernel begins to compute, an empty line when it has
returned, and the results, most of them as JSON. A result with serious findings is noted twice: before the kernel is read, and with
what was read.
"""

from __future__ import annotations

from pathlib import Path

from assay.harness.evidence.op_matrix import MatrixRecord

from assay.harness.schema import Record

COMPUTES, FIRST, CAUSE, MATRIX = "computes ", "first ", "cause ", "matrix "
"""How a line begins: before a call in words, why the first calls failed (if they did), a `ReplayResult`, a `MatrixRecord`."""
DRAFT = "draft "
"""What comes before `CAUSE` or `MATRIX` where the kernel is yet to be read: the result as it stands if it does not survive that."""


class CauseJob(Record):
    """Examine recorded calls.

    Attributes:
        pack: the replay pack.
        served: whether the candidate served the pack's server itself.
        reproduce: a command that reproduces the findings.
    """

    pack: Path
    served: bool
    reproduce: str


class MatrixJob(Record):
    """Run the op-level matrix.

    Attributes:
        record: the result so far: the kernel, and what the calls have in common.
        device: "cpu" or "cuda".
        dtype: for example "bfloat16".
        q_heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: of all heads.
        tokens: the longest sequence.
    """

    record: MatrixRecord
    device: str
    dtype: str
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int


class Jobs(Record):
    """The jobs of one process, in this order.

    Attributes:
        candidate: the kernel's name.
        first: the matrix of which the smallest calls are tried; None if none is.
        cause: None if there is nothing to examine.
        matrix: None if it is not to be run.
    """

    candidate: str
    first: MatrixJob | None = None
    cause: CauseJob | None = None
    matrix: MatrixJob | None = None
