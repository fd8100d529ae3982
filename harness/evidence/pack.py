"""Replay packs: recorded calls with the reference's outputs, for running a kernel without a server or a model.

A pack is a folder with ``manifest.json`` and one safetensors file per call. `assay.harness.engines.inside.pack_writer` writes it.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from safetensors import SafetensorError

from assay.harness.attention.call import AttentionCall, CallSpec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.files import portable
from assay.harness.reading import reading, whole_file
from assay.harness.schema import Record, read_json

if TYPE_CHECKING:  # reports read the manifest and must not wait for torch
    from torch import Tensor

_SCHEMA: Literal["assay.pack/3"] = "assay.pack/3"
MANIFEST = "manifest.json"
CANDIDATE = "candidate"
"""Tensor in a file, in addition to the call's own and "reference", if the candidate computed the call."""


def replay_command(pack: Path | str, candidate: str = "module:function") -> str:
    """Return the command that runs a kernel on a pack's calls."""
    return shlex.join(["assay", "replay", portable(str(pack)), "--candidate", candidate])


class Source(Record):
    """The origin of a pack's calls.

    Attributes:
        engine: such as "SGLang 0.5.23 on cpu".
        model: folder or hub id.
        model_hash: see `assay.harness.run.machine.hash_model`. Empty if the recording server did not receive it.
        reference: backend whose outputs are recorded.
        candidate: backend whose errors selected the worst calls, if any.
        run: nonce of the run that recorded them, if any.
    """

    engine: str
    model: str
    model_hash: str
    reference: str
    candidate: str = ""
    run: str = ""


class PackEntry(Record):
    """One recorded call: its file and its condition.

    Attributes:
        spec: the call's specification.
        chosen: "sample" if the stratified sample selected it, "worst" if it has the largest error in its layer and phase.
        relative_l1: the candidate's largest relative L1 over queries and heads, or None if not measured.
        new: new tokens per sequence.
        prefix: cached prefix per sequence.
        first_query: number among the sequence's new tokens of the first recorded query; the tokens before it count as prefix.
        sha256: hash of the file.
    """

    file: str = Field(pattern=r"^(rank-[0-9]+/)?calls/[0-9a-f-]+\.safetensors$")
    sha256: str
    bytes: int
    chosen: Literal["sample", "worst"]
    relative_l1: float | None
    spec: CallSpec
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    first_query: int = 0


class PackManifest(Record):
    """``manifest.json`` of a pack.

    Attributes:
        seen: number of calls offered, kept or not.
        too_large: calls that do not fit even when cut to one sequence with one kv head.
    """

    schema_id: Literal["assay.pack/3"] = Field(_SCHEMA, alias="schema")
    source: Source
    seen: int
    too_large: int
    calls: tuple[PackEntry, ...]


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call.

    Attributes:
        call: the call, on the CPU.
        reference: the reference's output, [total_q, num_q_heads, head_dim_v].
        entry: its entry in the manifest.
        candidate: the candidate's output in the server's shadow, in the same shape, or None if it did not compute the call.
    """

    call: AttentionCall
    reference: Tensor
    entry: PackEntry
    candidate: Tensor | None = None

    @property
    def served_prefixes(self) -> tuple[int, ...]:
        """Cached prefix per sequence in the served call. It is shorter than in a recorded call without its first queries."""
        return tuple(prefix - self.entry.first_query for prefix in self.entry.prefix)


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder where a tensor-parallel process records its heads: the pack's own folder for rank 0."""
    return folder / f"rank-{rank}" if rank else folder


def read_manifest(folder: Path) -> PackManifest:
    """Read a pack's manifest, with the calls recorded by all processes of the server.

    Raises:
        UsageError: the folder has no pack, or a pack from another version of assay.
        EvidenceError: a manifest is damaged, or the processes recorded calls of different servers.
    """
    manifest = _read_manifest(folder)
    for path in _further_manifests(folder):
        more = _read_manifest(path.parent)
        if more.source != manifest.source:
            raise EvidenceError(
                f"{path} is from a different server than {folder / MANIFEST}.",
                "processes of a single server",
                "record the pack again",
            )
        entries = [entry.model_copy(update={"file": f"{path.parent.name}/{entry.file}"}) for entry in more.calls]
        manifest = manifest.model_copy(
            update={"calls": (*manifest.calls, *entries), "too_large": manifest.too_large + more.too_large}
        )
    return manifest


def hash_pack(folder: Path) -> str:
    """Hash a pack's manifests, which hold the hash of every recorded call, with SHA-256.

    Raises:
        EvidenceError: a manifest cannot be read.
    """
    paths = [folder / MANIFEST, *_further_manifests(folder)]
    try:
        return hashlib.sha256(b"".join(whole_file(path) for path in paths)).hexdigest()
    except OSError as error:
        raise EvidenceError(
            f"{folder} cannot be read: {error.strerror}.", "a replay pack", "record the pack again"
        ) from None


def _further_manifests(folder: Path) -> list[Path]:
    """Return the manifests of the tensor-parallel ranks 1, 2, ..."""
    return sorted(folder.glob(f"rank-*/{MANIFEST}"))


def _read_manifest(folder: Path) -> PackManifest:
    path = folder / MANIFEST
    try:
        text = whole_file(path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} is not a replay pack: it has no {MANIFEST}." if folder.exists() else f"{folder} does not exist.",
            "a folder that assay run --record wrote",
            "check the path",
        ) from None
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be read: {error.strerror}.", "the manifest of a pack", "record the pack again"
        ) from None
    if f'"{_SCHEMA}"' not in text:
        raise UsageError(
            f"{path} does not have schema {_SCHEMA}.",
            "a pack from this version of assay",
            "record the pack again, or check the path",
        )
    return read_json(path, PackManifest, "record the pack again")


def read_pack(folder: Path, unread: list[str] | None = None) -> list[RecordedCall]:
    """Read all calls of a pack, sorted by layer.

    Args:
        unread: receives a message for each damaged or missing file; the other files are read. If None, such a pack is refused.

    Raises:
        UsageError: the folder has no pack, or a pack from another version of assay.
        EvidenceError: the manifest is damaged, the pack has no readable call, or, without `unread`, a call cannot be read.
    """
    entries = sorted(
        read_manifest(folder).calls, key=lambda entry: (entry.spec.layer, entry.spec.phase, entry.prefix, entry.new)
    )
    if not entries:
        raise EvidenceError(
            f"{folder} has no calls.", "at least one recorded call", "record again, and send the server a request"
        )
    read = []
    for entry in entries:
        try:
            read.append(_read(folder, entry))
        except EvidenceError as error:
            if unread is None or len(unread) == len(entries) - 1:
                raise
            unread.append(error.found)
    return read


def _read(folder: Path, entry: PackEntry) -> RecordedCall:
    import safetensors.torch

    path = folder / entry.file
    try:
        content = whole_file(path, 2 * entry.bytes)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise EvidenceError(
                f"{path} is damaged: its hash differs from the manifest ({len(content)} bytes, {entry.bytes} recorded).",
                "the file as recorded",
                "copy the pack again, or record it again",
            )
        with reading(path, "recorded call"):
            tensors = safetensors.torch.load(content)
            call = AttentionCall.of_tensors(tensors, entry.spec)
            return RecordedCall(call, tensors["reference"], entry, tensors.get(CANDIDATE))
    except (OSError, SafetensorError, KeyError) as error:
        raise EvidenceError(
            f"{path} cannot be read: {error}.", "a recorded call", "copy the pack again, or record it again"
        ) from None
