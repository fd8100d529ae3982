"""Draws the calls on which a condition is tested: around a failing call, and around calls that were made."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.harness.attention.shapes import Shape
from assay.harness.localize.lab import Lab, Place, work_of

Axes = Mapping[str, Sequence[Any]]
"""The fields of a shape to vary, and their values."""
_BLOCKS = (16, 32, 64, 128, 256)
# Largest product of queries, keys, q heads and head dim of a drawn call: a few milliseconds.
MOST_WORK = 2**24


class Drawer:
    """Draws shapes at random, around a failing one and around those that were run."""

    def __init__(self, lab: Lab, place: Place, axes: Axes, seed: int) -> None:
        self._lab, self._place, self._axes, self._random = lab, place, axes, random.Random(seed)
        self._most, self._longest = max(MOST_WORK, 4 * work_of(place.shape)), max(600, 2 * sum(place.own))
        self.held: Collection[str] = ()
        self.dtype = place.shape.dtype

    def __call__(self, count: int) -> Iterator[Shape]:
        """Yield up to `count` new shapes that have the base's values of the held fields."""
        base = {name: getattr(self._place.shape, name) for name in self.held if name != "lens"}
        for _ in range(count):
            shape = replace(self._changed() if self._random.random() < 0.5 else self._fresh(), **base)
            lens = shape.lens[:1] if "lens" in self.held else shape.lens
            if shape.phase == "decode":
                lens = tuple((1, max(1, n + p - 1)) for n, p in lens)
            shape = replace(shape, lens=lens)
            if shape not in self._lab.known and work_of(shape) <= self._most:
                yield shape

    def beside(self, shape: Shape, by: int) -> Iterator[Shape]:
        """Yield shapes that differ from this one in a length or a window, by a few tokens or about `by`, or in heads."""
        if "heads" not in self.held:
            yield from (replace(shape, heads=heads) for heads in self._axes["heads"])
        steps = {-2, -1, 1, 2, *(by // n for n in {1, 2, shape.heads[0], shape.heads[0] // shape.heads[1]})} - {0}
        for name in shape.asked:
            windows = [int(name.split()[1]) + step for step in steps] if name.startswith("window ") else []
            asked = [
                tuple(f"window {n}" if other == name else other for other in shape.asked) for n in windows if n > 0
            ]
            yield from (replace(shape, asked=some) for some in asked)
        for b, (new, prefix) in enumerate(shape.lens):
            pairs = [(new, prefix + step) for step in steps]
            pairs += [(new + step, prefix) for step in steps if shape.phase != "decode" and new]
            for pair in pairs:
                if pair[0] >= 1 and pair[1] >= (shape.phase == "decode"):
                    changed = replace(shape, lens=(*shape.lens[:b], pair, *shape.lens[b + 1 :]))
                    if changed not in self._lab.known and work_of(changed) <= self._most:
                        yield changed

    def _changed(self) -> Shape:
        """Draw a shape that differs in an axis or a sequence from one that was run."""
        chance = self._random
        shape = chance.choice(self._lab.wrong_ones if chance.random() < 0.5 else list(self._lab.known))
        if chance.random() < 0.4:
            name = chance.choice([*self._axes, "phase"])
            return replace(shape, **{name: self._value(name)})
        lens = list(shape.lens)
        b, decode = chance.randrange(len(lens)), shape.phase == "decode"
        new, prefix = lens[b]
        if chance.random() < 0.5 and not decode:
            new = max(1, new + chance.choice((-17, -1, 1, 16, 64)) if chance.random() < 0.5 else self._length(1, 300))
        else:
            drawn = (
                prefix + chance.choice((-17, -1, 1, 16, 64))
                if chance.random() < 0.5
                else self._length(0, self._longest)
            )
            prefix = max(int(decode), drawn)
        lens[b] = new, prefix
        return replace(shape, lens=tuple(lens))

    def _fresh(self) -> Shape:
        chance, shape = self._random, self._place.shape
        changes = {name: self._value(name) for name in self._axes if chance.random() < 0.25}
        if "heads" in changes and chance.random() < 0.5:  # q heads that are independent of the ratio
            kv_heads = chance.randint(1, 8)
            changes["heads"] = kv_heads * chance.randint(1, 16), kv_heads
        phase = shape.phase if chance.random() < 0.75 else chance.choice(self._lab.guard.assay.phases)
        decode = phase == "decode"
        single = decode or chance.random() < 0.15  # extend with sequences of one new token looks like decode
        count = 1 if chance.random() < 0.45 else chance.choice((2, 2, 3, 4, 5, 7))
        lens = [self._sequence(single, count) for _ in range(count)]
        if chance.random() < 0.2:
            lens = lens[:1] * count
        if chance.random() < 0.15 and not decode:
            lens.insert(chance.randrange(count + 1), (0, chance.choice((0, 20))))
        if chance.random() < 0.4:
            lens[chance.randrange(len(lens))] = self._place.own
        return replace(shape, phase=phase, lens=tuple(lens), **changes)

    def _value(self, name: str) -> Any:
        """Draw a value of an axis. Every second draw of what calls ask for changes or adds one of the base's features."""
        drawn: Any = self._random.choice(self._axes.get(name) or self._lab.guard.assay.phases)
        if name == "asked" and self._random.random() < 0.5:
            kinds = {value[:5] for value in drawn}
            drawn = *(value for value in self._place.shape.asked if value[:5] not in kinds), *drawn
        return drawn

    def _sequence(self, single: bool, count: int) -> tuple[int, int]:
        few = count < 3
        if few and self._random.random() < 0.06:  # a rule about long prefixes may end at a longer one
            return 1 if single else self._random.randint(1, 20), self._random.randint(self._longest, 3 * self._longest)
        cached = single or self._random.random() < 0.75
        prefix = self._length(int(single), self._longest if few else 200) if cached else 0
        return 1 if single else self._length(1, 300 if few else 100), prefix

    def _length(self, least: int, most: int) -> int:
        """Draw a length, at the edge of a block in half of all draws."""
        chance = self._random
        if chance.random() < 0.5:
            n = chance.choice(_BLOCKS) * chance.choice((1, 1, 1, 2, 3)) + chance.choice((-1, 0, 0, 1))
        else:
            n = chance.randrange(least, 24 if chance.random() < 0.3 else most)
        return max(least, min(most, n))
