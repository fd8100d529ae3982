"""The envelope: the conditions under which the shadow compared calls, counted by phase, layer and condition.

Each server process writes one file, ``envelope/<pid>.json``, whenever the shadow writes its errors. Only calls whose outputs were
compared are counted. A call counts once for every bucket that at least one of its sequences falls into. Decisions use the lengths
themselves, all of which are kept.
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
"""Disjoint ranges of integers, ascending. Both ends are included, and at least one integer lies between two ranges."""


def ranges_of(lengths: Iterable[int]) -> Ranges:
    """Group the lengths into ranges."""
    ordered = sorted(set(lengths))
    if not ordered:
        return ()
    ends = [(length, following) for length, following in pairwise(ordered) if following != length + 1]
    return tuple(zip([ordered[0], *(b for _, b in ends)], [*(a for a, _ in ends), ordered[-1]], strict=True))


def _in_all(sets: Sequence[Ranges]) -> Ranges:
    """Intersect sets of lengths, or return no lengths if there are no sets."""
    common = [_lengths(lengths) for lengths in sets]
    return ranges_of(set.intersection(*common)) if common else ()


def stood_for(met: Ranges, wanted: Sequence[int], step: int = 1) -> Ranges:
    """Return the lengths that were met, and those that they stand for.

    A block of `BORDER_TOKENS` lengths counts as met if all its `wanted` lengths were, with no border between them, and one more.

    Args:
        met: lengths of calls.
        wanted: the border points of the lengths that calls should have, ascending.
        step: the lengths of calls are multiples of it.
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
    """Find the lengths between the first and last wanted ones that no met length stands for; see `stood_for`."""
    if not wanted:
        return ()
    return ranges_of(set(range(wanted[0], wanted[-1] + 1)) - _lengths(stood_for(met, wanted, step)))


def _lengths(ranges: Ranges) -> set[int]:
    return {length for first, last in ranges for length in range(first, last + 1)}


FOLDER = "envelope"
Missing = tuple[str, str, Ranges | int | str]
"""A gap of some layer: a phase, a condition's id, and the lengths, the value to reach, or the label that was not compared."""


class EngineLimits(Record):
    """The limits of an engine, as its process was configured.

    Attributes:
        chunk_tokens: most tokens prefilled at once, or None without a limit.
        context_tokens: longest sequence.
        page_tokens: page size of the KV pool.
        batch: most sequences in a decode batch, or None if unknown.
        prefix_cache: whether prefixes are cached.
        mixed: whether an extend call may contain sequences in decode (``--enable-mixed-chunk``).
        graphs: phase -> how its CUDA graphs were captured: "full", "breakable", "disabled" and the like. Empty without CUDA graphs.
    """

    chunk_tokens: int | None = None
    context_tokens: int
    page_tokens: int = 1
    batch: int | None = None
    prefix_cache: bool = True
    mixed: bool = False
    graphs: dict[str, str] = Field(default_factory=dict)

    def step(self, quantity: str) -> int:
        """Return the unit of a condition's lengths: prefixes come from the cache in whole pages."""
        return self.page_tokens if quantity == "prefix-tokens" else 1


class EnvelopeCounts(RunRecord):
    """The calls that were compared, by condition.

    Attributes:
        limits: the engine's limits, or None in an empty count.
        calls: phase -> condition id -> label -> layer -> calls. Labels without calls are left out.
        met: phase -> id of a numeric condition, such as tokens -> layer -> its values.
    """

    limits: EngineLimits | None = None
    calls: dict[str, dict[str, dict[str, dict[int, int]]]] = Field(default_factory=dict)
    met: dict[str, dict[str, dict[int, Ranges]]] = Field(default_factory=dict)

    def layers(self, phase: str) -> list[int]:
        """Return the layers with a compared call in this phase, ascending."""
        batches = self.calls.get(phase, {}).get("batch", {})
        return sorted({layer for by_layer in batches.values() for layer in by_layer})

    def count(self, phase: str, quantity: str, label: str) -> int:
        """Count the calls of a phase under a condition, in the layer with the fewest."""
        by_layer = self.calls.get(phase, {}).get(quantity, {}).get(label, {})
        return min((by_layer.get(layer, 0) for layer in self.layers(phase)), default=0)

    def values(self, phase: str, quantity: str) -> Ranges:
        """Return the values of a condition that every layer met."""
        by_layer = self.met.get(phase, {}).get(quantity, {})
        return _in_all([by_layer.get(layer, ()) for layer in self.layers(phase)])

    def reached(self, phase: str, quantity: str) -> int:
        """Return the largest value of a condition that every layer met, or 0 if nothing was compared."""
        return max((last for _, last in self.values(phase, quantity)), default=0)


ENVELOPE_FILES = RunFile(f"{FOLDER}/*.json", EnvelopeCounts, durable=False)


def read_envelope(server: Path, nonce: str = "") -> EnvelopeCounts | None:
    """Sum the counts of all processes of a server, or return None if they wrote nothing.

    Processes that share the heads of a layer (tensor parallelism) see the same calls, so the smallest of their counts is used.

    Args:
        server: the server's folder (``ASSAY_EVIDENCE``).
        nonce: the run's nonce, which every file must carry, or empty to accept any.

    Raises:
        EvidenceError: a file is damaged, or of another run.
    """
    by_process = list(ENVELOPE_FILES.read_each(server, nonce).values())
    return _merged(by_process) if by_process else None


def envelope_of(folder: RunFolder) -> EnvelopeCounts | None:
    """Read a run's counts from the server that the shadow ran in, or return None without a layer diff.

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
        batch: sequences in a batch.
        depth: tokens that a request has generated when decode is compared.
    """

    tokens: int
    batch: int
    depth: int

    @classmethod
    def of(cls, tokens: int, device: Device) -> Envelope:
        """Return the envelope for `tokens` tokens on a device."""
        return cls(tokens, BATCH[device], DEPTH[device])

    def reach(self, limits: EngineLimits) -> LoadReach:
        """Compute how much of the envelope an engine can reach."""
        tokens = longest(self.tokens, limits.context_tokens, self.depth)
        return LoadReach(tokens, limits.context_tokens, limits.chunk_tokens, limits.page_tokens, self.depth)

    def kinds(self, limits: EngineLimits) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return phase -> condition id -> the labels that need a call, without those that the engine cannot reach."""
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
        """List the lengths that some layer did not compare in the phases that a candidate claims."""
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
        """List all that some layer did not compare in the phases that a candidate claims: `gaps`, and conditions without calls."""
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
