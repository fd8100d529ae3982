"""The fingerprint of a server: a description of what it really serves, made so that two servers can be compared.

Each part was either observed, or `Fingerprint.not_observed` names it with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from assay.harness.errors import UsageError
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile, RunRecord
from assay.harness.schema import RULE, Record, read_json

SCHEMA: Literal["assay.fingerprint/3"] = "assay.fingerprint/3"
PARTS = (
    "tokens", "generation", "positions", "rope", "config", "weights", "adapters", "quantisation", "experts", "backends", "ignored",
    "arguments", "environment", "packages", "hardware",
)  # fmt: skip
"""The parts of a fingerprint, which are also the names of its fields."""


class RopeTable(Record):
    """The cos and sin that a model multiplies q and k with.

    Attributes:
        name: path of its first module.
        layers: the layers that use it, such as "0-3", or empty if unknown.
        kind: class of the module.
        dtype: the table's dtype.
        rows: number of positions in it, or 0 if it is computed as needed.
        frequencies: angle per position of each pair of dims, according to the table.
        scale: factor of all cos and sin.
        digest: digest of the table, or of the frequencies if there is no table.
        error: largest distance of the table from cos and sin in float64, or None if it holds no positions.
        wrong: how it contradicts ``config.json``, as a sentence, or empty if it does not.
    """

    name: str
    layers: str = ""
    kind: str
    dtype: str
    rows: int = 0
    frequencies: tuple[float, ...]
    scale: float = 1.0
    digest: str
    error: float | None = None
    wrong: str = ""


class Weight(Record):
    """One parameter as loaded.

    Attributes:
        name: its path in the model.
        shape: shape of this process's part.
        dtype: dtype of its elements.
        digest: digest of all bytes, or of a sample for a large parameter (`assay.harness.fingerprint.weights`).
        projections: products with random signs that depend on the name and the indices. They distinguish rounded weights from
            different ones. Empty if several processes hold different parts.
        signs: the name and the first row that determine the signs, "NAME ROW", or empty for its own name and row 0.
        sums: sums of powers over all elements. They do not depend on order, so the parts of several processes add up.
        grid: the narrowest dtype that holds all elements exactly, such as "bfloat16" for a float32 parameter.
        ranks: number of processes that hold a part of it, or 1 if each holds the whole.
        held: each process's part in rank order, if they differ.
        copied: whether each process holds the whole, by its layer.
        copies_differ: whether these copies differ between processes.
        unlike_checkpoint: relative distance from the checkpoint's values; 0 if they are the same or unknown.
        not_in_checkpoint: whether the checkpoint lacks it, or a part of it.
        kept: why it must not be rounded, such as "router bias", or empty for other parameters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    projections: tuple[float, ...] = ()
    signs: str = ""
    sums: tuple[float, ...] = ()
    grid: str = ""
    ranks: int = 1
    held: tuple[Weight, ...] = ()
    copied: bool = False
    copies_differ: bool = False
    unlike_checkpoint: float = 0.0
    not_in_checkpoint: bool = False
    kept: str = ""


class Tokens(Record):
    """Token ids of the probe corpus, `assay.evals.probe_texts`.

    Attributes:
        tokenizer: class of the tokenizer, or empty if only its results were seen.
        bos: id of the token that begins a sequence, if any.
        eos: ids of the tokens that end a sequence.
        texts: ids of each text, with the special tokens that the tokenizer adds by default.
        bare: the same without special tokens.
        chats: ids of each chat, as the server makes them from its messages.
        refused: why a chat did not get ids, by name, if others did: the template does not accept such a role, or tools.
        written: ids from ``tokenizer.json`` alone, without any tokenizer class, for the texts where they differ from `bare`.
        retold: ids of each chat if a client renders it to text first, and the tokenizer adds special tokens again.
        counts: number of prompt tokens of each chat, if only the number was seen.
        digests: digests of the chat template and of the parts of ``tokenizer.json``, most of which the corpus does not exercise.
    """

    tokenizer: str = ""
    bos: int | None = None
    eos: tuple[int, ...] = ()
    texts: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    bare: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    written: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    chats: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    refused: dict[str, str] = Field(default_factory=dict)
    retold: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    digests: dict[str, str] = Field(default_factory=dict)


class Resolved(Record):
    """The implementation of an operation that a model runs.

    Attributes:
        operation: "attention", "gemm", "moe", "norm", "rope", "all-reduce", "sampler", ...
        phase: "extend", "decode" or empty for all.
        layers: the layers that run it, such as "0-6,12-31", or empty outside the layers.
        runs: the implementation's name.
    """

    operation: str
    phase: str = ""
    layers: str = ""
    runs: str


class FolderNote(Record):
    """What the files of a model folder contradict each other in, or leave to an engine to decide.

    Attributes:
        id: stable, such as "yarn-factor".
        says: the contradiction and its consequence, a sentence.
        changes_outputs: False for settings that are right, and only to be known.
    """

    id: str
    says: str
    changes_outputs: bool = True


class Fingerprint(RunRecord):
    __doc__ = f"""A record of what a server really serves. {RULE}

    Attributes:
        source: the kind of source that was observed.
        engine: such as "SGLang 0.5.23 on cpu".
        model: the model's name as given.
        asked: the side's settings as requested, by name, as in `assay.harness.sides.treatment`.
        tokens, rope, weights: see their types. The weights are joined over all processes.
        config: the model's settings by name: the resolved configuration, and the floats that its layers hold.
        generation: generation defaults.
        positions: position ids of a probe's tokens.
        adapters: digest of each loaded LoRA adapter, by name.
        quantisation: the scheme's settings by name; empty values are left out.
        experts: digest of the map from logical to physical experts, by layer, or empty for a model without experts.
        backends: the resolved implementations.
        ignored: features that the layers need and a backend does not compute, one sentence each.
        arguments: the server's resolved arguments.
        environment: variables that can change numbers.
        packages: versions.
        hardware: device, driver, processor.
        folder: contradictions in the model's folder, if it was read.
        not_observed: why a part was not observed, by name.
        seconds: time that each part took.
    """

    schema_id: Literal["assay.fingerprint/3"] = Field(SCHEMA, alias="schema")
    source: Literal["server", "own server", "endpoint"]
    engine: str
    model: str
    asked: dict[str, str] = Field(default_factory=dict)
    tokens: Tokens | None = None
    generation: dict[str, str] | None = None
    positions: tuple[int, ...] | None = None
    rope: tuple[RopeTable, ...] | None = None
    config: dict[str, str] | None = None
    weights: tuple[Weight, ...] | None = None
    adapters: dict[str, str] | None = None
    quantisation: dict[str, str] | None = None
    experts: dict[str, str] | None = None
    backends: tuple[Resolved, ...] | None = None
    ignored: tuple[str, ...] | None = None
    arguments: dict[str, str] | None = None
    environment: dict[str, str] | None = None
    packages: dict[str, str] | None = None
    hardware: dict[str, str] | None = None
    folder: tuple[FolderNote, ...] | None = None
    not_observed: dict[str, str] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)

    def with_parts(self, read: Mapping[str, Any], seconds: Mapping[str, float] = MappingProxyType({})) -> Fingerprint:
        """Return it with more parts, as `assay.harness.fingerprint.folder_readings.observed` returns them, after `seconds`."""
        taken = {**seconds, **self.seconds, **read["seconds"]}
        missing = {**self.not_observed, **read["not_observed"]}
        return self.model_copy(update={**read, "not_observed": missing, "seconds": taken})

    def has(self, part: str) -> bool:
        """Return True if a part was observed."""
        return getattr(self, part) is not None


FINGERPRINT = RunFile("fingerprint.json", Fingerprint, RUN_AGAIN)
"""The fingerprint of a server, in its folder or at a path given to a command."""
OF_PROCESS = RunFile("fingerprint/*.json", Fingerprint, RUN_AGAIN, durable=False)
"""Each server process's own fingerprint: rank 0 and the other ranks of a tensor-parallel server."""
# Leading bytes of a file that contain its schema.
_START = 2000


def is_fingerprint(path: Path) -> bool:
    """Return True if a file, or the folder of a server, holds a fingerprint."""
    if path.is_dir():
        return (path / FINGERPRINT.name).is_file()
    if not path.is_file() or path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return SCHEMA.encode() in file.read(_START)


def has_fingerprint(path: Path) -> bool:
    """Return True if a file holds a fingerprint, or if a folder has one that `read_fingerprint` reads."""
    return is_fingerprint(path) or _holder(path) is not None


def _holder(path: Path) -> Path | None:
    return next(
        (folder for folder in (path, path / "servers" / "candidate") if (folder / FINGERPRINT.name).is_file()), None
    )


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint from its file, or from a run's folder: RUN has the candidate's, RUN/servers/reference the reference's.

    Raises:
        UsageError: the path has no fingerprint.
        EvidenceError: the fingerprint is damaged.
    """
    if path.is_dir():
        holder = _holder(path)
        if holder is None:
            raise UsageError(
                f"{path} has no {FINGERPRINT.name}.",
                "the folder of a run, or a file of assay fingerprint --out",
                "check the path",
            )
        path = holder / FINGERPRINT.name
    if not path.is_file():
        raise UsageError(
            f"{path} does not exist.", "a file of assay fingerprint --out, or the folder of a run", "check the path"
        )
    return read_json(path, Fingerprint, "write it again with assay fingerprint --out")
