"""Files of traces: what a complete one contains, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.harness.errors import EvidenceError
from assay.harness.evidence.trace import TraceHeader, read_trace, write_pass, write_refusal


def write(folder: Path, number: int, layers: tuple[int, ...] = (0, 2), first: int = 0, dims: int = 4, **legend: Any) -> None:
    fields = {"request": "r", "phase": "extend", "number": number, "rank": 0, "ranks": 1} | legend
    rows = torch.arange(first, first + 2)
    outputs = {f"layer.{layer}": torch.full((2, 3, dims), layer + 0.5, dtype=torch.bfloat16) for layer in layers}
    write_pass(folder, "a", rows + 50, rows, outputs, TraceHeader.model_validate(fields))


def test_passes_are_read_in_order_as_float32(tmp_path: Path) -> None:
    write(tmp_path, 1, first=2, phase="decode")
    write(tmp_path, 0)
    trace = read_trace(tmp_path, "a")
    assert trace.label == "a"
    assert trace.positions.tolist() == [0, 1, 2, 3]
    assert trace.tokens.tolist() == [50, 51, 52, 53]
    assert trace.phases == ("extend", "extend", "decode", "decode")
    assert {layer: (out.shape, out.dtype, set(out.flat)) for layer, out in trace.outputs.items()} == {
        0: ((4, 3, 4), np.dtype("float32"), {0.5}),
        2: ((4, 3, 4), np.dtype("float32"), {2.5}),
    }


def test_passes_of_other_widths_are_filled_with_zeros(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, first=2, dims=6, phase="decode")
    out = read_trace(tmp_path, "a").outputs[2]
    assert (out.shape, out[0, 0].tolist(), out[3, 0].tolist()) == ((4, 3, 6), [2.5] * 4 + [0] * 2, [2.5] * 6)


def test_layers_of_a_pipeline_come_from_different_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process, layer in ((5, 1), (6, 0)):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        write(tmp_path, 0, layers=(layer,))
    assert list(read_trace(tmp_path, "a").outputs) == [0, 1]


def test_a_refused_trace_says_why(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write_refusal(tmp_path, "a", "it was too large")
    with pytest.raises(EvidenceError, match="incomplete: it was too large"):
        read_trace(tmp_path, "a")


@pytest.mark.parametrize(
    ("number", "other", "says"),
    [
        (2, {}, "there are 2 passes, but their numbers go up to 2"),
        (1, {"layers": (0,)}, "the passes have different layers"),
        (1, {"request": "s"}, "more than one request"),
    ],
)
def test_passes_that_do_not_go_together_are_refused(tmp_path: Path, number: int, other: dict[str, Any], says: str) -> None:
    write(tmp_path, 0)
    write(tmp_path, number, **other)
    with pytest.raises(EvidenceError, match=says):
        read_trace(tmp_path, "a")


def test_processes_with_different_rows_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        monkeypatch.setattr("os.getpid", lambda rank=rank: rank)
        write(tmp_path, 0, first=rank, rank=rank, ranks=2)
    with pytest.raises(EvidenceError, match="different rows of pass 0"):
        read_trace(tmp_path, "a")


def test_a_truncated_file_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (file,) = (tmp_path / "trace" / "a").iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(EvidenceError, match="is damaged"):
        read_trace(tmp_path, "a")
