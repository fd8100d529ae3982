"""Contradictions between the files of a model folder: what they leave to an engine to decide.

Each is a public failure: a head that a tied configuration hides (vllm #51063), or that is missing (vllm #53019), a YaRN factor
that the lengths contradict (transformers #38224), an end-of-turn token that the generation settings lack (mlx-vlm #2112), two chat
templates (TGI #3247), and sampling settings that a request without any gets (vllm #17075).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.harness.evidence.fingerprint import FolderNote
from assay.harness.fingerprint.checkpoint import stored_rows
from assay.harness.reading import reading, whole_file

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Rows of both that are compared: an untied head differs in all of them.
_ROWS = 8
# Settings of generation_config.json that change what a request without settings gets, and the values that change nothing.
_SAMPLING: Mapping[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_k": (0, -1, 50),  # 50 is the default of transformers
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
}


def folder_notes(model: Path) -> tuple[FolderNote, ...]:
    """Hold the files of a model folder against each other.

    Returns:
        What they contradict each other in, and the settings that requests get without asking.

    Raises:
        EvidenceError: a file cannot be read, or is not what its name says.
    """
    with reading(model, "model folder"):
        config, generation, tokenizer = (
            _read(model / name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
        )
        return (
            *_head(model, config),
            *_yarn(config),
            *_ends(_read(model / "tokenizer.json"), tokenizer, generation or config),
            *_templates(model / "chat_template.jinja", tokenizer),
            *_sampling(generation),
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading(path, path.name):
        read: dict[str, Any] = json.loads(whole_file(path))
        return read


def _head(model: Path, config: Mapping[str, Any]) -> Iterator[FolderNote]:
    tied = config.get("tie_word_embeddings")
    if tied is None:
        return
    head, embedding = (stored_rows(model, name, _ROWS) for name in (_HEAD, _EMBEDDING))
    if not tied and head is None and embedding is not None:
        yield FolderNote(
            id="head-missing",
            says=f"{_HEAD} is missing from the checkpoint, but tie_word_embeddings is false: an engine "
            "serves a random head, or zeros",
        )
    if (
        tied
        and head is not None
        and embedding is not None
        and not (head.shape == embedding.shape and head.equal(embedding))
    ):
        yield FolderNote(
            id="head-not-tied",
            says=f"{_HEAD} is in the checkpoint and differs from the embedding, but tie_word_embeddings is true: "
            "an engine that follows the configuration does not load it",
        )


def _yarn(config: Mapping[str, Any]) -> Iterator[FolderNote]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    length = config.get("max_position_embeddings")
    if "yarn" not in (rope.get("rope_type"), rope.get("type")) or not (factor and original and length):
        return
    if length != original and length != factor * original:
        yield FolderNote(
            id="yarn-factor",
            says=f"YaRN's factor is {factor:g}, but max_position_embeddings is {length / original:g} times the original length "
            f"({length:,} of {original:,}): engines disagree about which of both scales the frequencies",
        )


def _ends(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], generation: Mapping[str, Any]
) -> Iterator[FolderNote]:
    end = settings.get("eos_token")
    text = end.get("content") if isinstance(end, Mapping) else end
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    stated = generation.get("eos_token_id")
    declared = stated if isinstance(stated, list) else [stated]
    if text in ids and stated is not None and ids[text] not in declared:
        names = {id_: content for content, id_ in ids.items()}
        said = " and ".join(f"{names.get(id_, 'a token')} ({id_})" for id_ in declared)
        yield FolderNote(
            id="eos-missing",
            says=f"The tokenizer ends a text with {text} ({ids[text]}), and the generation settings with {said}: "
            f"an engine that stops at the latter alone goes on after {text}",
        )


def _templates(file: Path, settings: Mapping[str, Any]) -> Iterator[FolderNote]:
    written = settings.get("chat_template")
    if not (file.is_file() and isinstance(written, str)):
        return
    with reading(file, file.name):
        if whole_file(file).decode().strip() != written.strip():
            yield FolderNote(
                id="two-templates",
                says=f"{file.name} and tokenizer_config.json hold different chat templates: the prompts depend on which of both an "
                "engine reads",
            )


def _sampling(generation: Mapping[str, Any]) -> Iterator[FolderNote]:
    others = {name: generation[name] for name, usual in _SAMPLING.items() if generation.get(name) not in (None, *usual)}
    if others:
        said = ", ".join(f"{name} {value:g}" for name, value in others.items())
        yield FolderNote(
            id="sampling-defaults",
            says=f"generation_config.json sets {said}: a request without settings gets them where the engine follows that file",
            changes_outputs=False,
        )
