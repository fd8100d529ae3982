"""What teacher forcing leaves in a run's folder: ``logits/<role>-<repeat>.safetensors``, one file for each scoring.

A file that is there is whole: it is written at once, when every sequence has been scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from pydantic import ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.errors import EvidenceError
from assay.harness.evidence.records import Role
from assay.harness.files import write_whole
from assay.harness.schema import Record

SCHEMA: Literal["assay.logits/1"] = "assay.logits/1"
FOLDER = "logits"
Condition = Literal["cold", "cached"]
CONDITIONS: tuple[Condition, Condition] = ("cold", "cached")
"""Scored on an emptied prefix cache, and with the beginning of the sequence in it."""
COLD_MOST = 1
"""Most cached tokens that still count as none: the beginning-of-sequence token."""
_KEY = "assay"
_TENSORS = ("token", "best", "top_ids", "logprobs")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class ScoredSequence(Record):
    """One sequence of prompt and answer tokens.

    Attributes:
        item: id of the item that it answers.
        prompt_tokens: tokens of the prompt, chat template included.
        length: all tokens.
        start: the tokens after the first ``start + 1`` are scored; no more than ``start`` may come from the cache.
        cached: cached tokens under each condition, by the server's own account.
    """

    item: str
    prompt_tokens: int
    length: int
    start: int
    cached: dict[Condition, int]

    @property
    def positions(self) -> int:
        """Scored tokens."""
        return self.length - self.start - 1

    def honoured(self, condition: Condition) -> bool:
        """Whether the server cached what the condition says."""
        cached = self.cached[condition]
        return cached <= COLD_MOST if condition == "cold" else cached >= CACHED_PREFIX_TOKENS


class LogitsHeader(Record):
    """What a file holds.

    Attributes:
        role: whose log-probabilities.
        repeat: 0 is the comparison itself; 1 is the reference scored again, for the floor.
        backend: the server's attention backend.
        engine: such as "SGLang 0.5.23 on cpu".
        top_k: the reference's most probable tokens that are followed at each position.
        sequences: in the order of the items.
    """

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    schema_id: Literal["assay.logits/1"] = Field(SCHEMA, alias="schema")
    role: Role
    repeat: int
    backend: str
    engine: str
    top_k: int
    sequences: tuple[ScoredSequence, ...]


@dataclass(frozen=True)
class Positions:
    """Log-probabilities in nats at all ``n`` scored positions of all sequences, one after the other. Not a number where none came.

    Attributes:
        token: of the sequence's own token, [n].
        best: id of this role's most probable token, [n].
        top_ids: ids of the *reference's* k most probable tokens, best first, [n, k].
        logprobs: this role's log-probabilities of those, [n, k].
    """

    token: Floats
    best: Ints
    top_ids: Ints
    logprobs: Floats


@dataclass(frozen=True)
class Logits:
    """One scoring of all sequences.

    Attributes:
        header: what it is.
        ids: token ids of all sequences, one after the other.
        by_condition: what was scored under each condition.
    """

    header: LogitsHeader
    ids: Ints
    by_condition: Mapping[Condition, Positions]

    def ids_of(self, index: int) -> tuple[int, ...]:
        """Token ids of a sequence."""
        first = sum(sequence.length for sequence in self.header.sequences[:index])
        return tuple(self.ids[first : first + self.header.sequences[index].length].tolist())

    def rows_of(self, index: int) -> slice:
        """Where a sequence's positions are."""
        first = sum(sequence.positions for sequence in self.header.sequences[:index])
        return slice(first, first + self.header.sequences[index].positions)


def logits_path(folder: Path, role: Role, repeat: int) -> Path:
    """Where a scoring lies in a run's folder."""
    return folder / FOLDER / f"{role}-{repeat}.safetensors"


def write_logits(folder: Path, logits: Logits) -> None:
    """Write a scoring into a run's folder.

    Raises:
        EvidenceError: it cannot be written.
    """
    path = logits_path(folder, logits.header.role, logits.header.repeat)
    tensors: dict[str, np.ndarray] = {"ids": logits.ids}
    for condition, positions in logits.by_condition.items():
        tensors |= {f"{condition}.{name}": getattr(positions, name) for name in _TENSORS}
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    content = safetensors.numpy.save(contiguous, {_KEY: logits.header.model_dump_json()})
    write_whole(path, content)


def read_logits(path: Path) -> Logits:
    """A scoring.

    Raises:
        EvidenceError: there is none, or the file is damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = LogitsHeader.model_validate_json((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        logits = Logits(
            header,
            tensors["ids"],
            {c: Positions(**{name: tensors[f"{c}.{name}"] for name in _TENSORS}) for c in CONDITIONS},
        )
    except (OSError, SafetensorError, KeyError, ValidationError) as error:
        raise EvidenceError(
            f"{path} cannot be read: {str(error).splitlines()[0]}.",
            "log-probabilities of this version of assay",
            "remove the file and run the same command again: it scores what is not there",
        ) from None
    _check_shapes(path, logits)
    return logits


def _check_shapes(path: Path, logits: Logits) -> None:
    header = logits.header
    n, k = sum(sequence.positions for sequence in header.sequences), header.top_k
    expected = {"token": (n,), "best": (n,), "top_ids": (n, k), "logprobs": (n, k)}
    found = [
        f"{condition}.{name} is {getattr(positions, name).shape}, not {shape}"
        for condition, positions in logits.by_condition.items()
        for name, shape in expected.items()
        if getattr(positions, name).shape != shape
    ]
    if logits.ids.shape != (sum(sequence.length for sequence in header.sequences),):
        found.append(f"ids is {logits.ids.shape}")
    if found:
        raise EvidenceError(
            f"{path} is damaged: {found[0]}.", "the shapes that its header says", "remove the file and run again"
        )
