"""Selects calls for a replay pack while the server runs, and writes the pack.

Within a byte budget it keeps a reservoir per stratum (layer, phase, prefix bucket, length bucket), and the worst call of each layer
and phase.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import safetensors.torch
from torch import Tensor

from assay.harness.attention.call import BY_KEY, STORED, AttentionCall, CallSpec, cumulative
from assay.harness.conditions import CACHED_PREFIX, SEQUENCE_LENGTH
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import CANDIDATE, MANIFEST, PackEntry, PackManifest, Source
from assay.harness.files import write_whole

# Most sampled calls per stratum.
_RESERVOIR = 4
# Shares of the budget: for one call, for one sequence with one kv head (which cannot be cut further without losing queries), and
# for the worst calls together.
_MAX_CALL_SHARE, _MAX_CUT_SHARE, _MAX_WORST_SHARE = 1 / 32, 1 / 8, 1 / 2
_OVERHEAD = 4096  # a safetensors header and an entry of the manifest

# Layer, phase, prefix bucket, length bucket.
_Stratum = tuple[int, str, str, str]


def stratum(layer: int, phase: str, new: Sequence[int], prefix: Sequence[int]) -> _Stratum:
    """Return the stratum of a call: that of its longest prefix and its longest sequence."""
    longest = max(n + p for n, p in zip(new, prefix, strict=True))
    return layer, phase, CACHED_PREFIX.label(max(prefix)), SEQUENCE_LENGTH.label(longest)


@dataclass(eq=False)
class _Kept:
    """A call in the pack. Its tensors are dropped once they are written."""

    chosen: Literal["sample", "worst"]
    relative_l1: float | None
    bytes: int
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    spec: CallSpec
    first_query: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    entry: PackEntry | None = None


class PackWriter:
    """Selects the calls of a pack within its budget.

    Ask `wants` before copying a call, then `add` it. Nothing is on disk before `flush`.
    """

    def __init__(
        self, folder: Path, source: Source, budget_bytes: int, seed: int = 0, reservoir: int = _RESERVOIR
    ) -> None:
        """Write a pack in a new or empty folder, or replace the folder's pack; at most `reservoir` samples per stratum.

        Raises:
            UsageError: the folder has other content, or the budget is not positive.
        """
        if budget_bytes <= 0:
            raise UsageError(
                f"The budget of the replay pack is {budget_bytes} bytes.", "a positive number", "give a larger budget"
            )
        # Processes that share the heads record into separate folders within that of rank 0.
        others = [path for path in folder.iterdir() if not path.name.startswith("rank-")] if folder.exists() else []
        if others and not (folder / MANIFEST).exists():
            raise UsageError(
                f"{folder} has content that is not a pack.", "a new or empty folder", "choose another folder"
            )
        self._folder, self._source, self._budget = folder, source, budget_bytes
        self._random, self._reservoir = random.Random(seed), reservoir
        self._samples: dict[_Stratum, list[_Kept]] = {}
        self._offered: dict[_Stratum, int] = {}
        self._worst: dict[tuple[int, str], _Kept] = {}
        self._seen = self._too_large = self._number = 0
        self._bytes = 0
        self._changed = True

    def wants(self, of: _Stratum) -> bool:
        """Return True if the sample takes a call of this stratum. Counts the call as offered, so ask once per call."""
        self._seen += 1
        self._offered[of] = offered = self._offered.get(of, 0) + 1
        # Reservoir sampling (Vitter's algorithm R): all calls of a stratum are equally likely to be kept.
        return offered <= self._reservoir or self._random.randrange(offered) < self._reservoir

    def wants_worst(self, layer: int, phase: str, relative_l1: float) -> bool:
        """Return True if this error is the largest so far in its layer and phase."""
        known = self._worst.get((layer, phase))
        return relative_l1 > 0 and (known is None or relative_l1 > (known.relative_l1 or 0.0))

    def add(
        self, call: AttentionCall, reference: Tensor, relative_l1: float | None = None,
        worst_at: tuple[int, int, int] = (0, 0, 0), first_head: int = 0, candidate: Tensor | None = None,
        prefix: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Keep a copy of a call: as the worst of its layer and phase if an error is given, or else as a sample.

        A call that is too large is cut to one sequence, and then to one kv head with its q heads; the condition of the kept
        sequence does not change. A sequence that is still too large is cut to some of its queries, from the first to the worst if
        they fit, with the keys that they see, as if its new tokens had ended there. Only if that is too large as well do the
        queries before count as cached prefix.

        Args:
            call: the call, of the layer and phase that its spec names.
            reference: the reference's output, [total_q, num_q_heads, head_dim_v].
            relative_l1: the candidate's largest relative L1, or None for a sample.
            worst_at: sequence, q head and query of the sequence to keep if the call is cut.
            first_head: the call's first q head's number in the model.
            candidate: the candidate's output in the same shape, or None if it did not compute the call.
            prefix: cached prefix of each sequence, if the call has only the last keys of some; by default the call's own.
        """
        outputs = {"reference": reference} if candidate is None else {"reference": reference, CANDIDATE: candidate}
        prefix = tuple(call.prefixes if prefix is None else prefix)
        kept = self._cut(call, outputs, prefix, relative_l1, worst_at, first_head)
        if kept is None:
            self._too_large += 1
            return
        if kept.chosen == "worst":
            self._release(self._worst.get((call.layer, call.phase)))
            self._worst[call.layer, call.phase] = kept
        else:
            alike = self._samples.setdefault(stratum(call.layer, call.phase, call.lens_q, prefix), [])
            if len(alike) == self._reservoir:
                self._release(alike.pop(self._random.randrange(self._reservoir)))
            alike.append(kept)
        self._bytes += kept.bytes
        self._changed = True
        self._evict()

    def flush(self) -> None:
        """Write the changes. At any moment the manifest on disk names only complete files.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        if not self._changed:
            return
        every = [*self._worst.values(), *(kept for alike in self._samples.values() for kept in alike)]
        entries = tuple(kept.entry or self._write(kept) for kept in every)
        manifest = PackManifest(source=self._source, seen=self._seen, too_large=self._too_large, calls=entries)
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
        # The hash distinguishes this file from those of an earlier pack in the folder.
        file = f"calls/{self._number:06d}-{digest[:8]}.safetensors"
        write_whole(self._folder / file, content, durable=False)
        kept.entry = PackEntry(
            file=file, sha256=digest, bytes=len(content), chosen=kept.chosen, relative_l1=kept.relative_l1,
            spec=kept.spec, new=kept.new, prefix=kept.prefix, first_query=kept.first_query,
        )  # fmt: skip
        kept.tensors = {}
        return kept.entry

    def _release(self, dropped: _Kept | None) -> None:
        self._bytes -= dropped.bytes if dropped else 0

    def _evict(self) -> None:
        """Drop calls until the budget is met: mild worst calls if they exceed their share, then calls of the largest stratum."""
        while sum(kept.bytes for kept in self._worst.values()) > _MAX_WORST_SHARE * self._budget:
            mildest = min(self._worst, key=lambda key: self._worst[key].relative_l1 or 0.0)
            self._release(self._worst.pop(mildest))
        while self._bytes > self._budget:
            largest = max(self._samples.values(), key=lambda alike: (len(alike), sum(kept.bytes for kept in alike)))
            self._release(largest.pop(self._random.randrange(len(largest))))

    def _cut(
        self, call: AttentionCall, outputs: dict[str, Tensor], prefix: tuple[int, ...], relative_l1: float | None,
        worst_at: tuple[int, int, int], first_head: int,
    ) -> _Kept | None:  # fmt: skip
        limit = max(_MAX_CALL_SHARE * self._budget, 2 * _OVERHEAD)
        first, count, heads = 0, len(prefix), slice(0, call.q.shape[1])
        tensors = _part(call, outputs, first, count, heads)
        if _size(tensors) > limit:
            first, count = worst_at[0], 1
            tensors = _part(call, outputs, first, count, heads)
        if _size(tensors) > limit:
            heads = call.heads.readers(call.heads.kv_head(worst_at[1]))
            tensors = _part(call, outputs, first, count, heads)
        limit = max(limit, _MAX_CUT_SHARE * self._budget)
        queries = None
        if _size(tensors) > limit and call.causal:
            length = call.lens_q[first]
            queries = _window(tensors, length, min(worst_at[2], length - 1), limit)
            tensors = tensors if queries is None else _cut_queries(tensors, length, queries)
        if _size(tensors) > limit:
            return None
        spec = call.with_spec(first_head=first_head + heads.start, padded_rows=0, sinks=call.spec.sinks[heads]).spec
        new, prefix = tuple(call.lens_q[first : first + count]), prefix[first : first + count]
        if queries is not None:
            new, prefix = (queries.stop - queries.start,), (prefix[0] + queries.start,)
        return _Kept(
            "sample" if relative_l1 is None else "worst", relative_l1, _size(tensors), new, prefix,
            spec, queries.start if queries else 0,
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
        )  # fmt: skip


def _part(call: AttentionCall, outputs: dict[str, Tensor], first: int, count: int, heads: slice) -> dict[str, Tensor]:
    """Take the tensors of some sequences and q heads of a call, as views."""
    cu_q, cu_k = (cu[first : first + count + 1] for cu in (call.cu_seqlens_q, call.cu_seqlens_k))
    rows_q, rows_k = (slice(int(cu[0]), int(cu[-1])) for cu in (cu_q, cu_k))
    kv = slice(call.heads.kv_head(heads.start), call.heads.kv_head(heads.stop))
    tensors = {
        name: tensor[:, heads if name == "q" else kv] if tensor.shape[1] > 1 else tensor
        for name, tensor in call.of_rows(rows_q, rows_k).items()
    } | {"cu_seqlens_q": cu_q - cu_q[0], "cu_seqlens_k": cu_k - cu_k[0]}
    return tensors | {name: out[rows_q, heads] for name, out in outputs.items()}


def _window(tensors: dict[str, Tensor], new: int, worst: int, limit: float) -> slice | None:
    """Choose the queries of the one sequence in `tensors` that fit with their keys, up to at least the worst one, if any fit."""

    def bytes_of(rows: int, *names: str) -> int:
        some = (tensors[name] for name in names if name in tensors and len(tensors[name]) == rows)
        return sum(tensor[0].numel() * tensor.element_size() for tensor in some)

    keys = len(tensors["k"])
    by_query, by_key = bytes_of(new, "q", "reference", CANDIDATE), bytes_of(keys, *BY_KEY)
    shared = bytes_of(1, *STORED)
    prefix = keys - new
    room = limit - _OVERHEAD - 64 - shared - prefix * by_key
    whole = int(room // (by_query + by_key))
    if whole > worst:
        return slice(0, min(whole, new))
    fitting = int((room - (worst + 1) * by_key) // by_query)
    return slice(worst + 1 - fitting, worst + 1) if fitting > 0 else None


def _cut_queries(tensors: dict[str, Tensor], new: int, queries: slice) -> dict[str, Tensor]:
    """Take some queries of the one sequence in `tensors`, and the keys that the last of them sees.

    Causal attention is right-aligned, so they get the same answers as in a separate call.
    """
    keys = len(tensors["k"]) - new + queries.stop
    rows = dict.fromkeys(("q", "reference", CANDIDATE), queries) | dict.fromkeys(BY_KEY, slice(keys))
    parts = {
        name: tensor[rows[name]] if len(tensor) > 1 else tensor for name, tensor in tensors.items() if name in rows
    }
    lens = {"cu_seqlens_q": queries.stop - queries.start, "cu_seqlens_k": keys}
    return parts | {name: cumulative([length], tensors[name].device) for name, length in lens.items()}


def _size(tensors: dict[str, Tensor]) -> int:
    return _OVERHEAD + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
