"""Every kind of file of a run, as another run left it: each is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import BenchFolder
from assay.harness.evidence.error_table import joined
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, KernelResult
from assay.harness.evidence.layer_diff_record import LAYER_DIFF, PACK_FOLDER, LayerDiffRecord, pack_of, shadow_errors_of
from assay.harness.evidence.logit_files import CACHE_STATES, Logits, LogitsHeader, Positions, read_logits, write_logits
from assay.harness.evidence.pack import Source
from assay.harness.evidence.shadow_errors import ShadowHeader, write_shadow_errors
from assay.harness.evidence.trace import TraceHeader, read_trace, write_pass

OURS, THEIRS = "ours", "theirs"


def cause(path: Path, nonce: str) -> Callable[[], object]:
    result = KernelResult(kernel="c", calls=1)
    RunFolder(path, nonce).write(CAUSE, result)
    return lambda: RunFolder(path, OURS).read(CAUSE)


def record(path: Path, nonce: str) -> Callable[[], object]:
    done = LayerDiffRecord(run=nonce, traced=())
    LAYER_DIFF.write(RunFolder(path, nonce).server_folder("reference"), done)
    return lambda: RunFolder(path, OURS).read(LAYER_DIFF, "reference")


def pack(path: Path, nonce: str) -> Callable[[], object]:
    source = Source(engine="e", model="m", model_hash="h", reference="r", run=nonce)
    PackWriter(RunFolder(path, nonce).server_folder("reference") / PACK_FOLDER, source, 10**6).flush()
    return lambda: pack_of(RunFolder(path, OURS))


def shadow(path: Path, nonce: str) -> Callable[[], object]:
    header = ShadowHeader(run=nonce, reference="r", candidate="c", phases=("extend",))
    file = RunFolder(path, nonce).server_folder("reference") / "shadow" / "1.safetensors"
    write_shadow_errors(file, joined([]), header)
    return lambda: shadow_errors_of(RunFolder(path, OURS))


def trace(path: Path, nonce: str) -> Callable[[], object]:
    header = TraceHeader(run=nonce, request="q", phase="extend", number=0, rank=0, ranks=1)
    positions = torch.arange(2)
    write_pass(path, "label", positions + 50, positions, {"layer.0": torch.zeros(2, 1, 4)}, header)
    return lambda: read_trace(path, "label", OURS)


def logits(path: Path, nonce: str) -> Callable[[], object]:
    header = LogitsHeader(run=nonce, role="reference", repeat=0, backend="b", engine="e", top_k=1, sequences=())
    none, ids = np.zeros(0, np.float32), np.zeros(0, np.int32)
    empty = Positions(none, ids, np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))
    write_logits(path, Logits(header, ids, dict.fromkeys(CACHE_STATES, empty)))
    (file,) = path.rglob("*.safetensors")
    return lambda: read_logits(file, OURS)


def lines(path: Path, nonce: str) -> Callable[[], object]:
    BenchFolder.new(path, nonce).append_lines("lines.jsonl", [LayerDiffRecord(traced=())])
    return lambda: BenchFolder(path, OURS).lines("lines.jsonl", LayerDiffRecord)


@pytest.mark.parametrize("kind", [cause, record, pack, shadow, trace, logits, lines])
def test_a_file_of_another_run_is_refused(tmp_path: Path, kind: Callable[[Path, str], Callable[[], object]]) -> None:
    assert kind(tmp_path / "ours", OURS)() is not None
    read = kind(tmp_path / "theirs", THEIRS)
    with pytest.raises(EvidenceError, match="belongs to run theirs, but its folder to run ours"):
        read()
    unnamed = kind(tmp_path / "unnamed", "" if kind not in (cause, lines) else "unnamed")
    with pytest.raises(EvidenceError, match=r"belongs to (no run|run unnamed), but"):
        unnamed()
