"""Counts calls by the conditions of an envelope: calls that a shadow compared, and calls that a server answered.

The conditions of a pass are looked up once and shared by its layers, so a call costs one addition per condition that it meets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from assay.harness.conditions import CHUNK, ENVELOPE, ENVELOPE_OF, MIX, Buckets, border_of
from assay.harness.evidence.envelope import EngineLimits, EnvelopeCounts, Ranges, ranges_of

_FIRST, _LATER, _FULL = range(len(CHUNK.labels))

Values = Mapping[str, Sequence[int]]
"""Condition id -> its values in a pass: one per sequence, or one for the call."""


class EnvelopeCounting:
    """The counts of a process."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._calls: Counter[tuple[str, str, int, int]] = Counter()
        self._met: defaultdict[tuple[str, str, int], set[int]] = defaultdict(set)
        self._prefilled: set[str] = set()
        self._decoded: Counter[str] = Counter()

    def extend(
        self, new: Sequence[int], prefix: Sequence[int], requests: Sequence[str], *, mixed: bool = False
    ) -> Values:
        """Record a pass of the extend phase, and return its conditions.

        Args:
            requests: the engine's request id per sequence.
            mixed: whether some sequences may be in decode.
        """
        later = [rid in self._prefilled and p > 0 for rid, p in zip(requests, prefix, strict=True)]
        # In a mixed call, a sequence with one new token that was prefilled before is in decode, not a chunk.
        decoding = [mixed and n == 1 and seen for n, seen in zip(new, later, strict=True)]
        self._prefilled.update(requests)
        chunks = [_LATER if seen and not decodes else _FIRST for seen, decodes in zip(later, decoding, strict=True)]
        full = [_FULL for n, chunk in zip(new, chunks, strict=True) if chunk and n == self._limits.chunk_tokens]
        return {
            **_lengths(new, prefix),
            "new-tokens": [n for n, p in zip(new, prefix, strict=True) if not p],
            "new-behind-prefix": [n for n, p in zip(new, prefix, strict=True) if p],
            "prefix-tokens": prefix,
            "chunk": [*chunks, *full],
            "mix": [MIX.labels.index(_mix(prefix, any(decoding)))],
        }

    def decode(self, prefix: Sequence[int], requests: Sequence[str]) -> Values:
        """Record a pass of the decode phase, and return its conditions. For arguments, see `extend`."""
        self._decoded.update(requests)
        return {
            **_lengths([1] * len(prefix), prefix),
            "depth": [self._decoded[request] for request in requests],
        }

    def count(self, phase: str, layer: int, values: Values) -> None:
        """Count a call of a pass."""
        for quantity in ENVELOPE_OF[phase]:
            buckets = ENVELOPE[quantity]
            for index in {buckets.index(value) for value in values[quantity]}:
                self._calls[phase, quantity, index, layer] += 1
            if isinstance(buckets, Buckets):
                self._met[phase, quantity, layer].update(values[quantity])

    def counts(self, run: str) -> EnvelopeCounts:
        """Return all counts, for a run's nonce."""
        calls: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
        for (phase, quantity, index, layer), number in self._calls.items():
            label = ENVELOPE[quantity].labels[index]
            calls.setdefault(phase, {}).setdefault(quantity, {}).setdefault(label, {})[layer] = number
        met: dict[str, dict[str, dict[int, Ranges]]] = {}
        for (phase, quantity, layer), values in self._met.items():
            met.setdefault(phase, {}).setdefault(quantity, {})[layer] = ranges_of(values)
        return EnvelopeCounts(run=run, limits=self._limits, calls=calls, met=met)


def _lengths(new: Sequence[int], prefix: Sequence[int]) -> dict[str, Sequence[int]]:
    total = [n + p for n, p in zip(new, prefix, strict=True)]
    return {
        "total-tokens": total,
        "batch": [len(new)],
        "border": [border_of(length) for length in total],
    }


def _mix(prefix: Sequence[int], decoding: bool) -> str:
    if decoding:
        return "extend and decode"
    if not any(prefix):
        return "no prefix"
    return "all with a prefix" if all(prefix) else "some with a prefix"
