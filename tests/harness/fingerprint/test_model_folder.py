"""The files of a model folder, held against each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.harness.engines.model import TINY_MODEL as SOURCE
from assay.harness.errors import EvidenceError
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.model_folder import folder_notes
from assay.harness.fingerprint.parts import faults

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 1024}
OTHER_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


def folder(tmp_path: Path, head: float | None = None, **changed: dict[str, Any]) -> Path:
    """A copy of the tiny model in which files have other keys, and whose head is so many times the embedding."""
    model = Path(shutil.copytree(SOURCE, tmp_path / "model"))
    for name, change in changed.items():
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if head is not None:
        state = load_file(model / "model.safetensors")
        state["lm_head.weight"] = (state["model.embed_tokens.weight"] * head).clone()
        save_file(state, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("changed", "ids"),
    [
        ({}, []),
        ({"head": 1.0}, []),
        ({"head": 2.0}, ["head-not-tied"]),
        ({"head": 2.0, "config": {"tie_word_embeddings": False}}, []),
        ({"config": {"tie_word_embeddings": False}}, ["head-missing"]),
        ({"config": {"rope_parameters": YARN}}, ["yarn-factor"]),
        ({"config": {"rope_parameters": YARN | {"factor": 4.0}}}, []),
        ({"config": {"rope_parameters": YARN, "max_position_embeddings": 1024}}, []),  # as Qwen writes it
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": 4}}, ["eos-missing"]),
        ({"generation_config": {"eos_token_id": [4, 3]}}, []),
        ({"tokenizer_config": {"chat_template": OTHER_TEMPLATE}}, ["two-templates"]),
        ({"tokenizer_config": {"chat_template": (SOURCE / "chat_template.jinja").read_text()}}, []),
        ({"generation_config": {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}}, ["sampling-defaults"]),
        ({"generation_config": {"temperature": 1.0, "top_k": 50, "top_p": 1.0}}, []),
    ],
)
def test_each_contradiction_is_named(tmp_path: Path, changed: dict[str, Any], ids: list[str]) -> None:
    notes = folder_notes(folder(tmp_path, **changed))
    assert [note.id for note in notes] == ids
    assert [note.changes_outputs for note in notes] == [id_ != "sampling-defaults" for id_ in ids]


def test_settings_that_a_request_gets_are_said_by_value(tmp_path: Path) -> None:
    (note,) = folder_notes(folder(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.95}))
    assert "sets temperature 0.6, top_p 0.95:" in note.says


@pytest.mark.parametrize("config", ["[", '{"rope_parameters": 3, "tie_word_embeddings": true}'])
def test_a_folder_that_cannot_be_read_is_not_said_to_agree(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EvidenceError):
        folder_notes(tmp_path)


def test_a_contradiction_of_one_side_alone_counts(tmp_path: Path) -> None:
    notes = folder_notes(folder(tmp_path, config={"rope_parameters": YARN}))
    plain = Fingerprint(source="own server", engine="e", model="m", packages={"torch": torch.__version__})
    (fault,) = faults(plain.model_copy(update={"folder": notes}))
    assert (fault.name, fault.outputs) == ("folder.wrong", True)
    diff = compare_fingerprints(plain, plain.model_copy(update={"folder": notes}))
    assert [difference.says[:3] for difference in diff.undeclared] == ["B: "]
    assert diff.exit_code == 1
