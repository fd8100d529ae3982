"""The task and settings behind one score: the record that every results reader fills in, and how two records differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from assay.harness.schema import Part
from assay.harness.sides import is_secret
from assay.harness.statement import Statement, state
from assay.harness.text import one_line

# Settings that identify a task. If only one side records them and the prompts are recorded too, the prompts decide instead.
_IDENTIFYING = ("shots", "tokenizer", "template", "version")
# Model arguments that shape the questions or the answers. All other arguments describe the server.
_DECIDES = {
    "task": re.compile("tokenizer$"),
    "limits": re.compile(
        r"(max_(length|model_len|seq\w*|gen_toks|tokens|new_tokens|context\w*)$|truncat|context_length$)"
    ),
    "generation": re.compile(
        r"(enable_|chat_|fewshot_|system_|think|reason|add_bos|prefix_|do_sample|temperature|top_[kp]$|min_p$|seed$)"
    ),
}
# How requests are sent: this does not change the answers.
_SENDING = re.compile(
    r"((max_|auto_|adaptive_)?(batch|connections|concurren|retries)\w*|(attempt_)?timeout|num_concurrent|cache|tokenized_requests|"
    r"verify_certificate|device|download_dir)$"
)
# An object's memory address, in the repr of a function that a tool records.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_LOCAL = re.compile(r"(~|\.{0,2}[/\\]|[A-Za-z]:[/\\])")
# A folder in the Hugging Face cache.
_CACHED = re.compile(r"(?:models|datasets)--(?:[^/\\]+?--)?([^/\\]+)")
# Characters shown of each of two settings that differ.
_SHOWN = 60


class Asked(Part):
    """The task and settings behind one score, and what served it. Anything a tool does not record is absent, and never equal.

    Each answer identifies its own document: by the document's hash, the hash of the whole prompt, and the repeat.
    """

    task: dict[str, str] = Field({}, description="data, prompts, filter, scoring; shots, tokenizer, template, version")
    generation: dict[str, str] = Field({}, description="settings that decide what is generated")
    limits: dict[str, str] = Field({}, description='most documents ("limit": "none" for all); longest context, answer')
    served: dict[str, str] = Field(
        {}, description="model, arguments and address of the server, which may be the thing under test"
    )
    answers: int = Field(0, description="answers requested, including repeats; 0 if unknown")

    @field_validator("task", "generation", "limits", "served", mode="before")
    @classmethod
    def _flat(cls, record: Any) -> dict[str, str]:
        return flat(record)

    @classmethod
    def of(cls, model: object, arguments: object = None, **asked: Any) -> Asked:
        """Make a record from a model's arguments, separating those that shape the questions from those of its server.

        Args:
            model: the model's name.
            arguments: see `arguments_of`.
            asked: other fields of this record, by name.
        """
        made = {name: dict(asked.pop(name, None) or {}) for name in ("task", "generation", "limits", "served")}
        made["served"] |= {"model": model}
        made["generation"] = {name: value for name, value in made["generation"].items() if not _SENDING.match(name)}
        for name, value in flat(arguments_of(arguments)).items():
            if not _SENDING.match(name) and not is_secret(name):
                decides = [part for part, names in _DECIDES.items() if names.match(name)]
                made[decides[0] if decides else "served"].setdefault(name, value)
        return cls(**made, **asked)

    @property
    def shots(self) -> int | None:
        """Worked examples in the prompt, or None if the tool does not record it."""
        return int(told) if (told := self.task.get("shots", "")).isdecimal() else None


class Differences(NamedTuple):
    """How two records differ.

    Attributes:
        other: differences that make it a different question in B.
        limits: limits that differ. Questions that both answered are still the same; it is unknown what one side was spared.
        changed: serving settings that differ, which may be the thing under test: name, A's value and B's value.
        unrecorded: sides that do not record their settings.
    """

    other: tuple[Statement, ...] = ()
    limits: tuple[Statement, ...] = ()
    changed: tuple[tuple[str, str | None, str | None], ...] = ()
    unrecorded: tuple[str, ...] = ()


def differences(a: Asked, b: Asked, *, prompts: bool = False) -> Differences:
    """Compare two records.

    Args:
        a: A's record.
        b: B's record.
        prompts: whether both sides record the prompt of every answer. The prompts then replace the settings that shaped them.
    """
    unrecorded = [name for name, side in (("A", a), ("B", b)) if not side.task]
    parts = [(x, y) for x, y in ((a.task, b.task), (a.generation, b.generation)) if not unrecorded or (x and y)]
    unlike = [each for x, y in parts for each in _unlike(x, y) if not (unrecorded and None in each)]
    # A local copy of a data set has a different name, so only its documents are compared.
    local = prompts and any(
        name.startswith("dataset") and _LOCAL.match(text) for name, x, y in unlike for text in (x or "", y or "")
    )
    other = []
    for name, x, y in unlike:
        if name in _IDENTIFYING and None in (x, y):
            unrecorded += [] if prompts else ["A" if x is None else "B"]
        elif name in _IDENTIFYING:
            other.append(state("tasks-differ", what=name, a=x, b=y))
        elif not (local and name.startswith("dataset")):
            other.append(state("setting-differs", setting=name, **_parted(x, y)))
    limits = [
        state("tasks-differ", what=name, a=x, b=y)
        for name, x, y in _unlike(a.limits, b.limits)
        if name != "limit" or None not in (x, y)
    ]
    return Differences(
        tuple(other), tuple(limits), tuple(_unlike(a.served, b.served)), tuple(dict.fromkeys(unrecorded))
    )


def _unlike(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """List the settings that differ, or that only one side has."""
    # Settings that identify a task come first.
    names = sorted({*a, *b}, key=lambda name: (name not in _IDENTIFYING, name))
    return [(name, a.get(name), b.get(name)) for name in names if not _same(a.get(name), b.get(name))]


def _same(a: str | None, b: str | None) -> bool:
    """Return True if two values are equal, or if one is a path that ends in the other's name."""
    if a == b or a is None or b is None or not (_LOCAL.match(a) or _LOCAL.match(b)):
        return a == b
    return _name(a) == _name(b)


def _name(path: str) -> str:
    cached = _CACHED.search(path)
    return cached[1] if cached else PurePath(path.replace("\\", "/")).name


def _parted(a: str | None, b: str | None) -> dict[str, str | None]:
    """Cut two texts down to the part where they differ."""
    parts = (at for at, (x, y) in enumerate(zip(a or "", b or "", strict=False)) if x != y)
    start = max(0, next(parts, min(len(a or ""), len(b or ""))) - _SHOWN // 2)
    return {name: text and one_line(text[start:], _SHOWN) for name, text in (("a", a), ("b", b))}


def arguments_of(given: object) -> dict[str, Any]:
    """Parse arguments: a mapping, or text such as "a=b,c=d" in which None and False mean unset. Other text has no arguments."""
    if isinstance(given, dict):
        return given
    text = str(given or "").strip("()")
    parts = (part.split("=", 1) for part in re.split(r",(?=\s*\w+=)", text) if "=" in part)
    return {name.strip(): None if value.lower() in ("none", "false") else value for name, value in parts}


def flat(record: object, name: str = "") -> dict[str, str]:
    """Flatten a record to text by dotted name, without memory addresses. Equal numbers get the same text.

    Null, false and empty values are left out, because later versions of a tool write more of them for options that are off.
    """
    if isinstance(record, list) and not any(isinstance(each, (dict, list)) for each in record):
        return {name: str([_text(each) for each in record])} if record else {}
    if isinstance(record, (dict, list)):
        inside = record.items() if isinstance(record, dict) else enumerate(record)
        return {key: text for part, value in inside for key, text in flat(value, f"{name}.{part}".strip(".")).items()}
    return {} if record is None or record is False or record == "" else {name: _text(record)}


def _text(value: object) -> str:
    text = _ADDRESS.sub("", str(value))
    if not _NUMBER.fullmatch(text):
        return {"true": "True", "false": "False"}.get(text, text)
    number = float(text) if re.search("[.eE]", text) else int(text)
    return str(int(number) if number == number // 1 and abs(number) < 1e15 else number)
