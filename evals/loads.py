"""Shapes for the latency suite: lengths of prompts and answers in tokens, and the prefix that prompts share.

Prompts are token ids, not text, so their length is exact with any tokenizer (as with ``random-ids`` in SGLang's own
``sglang.benchmark.serving``). The tokens are random, because a dense model takes the same time for any token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.harness.errors import UsageError

# 1 / `_EDGE_DIVISOR` of the vocabulary is left out at each end, where special tokens lie.
_EDGE_DIVISOR = 10


@dataclass(frozen=True)
class Shape:
    """Lengths of requests, in tokens.

    Attributes:
        prompt: length of each prompt, or of the longest one if they differ, including the shared part.
        output: length of each answer, which is forced.
        shared: length of the prefix that all prompts of a block share. It is cached beforehand.
        chunked: whether the prompt must exceed the tokens that the server prefills at once.
        shortest: length of the shortest prompt, so that batches hold sequences of different lengths; 0 if all are equal.
    """

    name: str
    prompt: int
    output: int
    shared: int = 0
    chunked: bool = False
    shortest: int = 0


CHUNK = {"cpu": 128, "cuda": 2048}
"""Tokens prefilled at once (``--chunked-prefill-size``) if the shape `chunked` is used, by device."""
SHAPES: dict[str, tuple[Shape, ...]] = {
    # For the tiny model: a block takes a few tenths of a second.
    "cpu": (
        Shape("short", 32, 16),
        Shape("long", 120, 16),
        Shape("shared", 120, 16, shared=96),
        Shape("chunked", 320, 16, chunked=True),
        Shape("mixed", 120, 16, shortest=8),
        Shape("offline", 64, 64),
    ),
    # `offline` is the seed case's throughput test: one prompt, 256 tokens in, 256 out.
    "cuda": (
        Shape("short", 128, 64),
        Shape("long", 1536, 64),
        Shape("shared", 1536, 64, shared=1408),
        Shape("chunked", 5120, 64, chunked=True),
        Shape("mixed", 1536, 64, shortest=64),
        Shape("offline", 256, 256),
    ),
}
DEFAULT = ("short", "long", "shared", "chunked", "mixed")


def shapes_of(names: Iterable[str], device: str) -> tuple[Shape, ...]:
    """Look up shapes by name.

    Args:
        names: names in `SHAPES`, or lengths as ``PROMPT:OUTPUT`` or ``PROMPT:OUTPUT:SHARED``.

    Raises:
        UsageError: a shape does not exist, a length is out of range, or a shape is repeated.
    """
    known = {shape.name: shape for shape in SHAPES[device]}
    shapes = tuple(known[name] if name in known else _custom(name, known) for name in names)
    if not shapes or len({shape.name for shape in shapes}) < len(shapes):
        raise UsageError(
            f"--latency-shapes names {', '.join(names) or 'none'}.",
            "at least one, without repetition",
            "name each shape once",
        )
    return shapes


def _custom(name: str, known: Iterable[str]) -> Shape:
    try:
        prompt, output, *rest = (int(part) for part in name.split(":"))
        (shared,) = rest or (0,)
        if not (prompt > shared >= 0 and output >= 2):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--latency-shapes: {name} is not a shape.",
            f"one of {', '.join(known)}, or lengths in tokens as PROMPT:OUTPUT or PROMPT:OUTPUT:SHARED, "
            "with at least 2 tokens of output and a shared part shorter than the prompt",
            "name some of these, as in --latency-shapes short,512:64",
        ) from None
    return Shape(name, prompt, output, shared)


def prefix(shape: Shape, vocabulary: int, seed: str) -> tuple[int, ...]:
    """List the tokens that all prompts of a block share at the beginning, if any."""
    return random_tokens(random.Random(f"{seed}/shared"), shape.shared, vocabulary)


def prompts(shape: Shape, count: int, vocabulary: int, seed: str) -> list[tuple[int, ...]]:
    """Make `count` prompts of token ids. The same arguments give the same prompts on every machine.

    Args:
        seed: prompts with different seeds share nothing, so a block cannot hit the prefix cache of the one before.
    """
    head = prefix(shape, vocabulary, seed)
    rngs = [random.Random(f"{seed}/{index}") for index in range(count)]
    lengths = [rng.randint(shape.shortest, shape.prompt) if shape.shortest else shape.prompt for rng in rngs]
    return [
        head + random_tokens(rng, length - shape.shared, vocabulary) for rng, length in zip(rngs, lengths, strict=True)
    ]


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    """Draw `count` token ids, avoiding the ends of the vocabulary, where special tokens lie."""
    ends = vocabulary // _EDGE_DIVISOR
    return tuple(rng.choices(range(ends, vocabulary - ends), k=count))


def check_fit(shapes: Sequence[Shape], context: int) -> None:
    """Check that each shape, including its answer, fits into a model's context (in tokens).

    Raises:
        UsageError: a shape does not fit.
    """
    for shape in shapes:
        if shape.prompt + shape.output > context:
            raise UsageError(
                f"Shape {shape.name} needs {shape.prompt} + {shape.output} tokens, but the model takes {context}.",
                "a shape that fits",
                f"remove {shape.name}, or give lengths as PROMPT:OUTPUT",
            )
