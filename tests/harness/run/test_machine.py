"""What a run records about its machine and its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.config import RunSpec
from assay.harness.run.machine import _git_state, hash_model, origin_of
from assay.harness.run.plan import prepare
from tests.harness.engines.wheels import wheel


def model(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_the_model_hash_covers_weights_and_tokenizer(tmp_path: Path) -> None:
    hashes = [
        hash_model(model(tmp_path / str(number), **files))
        for number, files in enumerate(
            (
                {"model_safetensors": b"1", "README_md": b"x"},
                {"model_safetensors": b"1", "README_md": b"y"},
                {"model_safetensors": b"1", "tokenizer_json": b"{}"},
                {"model_safetensors": b"2", "tokenizer_json": b"{}"},
            )
        )
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_model_is_hashed_once_in_a_process(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", model_safetensors=b"1")
    first = hash_model(folder)
    (folder / "model.safetensors").unlink()
    assert hash_model(folder) == first


def test_the_engine_of_a_side_with_packages_is_the_one_that_starts_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    older = wheel(tmp_path, "0.5.22", name="sglang")
    plan = prepare(RunSpec.of(reference="torch_native", candidate="torch_native", candidate_with=(str(older),)))
    origin = origin_of(plan, "assay run", "nonce")
    assert origin.engines == {"candidate": "0.5.22"}
    assert origin.packages["sglang"] != "0.5.22"


def test_git_state_outside_a_repository_is_empty(tmp_path: Path) -> None:
    assert _git_state(tmp_path) == ""
