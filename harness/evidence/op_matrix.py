"""``matrix.json`` in a run's folder: the candidate's kernel on the op-level matrix of the run's model."""

from __future__ import annotations

from assay.harness.evidence.folder import REPEAT_RUN, RunFolder
from assay.harness.evidence.nonce import check_run
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json
from assay.harness.verdict import Finding

_FILE = "matrix.json"


class MatrixRecord(Record):
    """A kernel's result on the matrix.

    Attributes:
        run: nonce of the run.
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

    run: str = ""
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


def write_matrix(folder: RunFolder, record: MatrixRecord) -> None:
    """Write the result into a run's folder.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(folder.path / _FILE, record.model_copy(update={"run": folder.nonce}).model_dump_json(indent=1))


def read_matrix(folder: RunFolder) -> MatrixRecord | None:
    """The result of a run; None if the matrix was not run.

    Raises:
        EvidenceError: the file is damaged, or of another run.
    """
    path = folder.path / _FILE
    if not path.exists():
        return None
    record = read_json(path, MatrixRecord, REPEAT_RUN)
    check_run(path, record.run, folder.nonce)
    return record
