"""``baselines/``: accepted results of a reference, in plain files that a team commits.

A baseline is a folder ``<backend>-<hash>/`` with ``baseline.json``, ``answers.jsonl`` and, if logits were scored,
``logits-0.safetensors`` and ``logits-1.safetensors``. It holds for one backend under one `Key`; under any other key its numbers
mean nothing, and it is *stale*. As ``--reference`` it stands in for a server. The schema follows `assay.harness.schema.RULE`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.errors import EvidenceError
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.logit_files import Logits, read_logits
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import FLOOR_REPEAT, Answer
from assay.harness.files import file_name, write_whole
from assay.harness.reading import whole_file
from assay.harness.schema import Record, read_json
from assay.harness.sides import Side

FILE, _ANSWERS = "baseline.json", "answers.jsonl"
_LOGITS = "logits-{}.safetensors"


class Key(Record):
    """The conditions of a result: two results can be compared if their keys are equal.

    Attributes:
        engine: for example "SGLang 0.5.23 on cpu".
        backend: attention backend.
        model_hash: of weights, tokenizer and configuration.
        hardware: the machine in one line.
        flags: the user's engine flags.
        items_hash: of the items.
        interpreter: Python that starts the engine, as requested, or empty for the one that runs assay.
        packages: packages laid over it, as requested, without secrets.
    """

    engine: str
    backend: str
    model_hash: str
    hardware: str
    flags: tuple[str, ...]
    items_hash: str
    interpreter: str = ""
    packages: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the baseline's folder."""
        content = self.model_dump_json(
            exclude_defaults=True
        )  # baselines from before a field was added keep their names
        return f"{file_name(self.backend)}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def differing(self, other: Key) -> list[tuple[str, str, str]]:
        """List what differs: its name, what it is in `other`, and what it is here."""
        return [
            (name, _text(getattr(other, name)), _text(getattr(self, name)))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class Baseline(Record):
    """``baseline.json``.

    Attributes:
        side: the side that was accepted, without secrets.
        accepted: when, ISO 8601, UTC.
        run_id: the run whose results they are.
        git: commit of that run.
        calls: attention calls counted in the server: which kernels computed which phase in which layers.
        server: what the server reported about itself.
        fingerprint: what the server really served, or None if it did not report it.
        seed: seed of the requests at the required lengths, which a run with this reference sends again.
        files: SHA-256 of each further file, by name.
    """

    schema_id: Literal["assay.baseline/4"] = Field("assay.baseline/4", alias="schema")
    key: Key
    side: Side
    accepted: str
    run_id: str
    git: str
    calls: tuple[CallCount, ...] = ()
    server: ServerManifest
    fingerprint: Fingerprint | None = None
    seed: str = ""
    files: dict[str, str] = Field(default_factory=dict)


def read_baseline(folder: Path) -> Baseline:
    """Read a baseline. Raises EvidenceError if it is damaged."""
    return read_json(folder / FILE, Baseline, "restore the file, or remove its folder and accept a new run")


def read_answers(folder: Path) -> list[Answer]:
    """Read a baseline's answers. Raises EvidenceError if they are damaged, or are not those that were accepted."""
    _check(folder, _ANSWERS)
    return jsonl.read(folder / _ANSWERS, Answer)


def read_scorings(folder: Path) -> list[Logits]:
    """Read a baseline's logits: of the first scoring, and of the second if there was one. Errors are those of `read_answers`."""
    names = [name for repeat in (0, FLOOR_REPEAT) if (name := _LOGITS.format(repeat)) in read_baseline(folder).files]
    for name in names:
        _check(folder, name)
    return [read_logits(folder / name) for name in names]


def _check(folder: Path, name: str) -> None:
    path, accepted = folder / name, read_baseline(folder).files.get(name)
    if accepted is None or not path.exists() or _sha256(whole_file(path, jsonl.LARGEST)) != accepted:
        raise EvidenceError(
            f"{path} was changed after it was accepted.",
            f"the file with SHA-256 {accepted[:12]}…" if accepted else f"a file that {FILE} lists",
            "restore the file, or remove its folder and accept a new run",
        )


def copy_baseline(folder: Path, to: Path) -> None:
    """Copy a baseline into another folder. Raises EvidenceError if it is damaged."""
    for name in read_baseline(folder).files:
        _check(folder, name)
        write_whole(to / name, whole_file(folder / name, jsonl.LARGEST))
    write_whole(to / FILE, whole_file(folder / FILE, jsonl.LARGEST))


def write_baseline(folder: Path, baseline: Baseline, answers: Sequence[Answer], scorings: Sequence[Path] = ()) -> Path:
    """Replace the baseline with the same key, if any, and return the folder.

    ``baseline.json`` makes the folder a baseline and is written last; until then, the one accepted before stays in place.

    Args:
        scorings: files of logits: of the first scoring, and of the second if there was one.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    target, files = folder / baseline.key.name, {_ANSWERS: jsonl.lines_of(answers).encode()}
    for repeat, path in zip((0, FLOOR_REPEAT), scorings, strict=False):
        files[_LOGITS.format(repeat)] = whole_file(path, jsonl.LARGEST)
    for name, content in files.items():
        write_whole(target / name, content)
    baseline = baseline.model_copy(update={"files": {name: _sha256(content) for name, content in files.items()}})
    write_whole(target / FILE, baseline.model_dump_json(indent=1) + "\n")
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
