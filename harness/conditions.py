"""Conditions: the phases of attention, and the buckets into which requests, calls and queries are sorted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

PHASES = ("extend", "decode")
"""Prefill, with or without a cached prefix, and decode."""
CACHED_PREFIX_TOKENS = 16
"""A cached prefix counts from this many tokens: one alone is only the beginning-of-sequence token."""
MIN_CACHED_SHARE = 0.5
"""Share of the questions, prompts or shared tokens that must have come from the prefix cache to exercise that condition."""


@dataclass(frozen=True)
class Buckets:
    """A quantity, sorted into buckets.

    Attributes:
        id: stable name, kebab-case.
        title: what it is called in prose.
        starts: smallest value of each bucket, ascending; the last bucket is open.
    """

    id: str
    title: str
    starts: tuple[int, ...]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The buckets in words, in order: ``2-15``, ``>= 16``."""
        closed = zip(self.starts, self.starts[1:], strict=False)
        ranges = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in closed]
        return (*ranges, f">= {self.starts[-1]}")

    def index(self, value: int) -> int:
        """The bucket of a value, as an index into `labels`."""
        return max(0, bisect_right(self.starts, value) - 1)

    def label(self, value: int) -> str:
        """The bucket of a value, in words."""
        return self.labels[self.index(value)]


CACHED_PREFIX = Buckets("cached-prefix", "cached prefix", (0, 1, 2, CACHED_PREFIX_TOKENS))
"""A sequence's cached prefix, in tokens."""
POSITION = Buckets("position", "query position", (0, 1, 16, 64, 256))
"""A query's position among its sequence's new tokens."""
BATCH_SIZE = Buckets("batch-size", "batch size", (1, 2, 5, 9, 17))
"""Sequences in a batch."""
PROMPT_LENGTH = Buckets("prompt-length", "prompt length", (1, *(2**power + 1 for power in range(6, 21))))
"""A prompt's tokens."""
SEQUENCE_LENGTH = Buckets("sequence-length", "sequence length", (1, 64, 256, 1024, 4096))
"""All tokens of a sequence in a call, cached prefix included."""
PLACE = ("only", "first", "between", "last")
"""A sequence's place in its batch."""


def has_cached_prefix(prefixes: Sequence[int]) -> bool:
    """Whether a sequence of a call has a cached prefix of at least `CACHED_PREFIX_TOKENS` tokens."""
    return max(prefixes, default=0) >= CACHED_PREFIX_TOKENS


def has_any_prefix(prefixes: Sequence[int]) -> bool:
    """Whether a sequence of a call has a prefix at all; one token is enough for a mask to be misaligned."""
    return any(prefixes)


def condition_id(quantity: str, label: str) -> str:
    """Stable id of a condition: ``cached-prefix-at-least-16`` for the quantity ``cached-prefix`` and the label ``>= 16``."""
    return f"{quantity}-{label.replace('>= ', 'at-least-')}".replace(" ", "-")
