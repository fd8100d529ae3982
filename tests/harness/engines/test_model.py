"""A model's folder is checked before anything starts: a damaged file is a usage error that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from assay.harness.engines.model import TINY_MODEL, model_shape, resolve_model
from assay.harness.errors import UsageError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


def test_a_whole_model_is_accepted(model: Path) -> None:
    assert resolve_model(str(model)) == model.resolve()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_cut_file_is_named(model: Path, name: str, size: int) -> None:
    path = model / name
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(UsageError, match=rf"^{name} of --model {model} ") as caught:
        resolve_model(str(model))
    assert name in caught.value.do


def test_a_file_that_is_no_object_is_named(model: Path) -> None:
    (model / "config.json").write_text("[1, 2]")
    with pytest.raises(UsageError, match=r"config.json of .* is list, not an object"):
        model_shape(model)


def test_a_pointer_of_git_lfs_is_named_as_one(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UsageError, match=r"model.safetensors of .* is a pointer of Git LFS"):
        resolve_model(str(model))


def test_weights_that_are_not_read_are_not_checked(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(model), ["--load-format=dummy"]) == model.resolve()
