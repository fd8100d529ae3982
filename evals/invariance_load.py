"""The probes of ``assay invariance``: sequences that feel what an engine's features do to them.

All begin with tokens of one long prompt, the *prefix*. Their lengths lie around the borders of pages and of chunks, their shared
parts too, and some have a prefix of more than a thousand tokens. Prompts are token ids (see `assay.evals.loads`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from assay.evals.loads import random_tokens

PAGE = 16
"""Tokens of a page where the page size is switched."""
CHUNK = {"cpu": 128, "cuda": 512}
"""Tokens that are prefilled at once where chunked prefill is switched, by device."""
DEPTH = 64
"""Tokens that the probes of deep decode generate."""
# Tokens that every second of these, and all others generate: sent at once, few are left at the end, so that batches of all sizes
# decode.
_DEEP, _SHALLOW = 48, 8
_LONG = 1024
# Probes, by device: sent at once, they are the largest batch.
_BATCH = {"cpu": 21, "cuda": 33}
# Tokens of the context that are left free beside the longest probe.
_CONTEXT_LEFT = 128


@dataclass(frozen=True)
class Probe:
    """One sequence.

    Attributes:
        id: such as "0+17", its shared and its new tokens.
        shared: how many of them, from its first, are the prefix's.
    """

    id: str
    ids: tuple[int, ...]
    shared: int
    depth: int


@dataclass(frozen=True)
class ProbeLoad:
    """The probes, and the prompt that they share beginnings with."""

    prefix: tuple[int, ...]
    probes: tuple[Probe, ...]


def probe_load(device: str, context: int, vocabulary: int, seed: str = "0") -> ProbeLoad:
    """Make the probes for a device and a model; the same arguments give the same ones on every machine.

    Args:
        seed: loads of different seeds share no tokens.
    """
    rng = random.Random(f"{seed}/invariance")
    longest = min(_LONG + 2 * CHUNK[device], context - DEPTH - _CONTEXT_LEFT)
    prefix = random_tokens(rng, max(longest, PAGE), vocabulary)
    made, taken = [], {(place, token) for place, token in enumerate(prefix)}
    for number, (shared, new) in enumerate(_lengths(CHUNK[device], longest, _BATCH[device])):
        fresh = random_tokens(rng, new, vocabulary)
        while (shared, fresh[0]) in taken:  # the cache would hold more than `shared` tokens of it
            fresh = (*random_tokens(rng, 1, vocabulary), *fresh[1:])
        taken.add((shared, fresh[0]))
        depth = DEPTH if number % 10 == 0 else _DEEP if number % 5 == 0 else _SHALLOW
        made.append(Probe(f"{shared}+{new}", prefix[:shared] + fresh, shared, depth))
    return ProbeLoad(prefix, tuple(made))


def _lengths(chunk: int, longest: int, count: int) -> Sequence[tuple[int, int]]:
    """Return shared and new tokens of each probe: the telling ones first, then short ones for a large batch."""
    asked = [
        (0, 3), (0, PAGE - 1), (0, PAGE), (0, PAGE + 1), (PAGE - 1, 9), (PAGE, 9), (PAGE + 1, 9), (2 * PAGE + 1, PAGE - 2),
        (0, chunk - 1), (0, chunk), (0, chunk + 1), (0, 2 * chunk + 1), (chunk - PAGE // 2, PAGE), (chunk, 12),
        (chunk - 1, 13), (chunk + 1, 11), (2 * chunk, 10), (chunk + 5, chunk + 3), (_LONG, 12),
        (_LONG - 1, 20), (_LONG - PAGE, chunk + 9),
    ]  # fmt: skip
    fitting = [(shared, new) for shared, new in asked if shared + new <= longest]
    return [*fitting, *((0, PAGE + 2 + number) for number in range(max(0, count - len(fitting))))]
