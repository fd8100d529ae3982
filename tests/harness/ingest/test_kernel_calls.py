"""Calls of kernels, as SGLang 0.5.23 logs them at level 5."""

from __future__ import annotations

from pathlib import Path

from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.result import FileDocument

LOG = Path(__file__).parents[2] / "data/sglang_log/kernel_calls.log"


def read(path: Path) -> FileDocument:
    return ingest([path]).documents[0]


def test_calls_are_counted_by_function_and_every_line_is_read() -> None:
    document = read(LOG)
    assert (document.file.lines, document.file.unread) == (198, 0)
    table = next(one for one in document.tables if one.id == "kernel-calls")
    assert set(table.rows) == {("norm.rmsnorm", "2"), ("TorchNativeAttnBackend.forward_extend", "2")}
    assert "SGLANG_KERNEL_API_DUMP_DIR" in table.note  # the text alone cannot be replayed


def test_nan_that_nobody_gave_to_a_kernel_is_a_finding_with_its_line() -> None:
    (found,) = (one for one in read(LOG).findings if one.id == "kernel-returned-nan")
    assert found.where == "TorchNativeAttnBackend.forward_extend"
    assert LOG.read_text().splitlines()[found.cites[0].first - 1].strip() == "nan_count=24"


def test_a_call_that_failed_is_a_crash() -> None:
    (found,) = (one for one in read(LOG).findings if one.id == "crash")
    assert "illegal memory access" in found.evidence[0]
