"""A call in words, conditions of its sequences, and those that separate failing from passing sequences."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from assay.harness.attention.call import AttentionCall
from assay.harness.conditions import CACHED_PREFIX_TOKENS


@dataclass(frozen=True)
class SequenceShape:
    """The shape of one sequence of a call.

    Attributes:
        phase: "extend" or "decode".
        new: new tokens.
        prefix: cached prefix, in tokens.
        batch: number of sequences in the call.
        index: which of them this is.
    """

    phase: str
    new: int
    prefix: int
    batch: int
    index: int

    @property
    def length(self) -> int:
        """All tokens: cached prefix and new ones."""
        return self.new + self.prefix


@dataclass(frozen=True)
class SequenceCondition:
    """A property that some sequences have.

    Attributes:
        words: how findings state it.
        holds: whether a sequence has it.
        otherwise: how findings state that a sequence does not have it; empty for "all other calls".
    """

    words: str
    holds: Callable[[SequenceShape], bool] = field(compare=False)
    otherwise: str = ""


def describe(call: AttentionCall) -> str:
    """Describe a call: "layer 2 extend, new+prefix 20+77 3+0, 4 q heads on 2 kv heads, head_dim 64, bfloat16"."""
    counts = (("q head", call.q.shape[1]), ("kv head", call.k.shape[1]))
    heads = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts]
    lens = " ".join(f"{new}+{prefix}" for new, prefix in zip(call.lens_q, call.prefixes, strict=True))
    values = f", head_dim_v {call.v.shape[2]}" if call.v.shape[2] != call.q.shape[2] else ""
    sliced, mode = call.spec.layout == "sliced", f", under {call.spec.grad_mode}" if call.spec.grad_mode else ""
    return (
        f"layer {call.layer} {call.phase}, new+prefix {lens}, {heads[0]} on {heads[1]}, "
        f"head_dim {call.q.shape[2]}{values}, {str(call.q.dtype).removeprefix('torch.')}{', sliced inputs' * sliced}{mode}"
    )


def sequence_shapes(call: AttentionCall) -> list[SequenceShape]:
    """Return the shape of each sequence of a call."""
    lens = list(zip(call.lens_q, call.prefixes, strict=True))
    return [SequenceShape(call.phase, new, prefix, len(lens), b) for b, (new, prefix) in enumerate(lens)]


def separating(failing: Collection[SequenceShape], passing: Collection[SequenceShape]) -> list[SequenceCondition]:
    """List conditions, else pairs of them, that all failing sequences meet and no passing one does; simplest first.

    A usual limit is stated only if sequences lie close to it on both sides; else a limit is taken from the sequences themselves.
    Where all failing sequences have the same lengths, no limit is known, and those lengths are the condition.
    """
    passing = [s for s in passing if s.new]  # one without new tokens has no output that could be wrong
    lengths = sorted({(s.new, s.prefix) for s in failing})
    alone = [_lengths(*lengths[0])] if len(lengths) == 1 else []
    usual = [c for c in _SINGLES if c.words not in _QUALITIES and _is_close(c.words, failing, passing)]
    singles = [c for c in _SINGLES if all(map(c.holds, failing))]
    named = [c for c in singles if c.words in _QUALITIES]
    candidates = (
        [*named, *usual] if any(_separates(c, failing, passing) for c in named) else alone,
        usual,
        _limits(failing, passing),
        _pairs(singles),
        _pairs_with_limits(singles, failing, passing),
    )
    for some in candidates:
        if separate := [c for c in some if _separates(c, failing, passing)]:
            return separate
    return []


def _separates(
    condition: SequenceCondition, failing: Collection[SequenceShape], passing: Collection[SequenceShape]
) -> bool:
    return all(map(condition.holds, failing)) and not any(map(condition.holds, passing))


def _lengths(new: int, prefix: int) -> SequenceCondition:
    return SequenceCondition(f"new+prefix is {new}+{prefix}", lambda s: (s.new, s.prefix) == (new, prefix))


def _is_close(words: str, failing: Collection[SequenceShape], passing: Collection[SequenceShape]) -> bool:
    """Return True if failing and passing sequences lie within an eighth of a limit, each on its side; also if it is no limit."""
    limit = _LIMIT.fullmatch(words)
    if not limit or not failing or not passing:
        return True
    of, n = _QUANTITIES[limit[1]], int(limit[3])
    values = [[of(s) for s in some] for some in (failing, passing)]
    return all(min(abs(value - n) for value in some) <= max(1, n // 8) for some in values)


def _limits(failing: Collection[SequenceShape], passing: Collection[SequenceShape]) -> Iterable[SequenceCondition]:
    """Yield the least or the largest failing value of a quantity, if all passing ones lie beyond it."""
    if not failing or not passing:
        return
    for what, of in _QUANTITIES.items():
        wrong, right = [of(s) for s in failing], [of(s) for s in passing]
        first, last = min(wrong), max(wrong)
        # What lies between the two was not asked, so the passing side has a limit of its own.
        if first > max(right):
            seen = f"{what} <= {max(right)}"
            yield SequenceCondition(f"{what} >= {first}", lambda s, of=of, first=first: of(s) >= first, seen)  # type: ignore[misc]
        elif last < min(right):
            seen = f"{what} >= {min(right)}"
            yield SequenceCondition(f"{what} <= {last}", lambda s, of=of, last=last: of(s) <= last, seen)  # type: ignore[misc]


def _pairs_with_limits(
    singles: Collection[SequenceCondition], failing: Collection[SequenceShape], passing: Collection[SequenceShape]
) -> Iterable[SequenceCondition]:
    for a in singles:
        for b in _limits(failing, [s for s in passing if a.holds(s)]):
            yield _both(a, b)


def _pairs(singles: Collection[SequenceCondition]) -> Iterable[SequenceCondition]:
    for a, b in combinations(singles, 2):
        yield _both(a, b)


def _both(a: SequenceCondition, b: SequenceCondition) -> SequenceCondition:
    return SequenceCondition(f"{a.words} and {b.words}", lambda s: a.holds(s) and b.holds(s))


def _multiples(what: str, of: Callable[[SequenceShape], int]) -> list[SequenceCondition]:
    made = []
    for n in (128, 64, 16):
        made.append(SequenceCondition(f"{what} % {n} == 0", lambda s, n=n: of(s) % n == 0))  # type: ignore[misc]
        made.append(SequenceCondition(f"{what} % {n} != 0", lambda s, n=n: of(s) % n != 0))  # type: ignore[misc]
    return made


def _beyond(what: str, of: Callable[[SequenceShape], int], *limits: int) -> list[SequenceCondition]:
    made = []
    for n in limits:
        made.append(SequenceCondition(f"{what} > {n}", lambda s, n=n: of(s) > n, f"{what} <= {n}"))  # type: ignore[misc]
        made.append(SequenceCondition(f"{what} <= {n}", lambda s, n=n: of(s) <= n, f"{what} > {n}"))  # type: ignore[misc]
    return made


_QUANTITIES: dict[str, Callable[[SequenceShape], int]] = {
    "cached prefix": lambda s: s.prefix,
    "new tokens": lambda s: s.new,
    "length": lambda s: s.length,
    "batch": lambda s: s.batch,
}
_LIMIT = re.compile(rf"({'|'.join(_QUANTITIES)}) (>=|<=|>|<) (\d+)")

_LONG, _SHORT = f"cached prefix >= {CACHED_PREFIX_TOKENS}", f"cached prefix < {CACHED_PREFIX_TOKENS}"
_SINGLES: tuple[SequenceCondition, ...] = (
    SequenceCondition("cached prefix > 0", lambda s: s.prefix > 0, "prefix 0"),
    SequenceCondition("no cached prefix", lambda s: s.prefix == 0, "a cached prefix"),
    SequenceCondition("extend only", lambda s: s.phase == "extend", "decode"),
    SequenceCondition("decode only", lambda s: s.phase == "decode", "extend"),
    SequenceCondition("batch > 1", lambda s: s.batch > 1, "batch 1"),
    SequenceCondition("batch 1", lambda s: s.batch == 1, "batch > 1"),
    SequenceCondition("not the first of its batch", lambda s: s.index > 0, "the first of a batch"),
    SequenceCondition("not the last of its batch", lambda s: s.index < s.batch - 1, "the last of a batch"),
    SequenceCondition("cached prefix 1", lambda s: s.prefix == 1),
    SequenceCondition(f"cached prefix 2-{CACHED_PREFIX_TOKENS - 1}", lambda s: 2 <= s.prefix < CACHED_PREFIX_TOKENS),
    SequenceCondition(_LONG, lambda s: s.prefix >= CACHED_PREFIX_TOKENS, _SHORT),
    SequenceCondition(_SHORT, lambda s: s.prefix < CACHED_PREFIX_TOKENS, _LONG),
    *_multiples("cached prefix", lambda s: s.prefix),
    SequenceCondition("one new token", lambda s: s.new == 1, "more new tokens"),
    SequenceCondition("new tokens > 1", lambda s: s.new > 1, "one new token"),
    *_multiples("length", lambda s: s.length),
    *_multiples("new tokens", lambda s: s.new),
    *_beyond("length", lambda s: s.length, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    *_beyond("new tokens", lambda s: s.new, 16, 64, 128, 256, 1024),
)


# Words of the conditions that state no limit besides 0 and 1, and no multiple.
_QUALITIES = frozenset(c.words for c in _SINGLES if not re.search(r"% |[<>]=? [2-9]|[<>]=? 1\d", c.words))
