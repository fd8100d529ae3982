"""Log-probabilities from teacher forcing in a run's folder: ``logits/<role>-<repeat>.safetensors``, one file per scoring.

A file is written once, when every sequence has been scored, so an existing file is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.evidence.run_file import RunRecord, damaged, read_arrays, write_arrays
from assay.harness.schema import Record
from assay.harness.sides import Role

_FOLDER = "logits"
CacheState = Literal["cold", "cached"]
CACHE_STATES: tuple[CacheState, CacheState] = ("cold", "cached")
"""Scored with an empty prefix cache, or with the start of the sequence cached."""
MAX_COLD_TOKENS = 1
"""Most cached tokens that still count as none: the beginning-of-sequence token."""
_DO = "remove the file and run the same command again: it repeats this scoring"
_TENSORS = ("token", "best", "top_ids", "logprobs")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class ScoredSequence(Record):
    """One sequence of prompt and answer tokens.

    Attributes:
        item: id of the answered item.
        prompt_tokens: tokens of the prompt, chat template included.
        length: all tokens.
        start: scoring covers the tokens after the first ``start + 1``. At most ``start`` tokens may come from the cache.
        cached: cached tokens under each condition, as the server reports.
    """

    item: str
    prompt_tokens: int
    length: int
    start: int
    cached: dict[CacheState, int]

    @property
    def positions(self) -> int:
        """Number of scored tokens."""
        return self.length - self.start - 1

    def honoured(self, condition: CacheState) -> bool:
        """Return True if the server's cache was in the condition's state."""
        cached = self.cached[condition]
        return cached <= MAX_COLD_TOKENS if condition == "cold" else cached >= CACHED_PREFIX_TOKENS


class LogitsHeader(RunRecord):
    """The header of a file.

    Attributes:
        role: role of the server that scored.
        repeat: 0 for the comparison itself; 1 for the reference scored again, for the floor.
        backend: the server's attention backend.
        engine: such as "SGLang 0.5.23 on cpu".
        top_k: number of the reference's most probable tokens scored at each position.
        sequences: the scored sequences, in the order of the items.
    """

    role: Role
    repeat: int
    backend: str
    engine: str
    top_k: int
    sequences: tuple[ScoredSequence, ...]


@dataclass(frozen=True)
class Positions:
    """Log-probabilities in nats at all ``n`` scored positions, sequence after sequence. NaN where the server returned none.

    Attributes:
        token: log-probability of the sequence's own token, [n].
        best: id of this role's most probable token, [n].
        top_ids: ids of the *reference's* k most probable tokens, best first, [n, k].
        logprobs: this role's log-probabilities of those tokens, [n, k].
    """

    token: Floats
    best: Ints
    top_ids: Ints
    logprobs: Floats

    def at(self, rows: Ints | npt.NDArray[np.int64]) -> Positions:
        """Return the positions at `rows`, in this order."""
        return Positions(self.token[rows], self.best[rows], self.top_ids[rows], self.logprobs[rows])


@dataclass(frozen=True)
class Logits:
    """One scoring of all sequences.

    Attributes:
        header: the file's header.
        ids: token ids, sequence after sequence.
        by_condition: log-probabilities under each condition.
    """

    header: LogitsHeader
    ids: Ints
    by_condition: Mapping[CacheState, Positions]

    def ids_of(self, index: int) -> tuple[int, ...]:
        """Return the token ids of a sequence."""
        first = sum(sequence.length for sequence in self.header.sequences[:index])
        return tuple(self.ids[first : first + self.header.sequences[index].length].tolist())

    def only(self, indices: Sequence[int]) -> Logits:
        """Return the sequences at `indices`, in this order."""
        rows = np.concatenate([np.arange(len(self.by_condition["cold"].token))[self.rows_of(i)] for i in indices])
        header = self.header.model_copy(update={"sequences": tuple(self.header.sequences[i] for i in indices)})
        ids = np.concatenate([np.array(self.ids_of(i), np.int32) for i in indices])
        return Logits(header, ids, {c: p.at(rows) for c, p in self.by_condition.items()})

    def rows_of(self, index: int) -> slice:
        """Return the rows that hold a sequence's positions."""
        first = sum(sequence.positions for sequence in self.header.sequences[:index])
        return slice(first, first + self.header.sequences[index].positions)


def logits_path(folder: Path, role: Role, repeat: int) -> Path:
    """Return the file of a scoring in a run's folder."""
    return folder / _FOLDER / f"{role}-{repeat}.safetensors"


def write_logits(folder: Path, logits: Logits) -> None:
    """Write a scoring to a run's folder. Raises EvidenceError if it cannot be written."""
    path = logits_path(folder, logits.header.role, logits.header.repeat)
    tensors: dict[str, np.ndarray] = {"ids": logits.ids}
    for condition, positions in logits.by_condition.items():
        tensors |= {f"{condition}.{name}": getattr(positions, name) for name in _TENSORS}
    write_arrays(path, tensors, logits.header)


def read_logits(path: Path, run: str = "") -> Logits:
    """Read a scoring.

    Args:
        run: the nonce that it must carry, or empty to accept any.

    Raises:
        EvidenceError: the file is missing, damaged or of another run.
    """
    header, arrays = read_arrays(path, LogitsHeader, run, _DO)
    n, k = sum(sequence.positions for sequence in header.sequences), header.top_k
    shapes: dict[str, tuple[int, ...]] = {"ids": (sum(sequence.length for sequence in header.sequences),)}
    for condition in CACHE_STATES:
        of_condition: list[tuple[int, ...]] = [(n,), (n,), (n, k), (n, k)]
        shapes |= {f"{condition}.{name}": shape for name, shape in zip(_TENSORS, of_condition, strict=True)}
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            shaped = f"is {arrays[name].shape}, not {shape}" if name in arrays else "is missing"
            raise damaged(path, f"{name} {shaped}", _DO)
    conditions = {c: Positions(*(arrays[f"{c}.{name}"] for name in _TENSORS)) for c in CACHE_STATES}
    return Logits(header, arrays["ids"], conditions)
