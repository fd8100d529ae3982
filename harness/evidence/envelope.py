"""The envelope: under which conditions calls were compared in the shadow, counted by phase, layer and condition.

Each process of a server writes one file, ``envelope/<pid>.json``, whenever the shadow writes its errors. Only calls whose outputs
were compared are counted. A call counts once for every bucket in which at least one of its sequences falls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from assay.evals.envelope_load import BATCH, DEPTH, longest
from assay.harness.conditions import BORDER, CACHED_PREFIX_TOKENS, CHUNK, ENVELOPE, MIX, PHASES
from assay.harness.config import RunSpec
from assay.harness.evidence.folder import REPEAT_RUN, RunFolder
from assay.harness.evidence.nonce import check_run
from assay.harness.evidence.records import ROLES
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

FOLDER = "envelope"


class EngineLimits(Record):
    """What an engine cannot exceed, as its process was configured.

    Attributes:
        chunk_tokens: most tokens that are prefilled at once; None for no limit.
        context_tokens: longest sequence.
        page_tokens: page size of the KV pool.
        batch: most sequences in a decode batch; None if not known.
        prefix_cache: whether prefixes are cached.
        mixed: whether an extend call may hold sequences in decode (``--enable-mixed-chunk``).
    """

    chunk_tokens: int | None = None
    context_tokens: int
    page_tokens: int = 1
    batch: int | None = None
    prefix_cache: bool = True
    mixed: bool = False


class EnvelopeCounts(Record):
    """The calls that a server's processes compared, by condition.

    Attributes:
        run: nonce of the run.
        limits: the engine's limits; None in an empty count.
        calls: phase -> id of a condition -> label -> layer -> calls. Labels without calls are left out.
        largest: phase -> id of a condition -> layer -> the largest value in a call, such as tokens.
    """

    run: str = ""
    limits: EngineLimits | None = None
    calls: dict[str, dict[str, dict[str, dict[int, int]]]] = Field(default_factory=dict)
    largest: dict[str, dict[str, dict[int, int]]] = Field(default_factory=dict)

    def layers(self, phase: str) -> list[int]:
        """Layers of which a call of this phase was compared, ascending."""
        batches = self.calls.get(phase, {}).get("batch", {})
        return sorted({layer for by_layer in batches.values() for layer in by_layer})

    def count(self, phase: str, quantity: str, label: str) -> int:
        """Calls of a phase under a condition, in the layer that has the fewest of them."""
        by_layer = self.calls.get(phase, {}).get(quantity, {}).get(label, {})
        return min((by_layer.get(layer, 0) for layer in self.layers(phase)), default=0)

    def reached(self, phase: str, quantity: str) -> int:
        """The largest value of a condition that every layer met; 0 where nothing was compared."""
        by_layer = self.largest.get(phase, {}).get(quantity, {})
        return min((by_layer.get(layer, 0) for layer in self.layers(phase)), default=0)


def write_envelope(path: Path, counts: EnvelopeCounts) -> None:
    """Replace the file of a process.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, counts.model_dump_json(), durable=False)


def read_envelope(server: Path, nonce: str = "") -> EnvelopeCounts | None:
    """What all processes of a server counted; None if none wrote anything.

    Processes that share the heads of a layer (tensor parallelism) see the same calls, so the smallest of their counts holds.

    Args:
        server: the server's folder (``ASSAY_EVIDENCE``).
        nonce: the run's, which every file must carry; empty to check nothing.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    found = []
    for path in sorted((server / FOLDER).glob("*.json")):
        counts = read_json(path, EnvelopeCounts, REPEAT_RUN)
        check_run(path, counts.run, nonce)
        found.append(counts)
    return _merged(found) if found else None


def envelope_of(folder: RunFolder) -> EnvelopeCounts | None:
    """What was counted in a run, whichever server the shadow ran in; None without a layer diff.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    found = (read_envelope(folder.server_folder(role), folder.nonce) for role in ROLES)
    return next((counts for counts in found if counts is not None), None)


def _merged(found: list[EnvelopeCounts]) -> EnvelopeCounts:
    calls: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
    largest: dict[str, dict[str, dict[int, int]]] = {}
    for phase in {phase for one in found for phase in one.calls}:
        here = [one for one in found if phase in one.calls]
        owners = {
            layer: [one for one in here if layer in one.layers(phase)] for one in here for layer in one.layers(phase)
        }
        for layer, counting in owners.items():
            for quantity, label in {
                (q, label) for one in counting for q, labels in one.calls[phase].items() for label in labels
            }:
                fewest = min(_at(one.calls[phase].get(quantity, {}).get(label, {}), layer) for one in counting)
                if fewest:
                    calls.setdefault(phase, {}).setdefault(quantity, {}).setdefault(label, {})[layer] = fewest
            for quantity in {q for one in counting for q in one.largest.get(phase, {})}:
                least = min(_at(one.largest.get(phase, {}).get(quantity, {}), layer) for one in counting)
                largest.setdefault(phase, {}).setdefault(quantity, {})[layer] = least
    return EnvelopeCounts(run=found[0].run, limits=found[0].limits, calls=calls, largest=largest)


def _at(by_layer: Mapping[int, int], layer: int) -> int:
    return by_layer.get(layer, 0)


@dataclass(frozen=True)
class Envelope:
    """How far a policy wants calls to be compared.

    Attributes:
        tokens: new tokens, cached prefix and total length.
        batch: sequences of a batch.
        depth: tokens that a request has generated, where decode is compared.
    """

    tokens: int
    batch: int
    depth: int

    @classmethod
    def of(cls, spec: RunSpec) -> Envelope:
        """The envelope of a run's policy."""
        return cls(spec.envelope, BATCH[spec.device], DEPTH[spec.device])

    def goals(self, limits: EngineLimits) -> dict[str, dict[str, int]]:
        """Phase -> id of a condition -> the value that a call must reach, as far as the engine can."""
        length = longest(self.tokens, limits.context_tokens, self.depth)
        both = {"total-tokens": length, "batch": self.batch}
        prefix = length // limits.page_tokens * limits.page_tokens
        extend = both | {"new-tokens": min(length, limits.chunk_tokens or length), "prefix-tokens": prefix}
        return {"extend": extend, "decode": both | {"depth": self.depth}}

    def kinds(self, limits: EngineLimits) -> dict[str, dict[str, tuple[str, ...]]]:
        """Phase -> id of a condition -> the labels of which a call is wanted, of all buckets up to the goals and of all kinds.

        What an engine cannot do is left out: a prefix shorter than a page, chunks longer than the envelope, mixed batches.
        """
        goals = self.goals(limits)
        found = {
            phase: {
                quantity: ENVELOPE[quantity].labels[: _bucket(quantity, value) + 1]
                for quantity, value in values.items()
            }
            for phase, values in goals.items()
        }
        extend = found["extend"]
        if limits.page_tokens >= CACHED_PREFIX_TOKENS:
            extend["prefix-tokens"] = tuple(label for label in extend["prefix-tokens"] if label != "1-15")
        chunked = limits.chunk_tokens is not None and limits.chunk_tokens <= goals["extend"]["total-tokens"]
        extend["chunk"] = CHUNK.labels[: 1 + chunked]
        extend["mix"] = MIX.labels if limits.mixed else MIX.labels[:-1]
        for phase in PHASES:
            found[phase] |= {"border": BORDER.labels}
            # A prompt or an answer of a single token is not wanted: no request of a load is that short.
            for quantity in {"new-tokens", "total-tokens"} & set(found[phase]):
                found[phase][quantity] = found[phase][quantity][1:]
        return found

    def missing(self, counts: EnvelopeCounts, phases: Collection[str]) -> list[Missing]:
        """The conditions under which some layer compared no call, in the phases that a candidate claims."""
        if counts.limits is None:
            return [Missing(phase, "batch", "any") for phase in phases]
        goals, kinds = self.goals(counts.limits), self.kinds(counts.limits)
        found = []
        for phase in (phase for phase in PHASES if phase in phases):
            for quantity, labels in kinds[phase].items():
                found += [Missing(phase, quantity, one) for one in labels if not counts.count(phase, quantity, one)]
            for quantity, value in goals[phase].items():
                if counts.reached(phase, quantity) < value:
                    found.append(Missing(phase, quantity, f"up to {value:,}"))
        return found


class Missing(NamedTuple):
    """A condition under which some layer compared no call: a phase, the condition's id, and what is missing of it."""

    phase: str
    quantity: str
    label: str


def _bucket(quantity: str, value: int) -> int:
    return ENVELOPE[quantity].index(value)
