"""Which bug explains what a kernel got wrong, in which layers and heads and under which conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.harness.attention.hypotheses import FAMILY, LEAK, Hypothesis
from assay.harness.attention.oracle import oracle
from assay.harness.localize.call_conditions import Condition, SequenceShape, separating
from assay.harness.localize.cells import deviation
from assay.harness.localize.examine import Examination, Observation

CLEARLY = 0.5
"""A hypothesis fits only if its error on what fails is at most this share of the truth's."""
ALIKE = 1.5
"""Fits whose error is at most this many times the best one's cannot be told apart: beside noise n, an error of 1.5 n is what
a hypothesis gives that is itself about n (sqrt(1.5^2 - 1) = 1.1) off the right one."""


@dataclass(frozen=True)
class Cause:
    """One thing that a kernel gets wrong.

    Attributes:
        hypotheses: those that fit, best first and leaks before all else; none if no known cause fits.
        layers: layers in which it fails.
        heads: q heads in which it fails.
        phases: phases in which it fails.
        positions: query position buckets in which it fails, indices into `shadow_cells.POSITIONS`; empty if it fails
            in all those of the sequences in which it fails.
        conditions: conditions that tell what fails from what passes; empty if nothing passes or none does.
        only_there: whether the bug must be confined to the first condition to explain what passes.
        agreement: relative L1 to the best hypothesis, over all failing cells; NaN if none fits.
        disagreement: the same to the truth; infinite if the output is not finite there.
        failing: observations with a failing cell in those layers and heads, smallest call first.
        prefixes: cached prefixes of the sequences that fail.
        passing: number of observations in those layers without one.
    """

    hypotheses: tuple[Hypothesis, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    phases: tuple[str, ...]
    positions: tuple[int, ...]
    conditions: tuple[Condition, ...]
    only_there: bool
    agreement: float
    disagreement: float
    failing: tuple[Observation, ...]
    prefixes: tuple[int, ...]
    passing: int


@dataclass(frozen=True)
class _Fit:
    """A hypothesis that fits.

    `confined` counts what it must be confined to (heads, a condition) to explain what passes; `said` is the number of failing
    elements that it says something about.
    """

    hypothesis: Hypothesis
    agreement: float
    conditions: tuple[Condition, ...]
    only_there: bool
    confined: int
    said: float


def causes(examination: Examination) -> list[Cause]:
    """What explains the cells that are out of bounds; empty if there are none.

    One bug is sought for all failing layers together, then, if none fits, for each layer; layers with the same bug, heads
    and conditions are one cause. Within its layers and heads a hypothesis must agree with the output within the call's bound
    on every cell, failing or not, except that it may be confined to a condition that holds of all that fails.
    """
    layers = sorted({o.call.layer for o in examination.observations if bool(o.failing.any())})
    if not layers:
        return []
    together = _explain(examination.observations, layers)
    if together.hypotheses or len(layers) == 1:
        return [together]
    groups: dict[object, list[int]] = {}
    for layer in layers:
        alone = _explain(examination.observations, [layer])
        names = tuple(h.name for h in alone.hypotheses)
        key = (names, alone.heads, alone.conditions) if names else ()
        groups.setdefault(key, []).append(layer)
    found = [_explain(examination.observations, group) for group in groups.values()]
    return sorted(found, key=_rank)


def _rank(cause: Cause) -> tuple[bool, bool]:
    return not any(h.kind == LEAK for h in cause.hypotheses), not cause.hypotheses


def _explain(observations: Sequence[Observation], layers: Sequence[int]) -> Cause:
    inside = [o for o in observations if o.call.layer in layers]
    failing = sorted((o for o in inside if bool(o.failing.any())), key=lambda o: (o.call.k.numel(), o.call.q.numel()))
    heads = sorted({int(h) for o in failing for h in o.failing.any(0).nonzero().flatten()})
    wrong = [s for o in inside for s in _where(o, o.failing)]
    right = [s for o in inside for b, s in enumerate(o.sequence_shapes) if b not in _sequences(o, o.failing)]
    truth = [0.0, 0.0]
    for o in failing:
        difference, size, _ = deviation(o.out, oracle(o.call), o.cells).over(o.failing)
        truth = [truth[0] + difference, truth[1] + size]
    disagreement = truth[0] / truth[1] if truth[1] else float("inf")
    fits = [f for h in FAMILY if (f := _fit(h, inside, failing, heads, wrong, right, disagreement))]
    chosen = _choose(fits)
    return Cause(
        hypotheses=tuple(f.hypothesis for f in chosen),
        layers=tuple(layers),
        heads=tuple(heads),
        phases=tuple(sorted({o.call.phase for o in failing}, reverse=True)),
        positions=_positions(failing),
        conditions=chosen[0].conditions if chosen else tuple(separating(wrong, right) if right else ()),
        only_there=bool(chosen) and chosen[0].only_there,
        agreement=chosen[0].agreement if chosen else float("nan"),
        disagreement=disagreement,
        failing=tuple(failing),
        prefixes=tuple(sorted({s.prefix for s in wrong})),
        passing=len(inside) - len(failing),
    )


def _choose(fits: Sequence[_Fit]) -> list[_Fit]:
    """The fits that cannot be told from the best, those that must be confined least; leaks before all else."""
    best = min((f.agreement for f in fits), default=0.0)
    alike = [f for f in fits if f.agreement <= ALIKE * best + 1e-12]
    # A hypothesis that leaves much undefined agrees with anything there.
    alike = [f for f in alike if f.said == max(g.said for g in alike)]
    least = [f for f in alike if f.confined == min(g.confined for g in alike)]
    return sorted(least, key=lambda f: (f.hypothesis.kind != LEAK, f.agreement))


def _fit(
    hypothesis: Hypothesis,
    inside: Sequence[Observation],
    failing: Sequence[Observation],
    heads: Sequence[int],
    wrong: Sequence[SequenceShape],
    right: Sequence[SequenceShape],
    disagreement: float,
) -> _Fit | None:
    total = [0.0, 0.0, 0.0]
    violating: list[SequenceShape] = []
    everywhere = True
    for o in failing:  # smallest first: most hypotheses are ruled out by one small call
        expected = hypothesis.compute(o.call)
        if expected is None:
            return None
        off = deviation(o.out, expected, o.cells)
        if bool((off.relative_l1 > o.bound)[o.failing].any()):
            return None
        total = [a + b for a, b in zip(total, off.over(o.failing), strict=True)]
        violating += _where(o, _violated(o, off.relative_l1, heads))
        others = sorted(set(range(o.own.shape[1])) - set(heads))
        everywhere &= not bool(_violated(o, off.relative_l1, others).any())
    agreement = total[0] / total[1] if total[1] else 0.0
    if not total[2] or agreement > CLEARLY * disagreement:
        return None
    seen = {id(o) for o in failing}
    for o in inside:
        if id(o) not in seen and (expected := hypothesis.compute(o.call)) is not None:
            violating += _where(o, _violated(o, deviation(o.out, expected, o.cells).relative_l1, heads))
    conditions = separating(wrong, right) if right else []
    if not violating:
        return _Fit(hypothesis, agreement, tuple(conditions), False, int(not everywhere), total[2])
    confined = conditions or separating(wrong, violating)
    return _Fit(hypothesis, agreement, tuple(confined), True, 1 + int(not everywhere), total[2]) if confined else None


def _violated(o: Observation, off: Tensor, heads: Sequence[int]) -> Tensor:
    """Cells of these heads, as far as the layer has them, that pass although the hypothesis says that they should not."""
    chosen = torch.zeros_like(o.failing)
    chosen[:, [head for head in heads if head < chosen.shape[1]]] = True
    return chosen & ~o.failing & (off > o.bound)


def _positions(failing: Sequence[Observation]) -> tuple[int, ...]:
    hit = {o.cells.position[int(c)] for o in failing for c in o.failing.any(1).nonzero()}
    there = {
        position
        for o in failing
        for sequence, position in zip(o.cells.sequence, o.cells.position, strict=True)
        if sequence in _sequences(o, o.failing)
    }
    return tuple(sorted(hit)) if hit < there else ()


def _sequences(o: Observation, cells: Tensor) -> list[int]:
    """Sequences with one of these cells (bool [cells, num_q_heads])."""
    return sorted({o.cells.sequence[int(c)] for c in cells.any(1).nonzero()})


def _where(o: Observation, cells: Tensor) -> list[SequenceShape]:
    return [o.sequence_shapes[b] for b in _sequences(o, cells)]
