"""Deciding which calls a replay pack keeps as they come by, and writing it.

A reservoir for each stratum (layer, phase, prefix bucket, length bucket), and the worst call of each layer and phase, within a
byte budget.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import safetensors.torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import (
    CANDIDATE,
    MANIFEST,
    TENSORS,
    CallMetadata,
    PackEntry,
    PackManifest,
    Source,
    Stratum,
)
from assay.harness.files import write_whole

BUDGET_BYTES = 256 * 2**20
RESERVOIR = 4
"""Most sampled calls of a stratum."""
LARGEST_SHARE = 1 / 32
"""Largest share of the budget that one call may take."""
WORST_SHARE = 1 / 2
"""Largest share of the budget that the worst calls may take together."""
_OVERHEAD = 4096  # a safetensors header and an entry of the manifest


@dataclass(eq=False)
class _Kept:
    """A call in the pack; its tensors only until they are written."""

    seen: CallMetadata
    chosen: Literal["sample", "worst"]
    relative_l1: float | None
    bytes: int
    first_sequence: int
    sequences: int
    first_head: int
    scale: float
    causal: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)
    entry: PackEntry | None = None


class PackWriter:
    """Keeps a pack within its budget as calls come by, and writes it when told to.

    Ask `wants` before a call is copied anywhere; then `add` it. Nothing is on disk before `flush`.
    """

    def __init__(self, folder: Path, source: Source, budget_bytes: int = BUDGET_BYTES, seed: int = 0) -> None:
        """A pack in a new or empty folder, or in place of the pack that is there.

        Raises:
            UsageError: the folder holds something else, or the budget is none.
        """
        if budget_bytes <= 0:
            raise UsageError(f"a replay pack of {budget_bytes} bytes was asked for.", "a positive number", "give more")
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(f"{folder} holds something that is no pack.", "a new or empty folder", "name another one")
        self._folder, self._source, self._budget = folder, source, budget_bytes
        self._random = random.Random(seed)
        self._samples: dict[Stratum, list[_Kept]] = {}
        self._offered: dict[Stratum, int] = {}
        self._worst: dict[tuple[int, str], _Kept] = {}
        self._seen = self._too_large = self._number = 0
        self._bytes = 0
        self._changed = True

    def wants(self, seen: CallMetadata) -> bool:
        """Whether the sample takes this call. Counts it as offered, so ask once for each call."""
        self._seen += 1
        stratum = seen.stratum
        self._offered[stratum] = offered = self._offered.get(stratum, 0) + 1
        # Reservoir sampling (Vitter's algorithm R): every call of a stratum is as likely to be kept as any other.
        return offered <= RESERVOIR or self._random.randrange(offered) < RESERVOIR

    def wants_worst(self, seen: CallMetadata, relative_l1: float) -> bool:
        """Whether this error is the largest of its layer and phase."""
        known = self._worst.get((seen.layer, seen.phase))
        return relative_l1 > 0 and (known is None or relative_l1 > (known.relative_l1 or 0.0))

    def add(
        self, seen: CallMetadata, call: AttentionCall, reference: Tensor, relative_l1: float | None = None,
        worst_at: tuple[int, int] = (0, 0), first_head: int = 0, candidate: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Keep a copy of a call: as the worst of its layer and phase if it has an error, else as a sample.

        What is too large for the budget is cut to fewer sequences, and then to one kv head and its q heads, which
        leaves every sequence's condition what it was.

        Args:
            seen: the call's condition.
            call: the call.
            reference: the reference's output, [total_q, num_q_heads, head_dim_v].
            relative_l1: the candidate's largest relative L1; None for a sample.
            worst_at: sequence and q head that have to be kept if the call is cut.
            first_head: number of the model's head that the call's first q head is.
            candidate: the candidate's output, the shape of the reference's; None if it did not compute the call.
        """
        outputs = {"reference": reference} if candidate is None else {"reference": reference, CANDIDATE: candidate}
        kept = self._cut(seen, call, outputs, relative_l1, worst_at, first_head)
        if kept is None:
            self._too_large += 1
            return
        if kept.chosen == "worst":
            self._release(self._worst.get((seen.layer, seen.phase)))
            self._worst[seen.layer, seen.phase] = kept
        else:
            stratum = self._samples.setdefault(seen.stratum, [])
            if len(stratum) == RESERVOIR:
                self._release(stratum.pop(self._random.randrange(RESERVOIR)))
            stratum.append(kept)
        self._bytes += kept.bytes
        self._changed = True
        self._evict()

    def flush(self) -> None:
        """Write what changed. At any moment the manifest on disk names only files that are there, whole.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        if not self._changed:
            return
        kept = [*self._worst.values(), *(one for stratum in self._samples.values() for one in stratum)]
        entries = tuple(one.entry or self._write(one) for one in kept)
        manifest = PackManifest(
            source=self._source, budget_bytes=self._budget, seen=self._seen, too_large=self._too_large, calls=entries
        )
        write_whole(self._folder / MANIFEST, manifest.model_dump_json(indent=1), durable=False)
        named = {entry.file for entry in entries}
        for file in (self._folder / "calls").glob("*"):
            if f"calls/{file.name}" not in named:
                file.unlink()
        self._changed = False

    def _write(self, kept: _Kept) -> PackEntry:
        content = safetensors.torch.save(kept.tensors)
        digest = hashlib.sha256(content).hexdigest()
        self._number += 1
        # The hash keeps the files of an earlier pack in this folder apart from this one's.
        file = f"calls/{self._number:06d}-{digest[:8]}.safetensors"
        write_whole(self._folder / file, content, durable=False)
        seen, some = kept.seen, slice(kept.first_sequence, kept.first_sequence + kept.sequences)
        kept.entry = PackEntry(
            file=file, sha256=digest, bytes=len(content), chosen=kept.chosen, relative_l1=kept.relative_l1,
            layer=seen.layer, phase=seen.phase, new=seen.new[some], prefix=seen.prefix[some], requests=seen.requests[some],
            first_sequence=kept.first_sequence, batch_size=len(seen.new), first_head=kept.first_head,
            scale=kept.scale, causal=kept.causal, dtype=str(kept.tensors["q"].dtype).removeprefix("torch."),
        )  # fmt: skip
        kept.tensors = {}
        return kept.entry

    def _release(self, dropped: _Kept | None) -> None:
        self._bytes -= dropped.bytes if dropped else 0

    def _evict(self) -> None:
        """Drop calls until the budget is kept: the mildest of too many worst calls, else one of the largest stratum."""
        while self._worst_bytes() > WORST_SHARE * self._budget:
            mildest = min(self._worst, key=lambda key: self._worst[key].relative_l1 or 0.0)
            self._release(self._worst.pop(mildest))
        while self._bytes > self._budget:
            stratum = max(self._samples.values(), key=lambda kept: (len(kept), sum(one.bytes for one in kept)))
            self._release(stratum.pop(self._random.randrange(len(stratum))))

    def _worst_bytes(self) -> int:
        return sum(kept.bytes for kept in self._worst.values())

    def _cut(
        self, seen: CallMetadata, call: AttentionCall, outputs: dict[str, Tensor], relative_l1: float | None,
        worst_at: tuple[int, int], first_head: int,
    ) -> _Kept | None:  # fmt: skip
        limit = max(LARGEST_SHARE * self._budget, 2 * _OVERHEAD)
        groups = call.q.shape[1] // call.k.shape[1]
        first, count, heads = 0, len(seen.new), slice(0, call.q.shape[1])
        tensors = _part(call, outputs, first, count, heads)
        if _size(tensors) > limit:
            first, count = worst_at[0], 1
            tensors = _part(call, outputs, first, count, heads)
        if _size(tensors) > limit:
            heads = slice(worst_at[1] // groups * groups, (worst_at[1] // groups + 1) * groups)
            tensors = _part(call, outputs, first, count, heads)
        if _size(tensors) > limit:
            return None
        return _Kept(
            seen, "sample" if relative_l1 is None else "worst", relative_l1, _size(tensors), first, count,
            first_head + heads.start, call.scale, call.causal,
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
        )  # fmt: skip


def _part(call: AttentionCall, outputs: dict[str, Tensor], first: int, count: int, heads: slice) -> dict[str, Tensor]:
    """The tensors of some sequences and q heads of a call, as views."""
    cu_q, cu_k = (cu[first : first + count + 1] for cu in (call.cu_seqlens_q, call.cu_seqlens_k))
    rows_q, rows_k = (slice(int(cu[0]), int(cu[-1])) for cu in (cu_q, cu_k))
    groups = call.q.shape[1] // call.k.shape[1]
    kv = slice(heads.start // groups, heads.stop // groups)
    parts = (call.q[rows_q, heads], call.k[rows_k, kv], call.v[rows_k, kv], cu_q - cu_q[0], cu_k - cu_k[0])
    return dict(zip(TENSORS, parts, strict=False)) | {name: out[rows_q, heads] for name, out in outputs.items()}


def _size(tensors: dict[str, Tensor]) -> int:
    return _OVERHEAD + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
