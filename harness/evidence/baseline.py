"""``baselines/``: a backend's accepted results, in plain files that a team commits.

A baseline is a folder ``<backend>-<hash>/`` with ``baseline.json`` and ``answers.jsonl``. It is valid for one backend under one
`Key`; under any other key its numbers mean nothing, and it is *stale*. The schema follows `assay.harness.schema.RULE`.
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
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.files import file_name, write_whole
from assay.harness.reading import whole_file
from assay.harness.schema import Record, read_json

FILE, _ANSWERS = "baseline.json", "answers.jsonl"


class Key(Record):
    """The conditions of a result: two results can be compared if their keys are equal.

    Attributes:
        engine: such as "SGLang 0.5.23 on cpu".
        backend: attention backend.
        model_hash: hash of weights, tokenizer and configuration.
        hardware: the machine in one line.
        flags: the user's engine flags.
        items_hash: hash of the items.
    """

    engine: str
    backend: str
    model_hash: str
    hardware: str
    flags: tuple[str, ...]
    items_hash: str

    @property
    def name(self) -> str:
        """The name of the baseline's folder."""
        return f"{file_name(self.backend)}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]}"

    def differing(self, other: Key) -> list[tuple[str, str, str]]:
        """List the differing fields: the name, the value in `other`, and the value here."""
        return [
            (name, _text(getattr(other, name)), _text(getattr(self, name)))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        ]


class Baseline(Record):
    """``baseline.json``.

    Attributes:
        accepted: time of acceptance, ISO 8601, UTC.
        run_id: the run that produced the results.
        git: commit of that run.
        reason: why a regression or worse numbers than before were accepted, or empty if they were not.
        numbers: accepted results by id, such as "accuracy"; shares are fractions of 1.
        own_errors: own error (relative L1) by id, such as "layer-3-extend-cached-prefix-at-least-16".
        calls: attention calls counted in the server: which kernels computed which phase in which layers.
        server: the server's own report.
        fingerprint: the server's fingerprint, or None if it did not report one, and in older baselines.
        answers_sha256: hash of ``answers.jsonl``, or empty in baselines accepted before the hash was recorded.
    """

    schema_id: Literal["assay.baseline/2"] = Field("assay.baseline/2", alias="schema")
    key: Key
    accepted: str
    run_id: str
    git: str
    reason: str = ""
    numbers: dict[str, float]
    own_errors: dict[str, float] = Field(default_factory=dict)
    calls: tuple[CallCount, ...] = ()
    server: ServerManifest
    answers_sha256: str = ""
    fingerprint: Fingerprint | None = None


def read_baseline(folder: Path) -> Baseline:
    """Read a baseline. Raises EvidenceError if it is damaged."""
    return read_json(folder / FILE, Baseline, "restore the file, or remove its folder and accept a new run")


def read_answers(folder: Path) -> list[Answer]:
    """Read a baseline's answers. Raises EvidenceError if they are damaged, or were changed after acceptance."""
    path, accepted = folder / _ANSWERS, read_baseline(folder).answers_sha256
    if accepted and (not path.exists() or _sha256(whole_file(path, jsonl.LARGEST)) != accepted):
        raise EvidenceError(
            f"{path} was changed after it was accepted.",
            f"the file with SHA-256 {accepted[:12]}…",
            "restore the file, or remove its folder and accept a new run",
        )
    return jsonl.read(path, Answer)


def read_all(folder: Path) -> tuple[dict[str, Baseline], dict[str, EvidenceError]]:
    """Read all baselines in a folder by name, and the errors of the unreadable ones. A missing folder has none."""
    read: dict[str, Baseline] = {}
    damaged: dict[str, EvidenceError] = {}
    for path in sorted(folder.glob(f"*/{FILE}")):
        try:
            read[path.parent.name] = read_baseline(path.parent)
        except EvidenceError as error:
            damaged[path.parent.name] = error
    return read, damaged


def copy_baseline(folder: Path, to: Path) -> None:
    """Copy a baseline into another folder. Raises EvidenceError if it is damaged."""
    read_answers(folder)
    for name in (FILE, _ANSWERS):
        write_whole(to / name, whole_file(folder / name, jsonl.LARGEST))


def write_baseline(folder: Path, baseline: Baseline, answers: Sequence[Answer]) -> Path:
    """Replace the baseline with the same key, if any, and return its folder.

    ``baseline.json`` makes the folder a baseline and is written last. Until then, the previously accepted one stays in place.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    target, lines = folder / baseline.key.name, jsonl.lines_of(answers).encode()
    baseline = baseline.model_copy(update={"answers_sha256": _sha256(lines)})
    write_whole(target / _ANSWERS, lines)
    write_whole(target / FILE, baseline.model_dump_json(indent=1) + "\n")
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
