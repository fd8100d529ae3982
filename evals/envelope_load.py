"""The load of the envelope: few requests whose calls have every block count, cached and new, up to a length.

Kernels compute in blocks, and a faulty kernel is wrong for some numbers of blocks, or at block borders. So a load must have, from
every block of 64 tokens, the first, the second to last and the last length (`_border_points`). The seed draws further lengths
between them, and sizes of batches. Each run has its own seed.

Prompts are token ids (see `assay.evals.loads`). One long prompt is cached first. Every other prompt begins with those of its tokens
that shall come from the cache, so each request covers one number of cached tokens and one of new tokens; together they make up the
envelope's length. If a kernel fails from some number of new tokens and some number of cached tokens on, one of these pairs exceeds
both, unless they leave less than a block of the envelope. The requests of a wave are sent together. A wave has at most as many new
tokens as are prefilled at once, because otherwise the engine would split prompts in unknown places.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from assay.evals.loads import random_tokens
from assay.harness.conditions import BORDER_TOKENS

BATCH = {"cpu": 9, "cuda": 17}
"""Number of sequences that a batch must have, by device."""
DEPTH = {"cpu": 9, "cuda": 33}
"""Tokens that a request must generate if the candidate claims decode, by device."""
# Distance from a border, in tokens, of the end of a prompt that crosses it during decode, and of its spares, which generate
# `_PASSING` tokens.
_BEFORE, _SPARE_BEFORE, _PASSING = 3, 2, 5
# Spare prompts per border. The texts of two correct backends diverge at ties, and the tokens after that are not compared. On an
# H200, 12 of 33 texts of 33 tokens diverged, so a token ties with a probability of about 1.4 %. In simulations, one prompt per
# border left a gap in 81 % of runs, and three spares in none of 1,000 (with 5 %, in 100 % and 1.3 %). Spares are always sent,
# because servers that run one after the other do not know the ties.
_SPARES = 3
# Number of batches with a random size.
_DRAWN_BATCHES = 4
# New tokens in such a prompt; the others are cached.
_TAIL = 4
# Tokens that each request of a batch generates if decode must be covered.
_FEW = 4
# Cached tokens in every second request of a batch.
_HEADER = 24


def _border_points(first: int, last: int, step: int = 1) -> tuple[int, ...]:
    """List the multiples of `step` from `first` to `last` that stand for all of them, ascending."""
    # In every block of `BORDER_TOKENS` tokens, these are the first, the second to last and the last length.
    borders = {length for length in range(first, last + 1) if length % BORDER_TOKENS in (0, 1, BORDER_TOKENS - 1)}
    return tuple(sorted(length for length in borders | {first, last} if first <= length <= last and length % step == 0))


def inner_lengths(block: int, wanted: Sequence[int], step: int = 1) -> list[int]:
    """List the multiples of `step` in a block that lie between its `wanted` border points."""
    lengths = range(max(block * BORDER_TOKENS + 1, wanted[0]), min((block + 1) * BORDER_TOKENS, wanted[-1]) + 1)
    return [length for length in lengths if length % step == 0 and length not in wanted]


def blocks_of(lengths: Iterable[int]) -> list[int]:
    """List the blocks that contain lengths, ascending."""
    return sorted({(length - 1) // BORDER_TOKENS for length in lengths})


@dataclass(frozen=True)
class LoadRequest:
    """A request in a load.

    Attributes:
        ids: the prompt's token ids.
        cached: number of them that shall come from the cache.
        output: number of tokens to generate.
        number: number of earlier requests with the same lengths.
    """

    ids: tuple[int, ...]
    cached: int = 0
    output: int = 1
    number: int = 0

    @property
    def title(self) -> str:
        """Its lengths as text, which is unique within a load."""
        written = f", {self.output} generated" if self.output > 1 else ""
        again = f", prompt {self.number + 1}" if self.number else ""
        return f"{len(self.ids) - self.cached} new tokens after {self.cached} cached tokens{written}{again}"


Wave = tuple[LoadRequest, ...]


def longest(tokens: int, context: int, depth: int) -> int:
    """Return the length that a load reaches for an envelope of `tokens`: at most the whole blocks that fit into the context."""
    return min(tokens, (context - BORDER_TOKENS - depth - 1) // BORDER_TOKENS * BORDER_TOKENS)


@dataclass(frozen=True)
class LoadReach:
    """The reach of a load in an engine.

    Attributes:
        tokens: total length, cached and new.
        context: the longest sequence that the engine accepts, in tokens.
        chunk: most tokens that it prefills at once, or None without a limit.
        page: page size of its KV pool. Cached lengths are multiples of it.
        depth: tokens that a request generates if decode must be covered.
    """

    tokens: int
    context: int
    chunk: int | None = None
    page: int = 1
    depth: int = max(DEPTH.values())

    @property
    def at_once(self) -> int:
        """Most new tokens in a call."""
        return min(self.tokens, self.chunk or self.tokens)

    @property
    def is_split(self) -> bool:
        """True if the engine splits the long prompt."""
        return self.chunk is not None and self.chunk <= self.tokens

    @property
    def long(self) -> int:
        """Length of the long prompt. If the engine splits it and the context has room, its last chunk is a full one."""
        return min(self.tokens + self.at_once, self.context - self.depth - 1) if self.is_split else self.tokens

    @property
    def has_full_later_chunk(self) -> bool:
        """True if a later chunk of the long prompt has the full chunk size."""
        return self.is_split and self.long >= 2 * self.at_once

    @cached_property
    def lengths(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Phase -> id of a condition (`assay.harness.conditions.ENVELOPE`) -> the lengths that calls must have, ascending."""
        new = _border_points(1, self.at_once)
        return {
            "extend": {
                "new-tokens": new,
                "new-behind-prefix": new,
                "prefix-tokens": _border_points(1, self.tokens, self.page),
                "total-tokens": _border_points(1, self.tokens),
            },
            # A prompt has at least one token, so decode begins at the second key.
            "decode": {"total-tokens": _border_points(2, self.tokens)},
        }

    def pairs(self, rng: random.Random) -> list[tuple[int, int]]:
        """List the cached and new tokens of the prompts that begin like the long one, in ascending order.

        For all lengths in `lengths` and the random ones between them, both add up to `tokens`. For whole blocks, they also add up
        to a half, a quarter, ... of it.
        """
        extend = self.lengths["extend"]
        behind = {cached: max(1, min(self.tokens - cached, self.at_once)) for cached in extend["prefix-tokens"]}
        behind |= {
            cached: min(self.tokens - cached, self.at_once)
            for cached in _drawn(rng, extend["prefix-tokens"], self.page)
        }
        inner = _drawn(rng, extend["new-behind-prefix"], known=behind.values())
        asked = {(self._in_pages(self.tokens - new), new) for new in (*extend["new-behind-prefix"], *inner)}
        asked |= set(behind.items())
        total = self.tokens // 2 // BORDER_TOKENS * BORDER_TOKENS
        while total >= 2 * BORDER_TOKENS:
            blocks = range(BORDER_TOKENS, total, BORDER_TOKENS)
            asked |= {(block, min(total - block, self.at_once)) for block in blocks if block % self.page == 0}
            total = total // 2 // BORDER_TOKENS * BORDER_TOKENS
        # The long prompt itself covers a full chunk after a prefix that does not fit into the envelope.
        return sorted(
            pair
            for pair in asked
            if sum(pair) <= self.tokens or pair[1] < self.at_once or not self.has_full_later_chunk
        )

    def _in_pages(self, cached: int) -> int:
        """Round up to whole pages, at least one."""
        return max(cached // self.page, 1) * self.page


@dataclass(frozen=True)
class Load:
    """The requests of an envelope, in waves. The first one's prompt provides the cached tokens of all others.

    Attributes:
        long: the long prompt.
        extend: waves for the lengths of the extend phase.
        decode: waves for the lengths of the decode phase, with spares, or empty without decode.
        batch: waves for batches of many sequences, some with a cached prefix: one of the largest size, and others of random sizes.
    """

    long: Wave
    extend: tuple[Wave, ...]
    decode: tuple[Wave, ...]
    batch: tuple[Wave, ...]

    @property
    def waves(self) -> tuple[Wave, ...]:
        """All waves, in sending order."""
        return (self.long, *self.extend, *self.decode, *self.batch)


def envelope_load(reach: LoadReach, batch: int, vocabulary: int, seed: str, *, decodes: bool = True) -> Load:
    """Make the load of an envelope. The same arguments give the same requests on every machine.

    Args:
        seed: loads with different seeds do not share a prefix.
        decodes: whether to cover decode. Otherwise each request generates one token, which prefill computes.
    """
    prompts, rng, few = _Prompts(reach, vocabulary, seed), random.Random(f"{seed}/lengths"), _FEW if decodes else 1
    totals = reach.lengths["extend"]["total-tokens"]
    # The long prompt is the only one with its length.
    alone = [prompts.request(0, length) for length in (*totals, *_drawn(rng, totals)) if length != reach.long]
    behind = [prompts.request(cached, new) for cached, new in reach.pairs(rng)]
    sizes = rng.sample(range(2, batch + 2), _DRAWN_BATCHES)  # of prefill: the first batch decodes in all sizes
    return Load(
        long=(LoadRequest(prompts.long),),
        extend=(*_packed(behind, reach.at_once), *_packed(alone, reach.at_once)),
        decode=tuple(_decode_waves(prompts, reach, rng)) if decodes else (),
        batch=(_batch(prompts, batch + 2, few), *(_batch(prompts, size, 1) for size in sizes)),
    )


def decode_load(reach: LoadReach, vocabulary: int, seed: str, lengths: Sequence[int]) -> tuple[Wave, ...]:
    """Make waves whose first decode steps have these total lengths, with spares, after the long prompt."""
    prompts = _Prompts(reach, vocabulary, seed)
    asked = [tuple(_decoded(prompts, length - 1, 2) for length in lengths) for _ in range(_SPARES)]
    return ((LoadRequest(prompts.long),), *asked)


def _drawn(
    rng: random.Random, wanted: Sequence[int], step: int = 1, known: Collection[int] = (), parts: int = 2
) -> list[int]:
    """Draw a multiple of `step` from each of equal parts of each block between its `wanted` border points, unless one is known.

    A run of lengths that is twice as long as a part contains a whole part, so every seed draws a length from it.
    """
    inner = (inner_lengths(block, wanted, step) for block in blocks_of(wanted))
    some = [
        lengths[len(lengths) * n // parts : len(lengths) * (n + 1) // parts] for lengths in inner for n in range(parts)
    ]
    return [rng.choice(lengths) for lengths in some if lengths and not set(lengths).intersection(known)]


class _Prompts:
    """Prompts that begin like one long prompt, and then differ from it and from each other."""

    def __init__(self, reach: LoadReach, vocabulary: int, seed: str) -> None:
        self._rng, self._vocabulary = random.Random(f"{seed}/envelope"), vocabulary
        self.long = random_tokens(self._rng, reach.long, vocabulary)
        self.page = reach.page
        self._made: Counter[tuple[int, int, int]] = Counter()
        self._next: defaultdict[int, set[int]] = defaultdict(set)
        for place, token in enumerate(self.long):
            self._next[place].add(token)

    def request(self, cached: int, new: int, output: int = 1) -> LoadRequest:
        """Make a prompt of the long prompt's first `cached` tokens and `new` other tokens."""
        taken, fresh = self._next[cached], random_tokens(self._rng, new, self._vocabulary)
        while fresh[0] in taken:  # the cache would hold more than `cached` tokens of it
            fresh = (*random_tokens(self._rng, 1, self._vocabulary), *fresh[1:])
        taken.add(fresh[0])
        number = self._made[cached, new, output]
        self._made[cached, new, output] += 1
        return LoadRequest(self.long[:cached] + fresh, cached, output, number)


def _borders(reach: LoadReach) -> list[int]:
    return sorted({0, *range(BORDER_TOKENS, reach.tokens + 1, BORDER_TOKENS), reach.tokens})


def _decode_waves(prompts: _Prompts, reach: LoadReach, rng: random.Random) -> Iterator[Wave]:
    """Yield a wave of prompts that cross each border during decode, waves of spares, and one for random lengths."""
    for before, output in ((_BEFORE, reach.depth), *[(_SPARE_BEFORE, _PASSING)] * _SPARES):
        yield tuple(_decoded(prompts, border - before, output) for border in _borders(reach))
    # Three per block, since a prompt has few new tokens here.
    if inner := _drawn(rng, reach.lengths["decode"]["total-tokens"], parts=3):
        yield tuple(_decoded(prompts, length - 1, 2) for length in inner)


def _decoded(prompts: _Prompts, length: int, output: int) -> LoadRequest:
    """Make a prompt of a length, at least 1, that has only a few uncached tokens and is decoded."""
    length = max(1, length)
    cached = max(0, length - _TAIL) // prompts.page * prompts.page
    return prompts.request(cached, length - cached, output)


def _batch(prompts: _Prompts, size: int, output: int) -> Wave:
    """Make `size` short prompts, every second one with cached tokens, after one that the engine starts with alone.

    If they decode, each generates one token more than the one before, so decode batches shrink by one through all sizes.
    """
    header = -(-_HEADER // prompts.page) * prompts.page
    short = [prompts.request(header * (n % 2), 2 + n, output + n * (output > 1)) for n in range(size)]
    return (prompts.request(0, BORDER_TOKENS // 2, output), *short)


def _packed(requests: Sequence[LoadRequest], at_once: int) -> Iterator[Wave]:
    """Yield waves of at most `at_once` new tokens, in whole blocks. A longer prompt gets its own wave."""
    # Prompts with the longest cached prefix come first: a small KV pool evicts the least recently used tokens, beginning with the
    # end of the long prompt.
    waves: list[tuple[list[LoadRequest], int]] = []
    for request in sorted(requests, key=lambda request: request.cached - len(request.ids)):
        size = -(-(len(request.ids) - request.cached) // BORDER_TOKENS) * BORDER_TOKENS
        place = next((n for n, (_, used) in enumerate(waves) if used + size <= at_once), None)
        if place is None:
            waves.append(([request], size))
        else:
            waves[place][0].append(request)
            waves[place] = (waves[place][0], waves[place][1] + size)
    yield from sorted((tuple(wave) for wave, _ in waves), key=lambda wave: -max(request.cached for request in wave))
