"""The envelope: under which conditions calls were compared in the shadow, counted by phase, layer and condition.

Each process of a server writes one file, ``envelope/<pid>.json``, whenever the shadow writes its errors. Only calls whose outputs
were compared are counted. A call counts once for every bucket in which at least one of its sequences falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from assay.harness.conditions import BORDER, CACHED_PREFIX_TOKENS, CHUNK, ENVELOPE, MIX
from assay.harness.evidence.folder import REPEAT_RUN
from assay.harness.evidence.nonce import check_run
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


def wanted(limits: EngineLimits, tokens: int, batch: int, depth: int) -> dict[str, dict[str, tuple[str, ...]]]:
    """The conditions that an envelope consists of: phase -> id of a condition -> labels of which a call must have been compared.

    What an engine cannot do is left out: chunks and lengths beyond its limits, a prefix shorter than a page, mixed batches.

    Args:
        limits: the engine's.
        tokens: new tokens, cached prefix and total length up to which calls are wanted.
        batch: sequences up to which batches are wanted.
        depth: generated tokens up to which decode calls are wanted.
    """
    length = min(tokens, limits.context_tokens)
    new = min(length, limits.chunk_tokens or length)
    chunked = limits.chunk_tokens is not None and limits.chunk_tokens < limits.context_tokens - 1
    prefix = [
        label
        for label in up_to("prefix-tokens", length)
        if label != "1-15" or limits.page_tokens < CACHED_PREFIX_TOKENS
    ]
    extend = {
        "new-tokens": tuple(label for label in up_to("new-tokens", new) if label != "1"),
        "prefix-tokens": tuple(prefix),
        "total-tokens": up_to("total-tokens", length)[1:],
        "batch": up_to("batch", batch),
        "chunk": CHUNK.labels[: 1 + chunked],
        "border": BORDER.labels,
        "mix": tuple(label for label in MIX.labels if label != "extend and decode" or limits.mixed),
    }
    decode = {
        "total-tokens": up_to("total-tokens", length)[1:],
        "batch": up_to("batch", batch),
        "border": BORDER.labels,
        "depth": up_to("depth", depth),
    }
    return {"extend": extend, "decode": decode}


def up_to(quantity: str, value: int) -> tuple[str, ...]:
    """The labels of a condition from its smallest bucket to the one that holds `value`."""
    buckets = ENVELOPE[quantity]
    return buckets.labels[: buckets.index(value) + 1]
