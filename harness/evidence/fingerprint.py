"""The fingerprint of a server: what it really serves, in a form in which two servers can be compared.

Each part was observed, or `Fingerprint.not_observed` names it with the reason.
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

SCHEMA: Literal["assay.fingerprint/1"] = "assay.fingerprint/1"
PARTS = (
    "tokens", "generation", "positions", "rope", "config", "weights", "adapters", "quantisation", "experts", "backends", "ignored",
    "arguments", "environment", "packages", "hardware",
)  # fmt: skip
"""The parts of a fingerprint: the fields that hold them have these names."""


class RopeTable(Record):
    """The cos and sin that a model multiplies q and k with.

    Attributes:
        name: path of its first module.
        layers: those that use it, as "0-3", or empty where that is not known.
        kind: class of the module.
        dtype: of the table.
        rows: positions that it holds, or 0 where it is computed as needed.
        frequencies: angle per position of each pair of dims, as the table has them.
        scale: factor of all cos and sin.
        digest: of the table, or of the frequencies without one.
        error: largest distance of the table from cos and sin in float64, or None where it holds no positions.
        wrong: how it differs from ``config.json``, a sentence; empty if it agrees, or if that does not say.
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
        name: its path in the model; of a piece, where it lies in the whole.
        shape: of this process's part.
        dtype: of its elements.
        digest: of all bytes, or of a sample of those of a large one (`assay.harness.fingerprint.weights`).
        projections: products with random signs that a name and the indices in the whole decide; they tell rounded weights from
            others, and those of the parts of a whole add up. Empty where it is not known which part each process holds.
        signs: the name and the first row that decide the signs, "NAME ROW", or empty for its own name and row 0.
        sums: sums over all elements of powers: they do not depend on the order, so those of shards add up, known places or not.
        grid: the narrowest dtype that holds all of its elements exactly, such as "bfloat16" of a float32 parameter.
        ranks: processes that hold a part of it; 1 where each holds the whole.
        whole: shape of the whole parameter, or empty where the part that a process holds is not known.
        held: of one process, the pieces of the whole that it holds; of all processes together, what each holds, in the order of
            ranks, where `whole` is not known.
        copies_differ: whether processes that hold the same piece of it hold other numbers.
        unlike_checkpoint: relative distance from the checkpoint's values, 0 where they are the same or not known.
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
    whole: tuple[int, ...] = ()
    held: tuple[Weight, ...] = ()
    copies_differ: bool = False
    unlike_checkpoint: float = 0.0
    not_in_checkpoint: bool = False
    kept: str = ""


class Tokens(Record):
    """Token ids of the probe corpus, `assay.evals.probe_texts`.

    Attributes:
        tokenizer: class of the tokenizer, or empty where only its results were seen.
        bos: id of the token that begins a sequence, if any.
        eos: ids of the tokens that end one.
        texts: ids of each text, special tokens added as the tokenizer does by default.
        bare: the same without special tokens.
        chats: ids of each chat, as the server makes them of its messages.
        refused: why a chat got no ids, by its name, where others got some: the template takes no such role, or no tools.
        written: ids of ``tokenizer.json`` itself, which no class has changed, of the texts where they are not `bare`.
        retold: ids of each chat where a client renders it to text first, and the tokenizer adds special tokens again.
        counts: number of prompt tokens of each chat, where only that was seen.
        digests: of the chat template, and of what ``tokenizer.json`` computes from by its parts: the corpus meets a little of it.
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
        layers: those that run it, as "0-6,12-31", or empty outside of layers.
        runs: its name.
    """

    operation: str
    phase: str = ""
    layers: str = ""
    runs: str


class Fingerprint(RunRecord):
    __doc__ = f"""A record of what a server really serves. {RULE}

    Attributes:
        source: where it was observed.
        engine: "SGLang 0.5.23 on cpu", or the packages that read the model's files.
        model: as it was named.
        asked: settings of the side, by name, as `assay.harness.sides.treatment` has them, as requested.
        tokens, rope, weights: see their types. The weights are those of all processes together.
        config: settings of the model, by name: of its resolved configuration, and floats as its layers hold them.
        generation: defaults of generation.
        positions: position ids of the tokens of a probe.
        adapters: digest of each LoRA adapter that is loaded, by its name.
        quantisation: the scheme, by name of a setting; empty values are left out.
        experts: digest of the map from logical to physical experts, by layer, or empty for a model without experts.
        backends: the resolved implementations.
        ignored: what the layers ask for and a backend does not compute, a sentence each.
        arguments: the resolved arguments of the server.
        environment: variables that can change numbers.
        packages: versions.
        hardware: device, driver, processor.
        not_observed: why a part was not observed, by its name.
        seconds: time that each part took.
    """

    schema_id: Literal["assay.fingerprint/1"] = Field(SCHEMA, alias="schema")
    source: Literal["server", "model runner", "files", "endpoint"]
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
    not_observed: dict[str, str] = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)

    def with_parts(self, read: Mapping[str, Any], seconds: Mapping[str, float] = MappingProxyType({})) -> Fingerprint:
        """Return it with further parts as `assay.harness.fingerprint.in_interpreter.observed` gives them; `seconds` come first."""
        taken = {**seconds, **self.seconds, **read["seconds"]}
        missing = {**self.not_observed, **read["not_observed"]}
        return self.model_copy(update={**read, "not_observed": missing, "seconds": taken})

    def has(self, part: str) -> bool:
        """Return True if a part was observed."""
        return getattr(self, part) is not None


FINGERPRINT = RunFile("fingerprint.json", Fingerprint, RUN_AGAIN)
"""The fingerprint of one server, in its folder or where a command was told to write it."""
OF_PROCESS = RunFile("fingerprint/*.json", Fingerprint, RUN_AGAIN, durable=False)
"""What each process of a server observed of itself: rank 0 and the others of a tensor-parallel server."""
# Bytes of a file in which its schema stands.
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
    """Read a fingerprint from its file, or from the folder of a run: RUN is its candidate, RUN/servers/reference the other.

    Raises:
        UsageError: it has none.
        EvidenceError: it is damaged.
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
