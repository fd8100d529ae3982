from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.tensors.dump import open_dump
from assay.harness.ingest.tensors.numpy_files import load_array
from assay.harness.ingest.tensors.tensor_diff import diff
from assay.harness.ingest.tensors.tensor_files import Unreadable


def saved(path: Path, wrong: bool = False, compressed: bool = False) -> Path:
    generator = np.random.default_rng(0)
    made = {f"model.layers.{layer}.self_attn.attn": generator.normal(size=(6, 4, 8)).astype(np.float16) for layer in range(3)}
    if wrong:
        made["model.layers.1.self_attn.attn"][2] = 0
    (np.savez_compressed if compressed else np.savez)(path, **made)
    return path


def test_two_npz_dumps_are_compared_by_layer(tmp_path: Path) -> None:
    a, same = saved(tmp_path / "a.npz"), saved(tmp_path / "same.npz", compressed=True)
    wrong = saved(tmp_path / "wrong.npz", wrong=True)
    assert diff(open_dump(a), open_dump(same)).verdict == "pass"
    result = diff(open_dump(a), open_dump(wrong))
    assert result.verdict == "regression"
    assert "layer 1" in result.headline


def test_npy_files_pair_by_their_paths(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        for layer in range(2):
            array = np.arange(1, 13, dtype=">f4").reshape(3, 4) * (factor if layer else 1)
            np.save(tmp_path / name / f"layers.{layer}.out.npy", array)
    result = diff(open_dump(tmp_path / "a"), open_dump(tmp_path / "b"))
    assert (result.verdict, result.compared, result.identical) == ("regression", 2, 1)


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_ingest_knows_them_by_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "x.npz":
        saved(path)
    else:
        np.save(path, np.ones((2, 3), np.float32))
    document = ingest([path]).documents[0]
    assert (document.file.format, document.file.read) == ("tensors-tensors", 3 if name == "x.npz" else 1)


def test_values_survive(tmp_path: Path) -> None:
    array = np.random.default_rng(1).normal(size=(5, 3))
    np.save(tmp_path / "x.npy", np.asfortranarray(array))
    assert torch.equal(load_array(tmp_path / "x.npy", "tensor"), torch.from_numpy(array))
    np.save(tmp_path / "s.npy", np.float32(3.0))
    assert load_array(tmp_path / "s.npy", "tensor").shape == ()


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": shape})
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header((1 << 40, 1 << 20)), "needs"),
        (header((2,)), "needs 8 bytes"),
        (header((2,), "|O"), "dtype object"),
        (header((4,), "|V2") + bytes(8), "dtype"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "NumPy"),
        (b"\x93NUMPY\x09\x00", "version"),
    ],
)
def test_damaged_arrays_and_pickles_are_refused_before_they_are_read(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(Unreadable, match=why):
        open_dump(path)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", content)
    with pytest.raises(Unreadable, match=why):
        open_dump(tmp_path / "x.npz")


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unreadable, match="NumPy"):
        open_dump(tmp_path / "b.npz")
