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
        title: name in prose.
        starts: smallest value of each bucket, ascending; the last bucket is open.
    """

    id: str
    title: str
    starts: tuple[int, ...]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of the buckets, in order: ``2-15``, ``>= 16``."""
        closed = zip(self.starts, self.starts[1:], strict=False)
        ranges = [str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in closed]
        return (*ranges, f">= {self.starts[-1]}")

    def index(self, value: int) -> int:
        """Return the bucket of a value, as an index into `labels`."""
        return max(0, bisect_right(self.starts, value) - 1)

    def label(self, value: int) -> str:
        """Return the label of a value's bucket."""
        return self.labels[self.index(value)]

    def up_to(self, value: int) -> tuple[str, ...]:
        """Return the labels of all buckets up to a value's bucket."""
        return self.labels[: self.index(value) + 1]


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


@dataclass(frozen=True)
class _Kinds:
    """A quality of a call, with a label for each kind. Attributes as in `Buckets`."""

    id: str
    title: str
    labels: tuple[str, ...]

    def index(self, value: int) -> int:
        """Return the kind with this number, as an index into `labels`."""
        return value

    def label(self, value: int) -> str:
        """Return the label of the kind with this number."""
        return self.labels[value]


BORDER_TOKENS = 64
"""Every page size of SGLang's backends divides it, and most kernels compute blocks of 64 or 128 keys."""
CHUNK = _Kinds("chunk", "chunked prefill", ("whole or first chunk", "later chunk", "later chunk of full length"))
"""Whether an extend call continues a prompt that was too long for one prefill, and whether it does so with a full chunk."""
BORDER = _Kinds(
    "border", f"end against a border of {BORDER_TOKENS} tokens", ("elsewhere", "one before", "on it", "one after")
)
"""Where a sequence ends relative to the borders of pages and blocks."""
MIX = _Kinds(
    "mix", "sequences of an extend call", ("no prefix", "all with a prefix", "some with a prefix", "extend and decode")
)
"""The kinds of sequences in one extend call; SGLang makes "extend and decode" with ``--enable-mixed-chunk``."""
_TOKENS = (1, 2, 17, 129, 513, 2049, 8193)
PREFIXES = Buckets("prefix-tokens", "cached prefix", (0, 1, CACHED_PREFIX_TOKENS, *_TOKENS[3:]))
"""A sequence's cached prefix as an envelope counts it, in tokens."""
BATCHES = Buckets("batch", "batch size", (1, 2, 9, 33, 129))
"""Sequences of a call as an envelope counts them."""
DEPTHS = Buckets("depth", "decode depth", (1, 2, 9, 33, 129, 513, 2049))
"""Tokens that a request has generated."""
ENVELOPE: dict[str, Buckets | _Kinds] = {
    quantity.id: quantity
    for quantity in (
        Buckets("new-tokens", "new tokens", _TOKENS),
        Buckets("new-behind-prefix", "new tokens after a cached prefix", _TOKENS),
        PREFIXES,
        Buckets("total-tokens", "total length", _TOKENS),
        BATCHES,
        CHUNK,
        BORDER,
        MIX,
        DEPTHS,
    )
}
"""The conditions that an envelope counts, by id: of the sequences of a call (lengths, chunk, border, depth) or of the call."""
ENVELOPE_OF = {
    "extend": (
        "new-tokens",
        "new-behind-prefix",
        "prefix-tokens",
        "total-tokens",
        "batch",
        "chunk",
        "border",
        "mix",
    ),
    "decode": ("total-tokens", "batch", "border", "depth"),
}
"""Ids of the conditions that are counted in each phase. New tokens are counted separately for sequences without and with a cached
prefix."""


def border_of(total: int) -> int:
    """Return where a sequence of this length ends relative to the borders, as an index into `BORDER`."""
    return {BORDER_TOKENS - 1: 1, 0: 2, 1: 3}.get(total % BORDER_TOKENS, 0)


def has_cached_prefix(prefixes: Sequence[int]) -> bool:
    """Return True if a sequence of a call has a cached prefix of at least `CACHED_PREFIX_TOKENS` tokens."""
    return max(prefixes, default=0) >= CACHED_PREFIX_TOKENS


def has_any_prefix(prefixes: Sequence[int]) -> bool:
    """Return True if a sequence of a call has any prefix: one token is enough to misalign a mask."""
    return any(prefixes)


def condition_id(quantity: str, label: str) -> str:
    """Return a condition's stable id: ``cached-prefix-at-least-16`` for the quantity ``cached-prefix`` and the label ``>= 16``."""
    return f"{quantity}-{label.replace('>= ', 'at-least-')}".replace(" ", "-")
