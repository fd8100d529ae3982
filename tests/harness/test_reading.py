"""What readers meet that is no whole file: it ends in one line with exit code 3, soon, and in little memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.pack import read_manifest
from assay.harness.ingest.tensor_files import open_dump
from assay.harness.reading import reading, whole_file


def test_a_readers_own_fault_says_what_is_not_whole_and_keeps_its_cause() -> None:
    with (
        pytest.raises(EvidenceError, match=r"^x\.json is not a whole results file: KeyError: 'score'\.") as caught,
        reading("x.json", "results file"),
    ):
        {}["score"]
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UsageError, match="as it says itself"), reading("x.json", "results file"):
        raise UsageError("as it says itself")


def test_a_pipe_a_device_and_a_file_that_is_too_large_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(EvidenceError, match="is not a regular file"):
        read_manifest(tmp_path)
    with pytest.raises(EvidenceError, match="is not a regular file"):
        whole_file(Path("/dev/zero"))
    sparse = tmp_path / "sparse"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    with pytest.raises(EvidenceError, match="has 1,099,511,627,776 bytes"):
        whole_file(sparse)


def test_a_pipe_among_files_that_are_ingested_is_said_to_be_one_and_hides_no_other(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "good.json").write_text('{"results": {"mmlu": {"acc,none": 0.5}}, "config": {}}')
    call("ingest", tmp_path / "pipe.log", tmp_path / "good.json")
    captured = capsys.readouterr()
    assert "is not a regular file" in captured.out + captured.err
    assert "good.json" in captured.out


def test_a_fault_of_a_reader_is_one_line_and_v_shows_its_traceback(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cyclic: dict[str, object] = {}
    cyclic["self"] = cyclic
    for name in ("a.pt", "b.pt"):
        torch.save(cyclic, tmp_path / name)
    given = ["compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert call(*given) == 3
    said = capsys.readouterr().err
    assert "is not a whole tensor file: RecursionError" in said
    assert "Traceback" not in said
    assert call(*given, "-v") == 3
    assert "Traceback" in capsys.readouterr().err


def test_names_and_contents_move_no_terminal(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "a\x1b]0;owned\x07\x1b[2J.json"
    (tmp_path / name).write_text('{"results": "\\u001b[2J"')
    for arguments in (["ingest", str(tmp_path / name)], ["report", str(tmp_path / name)], ["report", f"{tmp_path}/no\x1b[2J"]):
        call(*arguments)
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        assert "\u241b" in captured.out + captured.err


def test_a_tensor_without_data_is_refused(tmp_path: Path) -> None:
    for name, tensor in {
        "meta": torch.empty(4, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "repeated": torch.zeros(1).expand(1 << 40),
    }.items():
        torch.save({"x": tensor}, tmp_path / f"{name}.pt")
        with pytest.raises(EvidenceError, match="not a dense tensor"):
            open_dump(tmp_path / f"{name}.pt")


def test_an_empty_tensor_of_any_shape_is_compared_at_once(call: Callable[..., int], tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 62, 0], "data_offsets": [0, 0]}}).encode()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.process_time()
    assert call("compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")) == 3
    assert time.process_time() - began < 5
