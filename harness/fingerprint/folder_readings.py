"""What the packages of a process read in a model folder: token ids, generation defaults, settings; and how parts are observed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def observed(parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Observe each part. ``not_observed`` gets the reason for each failure, and ``seconds`` the time of each part."""
    read: dict[str, Any] = {"not_observed": {}, "seconds": {}}
    for part, observe in parts.items():
        begun = time.perf_counter()
        try:
            read[part] = observe()
        except Exception as error:  # these packages may raise anything; assay's own errors have a first part
            said = getattr(error, "found", "") or f"{type(error).__name__}: {error}"
            read["not_observed"][part] = " ".join(said.split())[:200]
        read["seconds"][part] = round(time.perf_counter() - begun, 4)
    return read


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages and of Python."""
    installed = {"python": platform.python_version()}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def written_ids(model: str, texts: Mapping[str, str], bare: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the ids from ``tokenizer.json`` alone, if it exists, for the texts whose ids differ from `bare`."""
    path = os.path.join(model, "tokenizer.json")
    if not os.path.exists(path):
        return {}
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(path)
    ids = {name: own.encode(text, add_special_tokens=False).ids for name, text in texts.items()}
    return {name: given for name, given in ids.items() if name in bare and given != list(bare[name])}


def tokens_of(tokenizer: Any, texts: Mapping[str, str], chats: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Tokenize texts and chats with a transformers tokenizer, and return the fields of the record ``Tokens``."""
    told, retold, refused = {}, {}, {}
    for name, (messages, tools) in chats.items():
        arguments = {"add_generation_prompt": True, **({"tools": tools} if tools else {})}
        try:
            text = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **arguments)
        except Exception as error:  # a template may refuse roles and tools
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        told[name] = tokenizer(text, add_special_tokens=False)["input_ids"]
        retold[name] = tokenizer(text)["input_ids"]
    bare = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in texts.items()}
    return {
        "tokenizer": type(tokenizer).__name__,
        "bos": tokenizer.bos_token_id,
        "eos": [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        "texts": {name: tokenizer(text)["input_ids"] for name, text in texts.items()},
        "bare": bare,
        "written": written_ids(model, texts, bare),
        "chats": told,
        "refused": refused if told else {},
        "retold": retold,
        "digests": _digests_of(model, getattr(tokenizer, "chat_template", None)),
    }


# Files of a tokenizer without ``tokenizer.json``.
_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt")


def _digests_of(model: str, template: Any) -> dict[str, str]:
    """Return digests of the chat template and of each part of the tokenizer's files."""
    written = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    made = {"template": _digest(written.strip("\n").replace("\\n", "\n").encode())}  # as SGLang reads it
    path = os.path.join(model, "tokenizer.json")
    if not os.path.exists(path):
        for name in filter(lambda name: os.path.exists(os.path.join(model, name)), _TOKENIZERS):
            with open(os.path.join(model, name), "rb") as file:
                made[name] = _digest(file.read())
        return made
    with open(path, encoding="utf-8") as file:
        whole = json.load(file)
    algorithm = {name: value for name, value in (whole.get("model") or {}).items() if value is not None}
    parts = {
        name: whole.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    }
    parts["vocabulary"] = algorithm.pop("vocab", None)
    merges = algorithm.pop("merges", None) or []  # "a b" in older files, ["a", "b"] in newer ones
    parts["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    parts["algorithm"] = algorithm
    return made | {name: _digest(json.dumps(value, sort_keys=True).encode()) for name, value in parts.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def generation_of(model: str) -> dict[str, str]:
    """Return the generation defaults in a model's folder, as JSON by name."""
    path = os.path.join(model, "generation_config.json")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    return {
        name: json.dumps(value, sort_keys=True)
        for name, value in sorted(written.items())
        if name != "transformers_version" and not name.startswith("_")
    }


# Settings that are only names, or that do not affect serving.
_NO_SETTING = re.compile(
    r"(^|\.)(_?name_or_path|id2label|label2id|(transformers|sglang)_version|_\w+|context_len|use_cache|initializer_\w+|output_\w+|"
    r"return_dict\w*|\w*dropout\w*|\w*pdrop)(\.|$)"
)


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a model configuration's settings as text, by dotted name. Dtypes have the names of transformers 5."""
    read = {name: value for name, value in _leaves(config) if not _NO_SETTING.search(name)}
    return {
        re.sub(r"(^|\.)torch_dtype$", r"\1dtype", name): value.removeprefix("torch.") for name, value in read.items()
    }


def beside_config(model: str, *, code: bool) -> dict[str, Any]:
    """Return settings from a folder's other files: ModelOpt's quantisation and, if `code`, digests of the model's code."""
    made: dict[str, Any] = {}
    path = os.path.join(model, "hf_quant_config.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as written:
            made["hf_quant_config"] = json.load(written).get("quantization")
    for name in sorted(os.listdir(model)) if code else ():
        if name.endswith(".py"):
            with open(os.path.join(model, name), "rb") as file:
                made[f"code.{name}"] = _digest(file.read())
    return made


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings in a configuration, by dotted name."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply ``--json-model-override-args`` to ``config.json`` in the same way as SGLang."""
    made = dict(config)
    parameters = made.get("rope_parameters")
    if parameters and "rope_theta" in overrides:  # SGLang may overlook it next to these, but the user asked for it
        made["rope_parameters"] = {name: value for name, value in parameters.items() if name != "rope_theta"}
    for key, value in overrides.items():
        name = "rope_parameters" if key == "rope_scaling" and parameters else key
        current = made.get(name)
        made[name] = {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
    return made
