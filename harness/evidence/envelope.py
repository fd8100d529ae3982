"""The envelope: under which conditions calls were compared in the shadow, counted by phase, layer and condition.

Each process of a server writes one file, ``envelope/<pid>.json``, whenever the shadow writes its errors. Only calls whose outputs
were compared are counted. A call counts once for every bucket in which at least one of its sequences falls; what decides are the
lengths themselves, of which every one is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import Field

from assay.evals.envelope_load import BATCH, DEPTH, LoadReach, blocks_of, inner_lengths, longest
from assay.harness.conditions import BATCHES, BORDER, BORDER_TOKENS, CHUNK, DEPTHS, ENVELOPE, MIX, PHASES, PREFIXES
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.run_file import RunFile, RunRecord
from assay.harness.schema import Record
from assay.harness.sides import ROLES, Device

Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges of whole numbers, ascending; both ends belong to a range, and between two ranges a number is missing."""


def ranges_of(lengths: Iterable[int]) -> Ranges:
    """Group the lengths into ranges."""
    ordered = sorted(set(lengths))
    if not ordered:
        return ()
    ends = [(length, following) for length, following in pairwise(ordered) if following != length + 1]
    return tuple(zip([ordered[0], *(b for _, b in ends)], [*(a for a, _ in ends), ordered[-1]], strict=True))


def _in_all(sets: Sequence[Ranges]) -> Ranges:
    """Intersect the sets of lengths; none of no set."""
    common = [_lengths(lengths) for lengths in sets]
    return ranges_of(set.intersection(*common)) if common else ()


def stood_for(met: Ranges, wanted: Sequence[int], step: int = 1) -> Ranges:
    """Return the lengths that were met, and those that they stand for.

    A block of `BORDER_TOKENS` lengths was met where all its `wanted` ones were, between which lies no border, and another one.

    Args:
        met: lengths of calls.
        wanted: the border points of the lengths that calls should have, ascending.
        step: what calls have are multiples of it.
    """
    known = _lengths(met)
    covered = set(known)
    for block in blocks_of(wanted):
        points = [length for length in wanted if (length - 1) // BORDER_TOKENS == block]
        inner = inner_lengths(block, wanted, step)
        if known.issuperset(points) and (not inner or known.intersection(inner)):
            covered.update(inner_lengths(block, wanted))
    return ranges_of(covered)


def gaps(met: Ranges, wanted: Sequence[int], step: int = 1) -> Ranges:
    """Find the lengths between the first and the last wanted one for which no length that was met stands; see `stood_for`."""
    if not wanted:
        return ()
    return ranges_of(set(range(wanted[0], wanted[-1] + 1)) - _lengths(stood_for(met, wanted, step)))


def _lengths(ranges: Ranges) -> set[int]:
    return {length for first, last in ranges for length in range(first, last + 1)}


FOLDER = "envelope"
Missing = tuple[str, str, Ranges | int | str]
"""What some layer did not compare: a phase, the id of a condition, and its lengths, the value to reach, or the label of a kind."""


class EngineLimits(Record):
    """The limits of an engine, as its process was configured.

    Attributes:
        chunk_tokens: most tokens that are prefilled at once; None for no limit.
        context_tokens: longest sequence.
        page_tokens: page size of the KV pool.
        batch: most sequences in a decode batch; None if not known.
        prefix_cache: whether prefixes are cached.
        mixed: whether an extend call may hold sequences in decode (``--enable-mixed-chunk``).
        graphs: phase -> how its CUDA graphs were captured: "full", "breakable", "disabled" and the like. Empty where there are no
            CUDA graphs.
    """

    chunk_tokens: int | None = None
    context_tokens: int
    page_tokens: int = 1
    batch: int | None = None
    prefix_cache: bool = True
    mixed: bool = False
    graphs: dict[str, str] = Field(default_factory=dict)

    def step(self, quantity: str) -> int:
        """Return what the lengths of a condition are multiples of: a prefix comes from the cache in pages."""
        return self.page_tokens if quantity == "prefix-tokens" else 1


class EnvelopeCounts(RunRecord):
    """The calls that were compared, by condition.

    Attributes:
        limits: the engine's limits; None in an empty count.
        calls: phase -> id of a condition -> label -> layer -> calls. Labels without calls are left out.
        met: phase -> id of a condition that is a number, such as tokens -> layer -> its values.
    """

    limits: EngineLimits | None = None
    calls: dict[str, dict[str, dict[str, dict[int, int]]]] = Field(default_factory=dict)
    met: dict[str, dict[str, dict[int, Ranges]]] = Field(default_factory=dict)

    def layers(self, phase: str) -> list[int]:
        """Return the layers of which a call of this phase was compared, ascending."""
        batches = self.calls.get(phase, {}).get("batch", {})
        return sorted({layer for by_layer in batches.values() for layer in by_layer})

    def count(self, phase: str, quantity: str, label: str) -> int:
        """Count the calls of a phase under a condition, in the layer that has the fewest of them."""
        by_layer = self.calls.get(phase, {}).get(quantity, {}).get(label, {})
        return min((by_layer.get(layer, 0) for layer in self.layers(phase)), default=0)

    def values(self, phase: str, quantity: str) -> Ranges:
        """Return the values of a condition that every layer met."""
        by_layer = self.met.get(phase, {}).get(quantity, {})
        return _in_all([by_layer.get(layer, ()) for layer in self.layers(phase)])

    def reached(self, phase: str, quantity: str) -> int:
        """Return the largest value of a condition that every layer met; 0 where nothing was compared."""
        return max((last for _, last in self.values(phase, quantity)), default=0)


ENVELOPE_FILES = RunFile(f"{FOLDER}/*.json", EnvelopeCounts, durable=False)


def read_envelope(server: Path, nonce: str = "") -> EnvelopeCounts | None:
    """Sum what all processes of a server counted; None if none wrote anything.

    Processes that share the heads of a layer (tensor parallelism) see the same calls, so the smallest of their counts holds.

    Args:
        server: the server's folder (``ASSAY_EVIDENCE``).
        nonce: the run's, which every file must carry; empty to check nothing.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    by_process = list(ENVELOPE_FILES.read_each(server, nonce).values())
    return _merged(by_process) if by_process else None


def envelope_of(folder: RunFolder) -> EnvelopeCounts | None:
    """Read what was counted in a run, whichever server the shadow ran in; None without a layer diff.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    by_server = (read_envelope(folder.server_folder(role), folder.nonce) for role in ROLES)
    return next((counts for counts in by_server if counts is not None), None)


def _merged(parts: list[EnvelopeCounts]) -> EnvelopeCounts:
    calls: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
    met: dict[str, dict[str, dict[int, Ranges]]] = {}
    for phase in {phase for counts in parts for phase in counts.calls}:
        here = [counts for counts in parts if phase in counts.calls]
        owners = {
            layer: [counts for counts in here if layer in counts.layers(phase)]
            for each in here
            for layer in each.layers(phase)
        }
        for layer, counting in owners.items():
            for quantity, label in {
                (q, label) for counts in counting for q, labels in counts.calls[phase].items() for label in labels
            }:
                fewest = min(counts.calls[phase].get(quantity, {}).get(label, {}).get(layer, 0) for counts in counting)
                if fewest:
                    calls.setdefault(phase, {}).setdefault(quantity, {}).setdefault(label, {})[layer] = fewest
        for quantity in {quantity for counts in here for quantity in counts.met.get(phase, {})}:
            met.setdefault(phase, {})[quantity] = {
                layer: _in_all([counts.met.get(phase, {}).get(quantity, {}).get(layer, ()) for counts in counting])
                for layer, counting in owners.items()
            }
    return EnvelopeCounts(run=parts[0].run, limits=parts[0].limits, calls=calls, met=met)


@dataclass(frozen=True)
class Envelope:
    """The conditions under which a policy wants calls to be compared.

    Attributes:
        tokens: new tokens, cached prefix and total length.
        batch: sequences of a batch.
        depth: tokens that a request has generated, where decode is compared.
    """

    tokens: int
    batch: int
    depth: int

    @classmethod
    def of(cls, tokens: int, device: Device) -> Envelope:
        """Return the envelope of so many tokens on a device."""
        return cls(tokens, BATCH[device], DEPTH[device])

    def reach(self, limits: EngineLimits) -> LoadReach:
        """Compute how far an engine can be taken into it."""
        tokens = longest(self.tokens, limits.context_tokens, self.depth)
        return LoadReach(tokens, limits.context_tokens, limits.chunk_tokens, limits.page_tokens, self.depth)

    def kinds(self, limits: EngineLimits) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return phase -> id of a condition -> the labels of which a call is wanted. What an engine cannot do is left out."""
        reach = self.reach(limits)
        wanted = {
            phase: {
                quantity: tuple(dict.fromkeys(ENVELOPE[quantity].label(point) for point in points))
                for quantity, points in lengths.items()
            }
            for phase, lengths in reach.lengths.items()
        }
        wanted["extend"]["prefix-tokens"] = (PREFIXES.label(0), *wanted["extend"]["prefix-tokens"])
        wanted["extend"]["chunk"] = CHUNK.labels[: 1 + reach.is_split + reach.has_full_later_chunk]
        wanted["extend"]["mix"] = MIX.labels if limits.mixed else MIX.labels[:-1]
        for phase in PHASES:
            wanted[phase] |= {"batch": BATCHES.up_to(self.batch), "border": BORDER.labels}
        wanted["decode"]["depth"] = DEPTHS.up_to(self.depth)
        return wanted

    def gaps(self, counts: EnvelopeCounts, phases: Collection[str]) -> list[Missing]:
        """List the lengths that some layer did not compare, in the phases that a candidate claims."""
        if counts.limits is None:
            return [(phase, "total-tokens", ()) for phase in phases]
        lengths = self.reach(counts.limits).lengths
        return [
            (phase, quantity, lacking)
            for phase in PHASES
            if phase in phases
            for quantity, wanted in lengths[phase].items()
            if (lacking := gaps(counts.values(phase, quantity), wanted, counts.limits.step(quantity)))
        ]

    def missing(self, counts: EnvelopeCounts, phases: Collection[str]) -> list[Missing]:
        """List what some layer did not compare, in the phases that a candidate claims: `gaps`, and conditions without a call."""
        lacking = self.gaps(counts, phases)
        if counts.limits is None:
            return lacking
        lengths, kinds = self.reach(counts.limits).lengths, self.kinds(counts.limits)
        for phase in (phase for phase in PHASES if phase in phases):
            for quantity, labels in kinds[phase].items():
                if quantity not in lengths[phase]:
                    lacking += [
                        (phase, quantity, label) for label in labels if not counts.count(phase, quantity, label)
                    ]
            for quantity, value in {"batch": self.batch, "depth": self.depth}.items():
                if quantity in kinds[phase] and counts.reached(phase, quantity) < value:
                    lacking.append((phase, quantity, value))
        return lacking
