"""The load of the layer suite: requests that take the engine through the envelope, which short questions alone never leave.

Prompts are token ids (see `assay.evals.loads`). A wave is sent at once: its first prompt fills a chunk and is prefilled alone; the
others wait, so that the engine puts them into one call together with what is left of the first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from assay.evals.loads import random_tokens

BORDER = 64
"""Prompts end one token before, on, and one token after a multiple of this, which every page size divides."""
REST = 64
"""Tokens of the long prompt behind the envelope's length: its second chunk."""
BATCH = {"cpu": 9, "cuda": 17}
"""Sequences that a batch must have, by device."""
DEPTH = {"cpu": 9, "cuda": 33}
"""Tokens that a request must generate, by device, where the candidate claims decode."""
_FEW, _SOME = 8, 136
_STEPS = (512, 2048, 8192, 32768)
"""Lengths below the envelope's at which prompts and prefixes end too."""


@dataclass(frozen=True)
class Request:
    """One request of a load: the ids of its prompt, and how many tokens it generates."""

    ids: tuple[int, ...]
    output: int = 1


def longest(tokens: int, context: int, depth: int) -> int:
    """The length that the load reaches for an envelope of `tokens`: a multiple of `BORDER` that leaves room in the context."""
    return min(tokens, (context - REST - depth - 1) // BORDER * BORDER)


def long_wave(tokens: int, output: int, vocabulary: int, seed: str) -> tuple[Request, ...]:
    """A long prompt, and shorter ones that share none, a few or many of its first tokens.

    Where each request generates more than a few tokens, one of them passes a border while it is decoded.

    Args:
        tokens: length of the envelope. The long prompt is `REST` longer; servers that prefill at most `tokens` at once
            (``--chunked-prefill-size``) split it there.
        output: tokens that each request generates.
        vocabulary: size of the model's vocabulary.
        seed: waves of different seeds share no prefix.
    """
    rng = random.Random(f"{seed}/long")
    long = random_tokens(rng, tokens + REST, vocabulary)

    def sharing(prefix: int, total: int) -> Request:
        return Request(long[:prefix] + random_tokens(rng, total - prefix, vocabulary), output)

    some = min(_SOME, tokens // 2)
    return (
        Request(long, output),
        sharing(_FEW, BORDER - 1),
        sharing(some, -(-(some + 1) // BORDER) * BORDER),
        sharing(0, BORDER + 1),
        sharing(
            0, _FEW + 2
        ),  # the fewest new tokens: questions have more, and what is left of one in the cache is chance
        *([sharing(0, 2 * BORDER - _FEW // 2)] if output > _FEW else []),
        *(sharing(0, step) for step in _STEPS if step < tokens),
        *(sharing(step, step + 16) for step in _STEPS if step < tokens),
    )


def again(wave: tuple[Request, ...], tokens: int, output: int, vocabulary: int) -> tuple[Request, ...]:
    """The long prompt of a wave up to `tokens`, with another end: its prefix is cached without chunked prefill."""
    rng = random.Random(f"{wave[0].ids[:4]}/again")
    return (Request(wave[0].ids[:tokens] + random_tokens(rng, REST, vocabulary), output),)


def batch_wave(size: int, output: int, vocabulary: int, seed: str) -> tuple[Request, ...]:
    """`size` short prompts, some of which share a prefix, behind one that the engine starts with alone."""
    rng = random.Random(f"{seed}/batch")
    header = random_tokens(rng, 24, vocabulary)
    short = [Request(header[: 24 * (n % 2)] + random_tokens(rng, 2 + n % 7, vocabulary), output) for n in range(size)]
    return (Request(random_tokens(rng, 16, vocabulary), output), *short)
