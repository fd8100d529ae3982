"""Finds the bug that explains a kernel's errors, and the phases, layers and heads that have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK, Bug
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.evidence.error_table import SUMS
from assay.harness.localize.cells import CallCells, deviation, row_deviation
from assay.harness.localize.kernel_runs import CallResult, KernelRun, truth
from assay.harness.stats.error_sums import distance, relative_l1, slope
from assay.harness.stats.query_bounds import with_all_heads

_Explaining = Callable[[Bug, CallResult], Tensor | None]
OUTPUT_SCALED = "output-scaled"
"""The id of the hypothesis that every output is a multiple of the correct one. The factor is estimated from the outputs."""
OUTPUT_NOT_WRITTEN = "output-not-written"
"""The id of the same hypothesis if the factor is zero."""
GAINS = {OUTPUT_SCALED: "scales its output", OUTPUT_NOT_WRITTEN: "does not write its output"}
"""Predicates for a kernel with either error: they follow its name in a sentence."""
_SIZE = SUMS.index("size")
# Of the queries of a call with more scores (queries x keys x heads) than this, each 16th is compared first.
_SMALL_SCORES, _FEW = 2**16, 16
# A hypothesis fits only if, on failing cells, the output's error against it is at most this share of its error against the
# oracle.
_FIT_SHARE = 0.5
# Hypotheses whose error is at most this multiple of the best one's are indistinguishable: at noise n, an error of 1.5 n
# means that the hypothesis is itself about n (sqrt(1.5^2 - 1) = 1.1) away from the correct one.
_TIE_FACTOR = 1.5
# Fewest failing calls of a cause that only some layers have, if experiments drew the layers: a hypothesis fits fewer by chance.
_LEAST_FAILING = 8
# If no hypothesis fits, the nearest one is sought on this many failing calls, the smallest ones.
_NEAREST_ON = 4


Group = tuple[str, bool]
"""The phase of a sequence, and whether a prefix is cached. Findings state the extent of an error in these terms."""


@dataclass(frozen=True)
class Cause:
    """One thing that a kernel gets wrong.

    Attributes:
        hypotheses: those that fit, best first, leaks before all others. A scaled output stands alone if it fits clearly better.
        layers: the layers that fail.
        heads: the q heads that fail, by their number in the model.
        groups: for each group of sequences with new tokens in those layers: the number of wrong ones, and of all. Sequences of
            experiments count too.
        spared: the number of correct calls on which the best hypothesis would show.
        hypothesis_error: relative L1 against the best hypothesis, over all failing cells; NaN if none fits.
        oracle_error: relative L1 against the oracle, over all failing cells; infinite if the output is not finite there.
        failing: results with a failing cell in those layers and heads, smallest call first.
    """

    hypotheses: tuple[Bug, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    groups: dict[Group, tuple[int, int]]
    spared: int
    hypothesis_error: float
    oracle_error: float
    failing: tuple[CallResult, ...]

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which it fails."""
        return tuple(sorted({phase for phase, _ in self.wrong_groups}, reverse=True))

    @property
    def wrong_groups(self) -> set[Group]:
        """The groups with a wrong sequence."""
        return {group for group, (wrong, _) in self.groups.items() if wrong}


@dataclass(frozen=True)
class _Fit:
    """A hypothesis that fits; see `Cause`."""

    hypothesis: Bug
    error: float
    spared: int
    # Restrictions (to heads, to some calls) that it needs to explain what passes.
    confined: int
    # Failing elements for which it predicts a value.
    defined: float


def causes(run: KernelRun) -> list[Cause]:
    """Find the causes of the cells that are out of bounds.

    The search first tries one bug for all failing layers together. If none fits, it explains each layer alone, and joins layers
    with the same bug, heads and groups into one cause, unless the bug would show on correct calls there, fits fewer than
    `_LEAST_FAILING` calls, or fits one in a layer that it does not explain: then it is not the layer that decides. In every wrong
    sequence, a hypothesis must match the output within the call's bound in every cell of its layers and heads. Correct calls on
    which it would show are counted.

    Returns:
        The causes: leaks first, then those with the most failing calls.
    """
    layers = sorted({result.call.layer for result in (*run.results, *run.drawn) if result.fails})
    if not layers:
        return []
    together = _explain(run, layers)
    if together.hypotheses or len(layers) == 1:
        return [together]
    groups: dict[object, list[int]] = {}
    for layer in layers:
        alone = _explain(run, [layer])
        bugs = tuple((h.id, h.about) for h in alone.hypotheses)
        # A bug that would show on correct calls of the layer explains the wrong ones by chance.
        key = (bugs, alone.heads, frozenset(alone.wrong_groups)) if bugs and not alone.spared else ()
        groups.setdefault(key, []).append(layer)
    by_group = [_explain(run, group) for group in groups.values()]
    failing = [result for result in (*run.results, *run.drawn) if result.fails]
    for cause in by_group:
        elsewhere = [result for result in failing if result.call.layer not in cause.layers]
        fits = any(h.id in BY_ID and _compared(h, result) is not None for h in cause.hypotheses for result in elsewhere)
        if cause.hypotheses and (fits or (run.drawn and len(cause.failing) < _LEAST_FAILING)):
            return [together]
    return sorted(by_group, key=lambda cause: (not any(h.kind == LEAK for h in cause.hypotheses), -len(cause.failing)))


def _compared(hypothesis: Bug, result: CallResult) -> Tensor | None:
    """Return what `explaining` returns, computed once for a result: before and after experiments, alone and with other layers."""
    known = result.explained
    if hypothesis.id not in known:
        known[hypothesis.id] = explaining(hypothesis, result)
    return known[hypothesis.id]


def _explain(run: KernelRun, layers: Sequence[int]) -> Cause:
    results = [*run.results, *run.drawn]
    inside = [o for o in results if o.call.layer in layers]
    one_layer = len({o.call.layer for o in results}) == 1  # to which a check moves its calls where layers do not matter
    failing = sorted((o for o in inside if o.fails), key=lambda o: (o.call.k.numel(), o.call.q.numel()))
    heads = sorted({o.call.spec.first_head + int(h) for o in failing for h in o.failing.any(0).nonzero().flatten()})
    off = _over(failing)
    oracle_error = float(relative_l1(off)) if off[_SIZE] else float("inf")
    fits = [f for h in FAMILY if (f := _fit(h, inside, failing, heads, oracle_error, _compared))]
    chosen = _choose(fits)
    scaled = _scaled(failing)
    # Its factor is free, so it has to fit better than hypotheses without a free parameter.
    multiple = _fit(scaled, inside, failing, heads, oracle_error, explaining) if scaled else None
    if multiple is not None and not any(f.error <= _TIE_FACTOR * multiple.error for f in chosen):
        chosen = [multiple]
    return Cause(
        hypotheses=tuple(f.hypothesis for f in chosen),
        layers=tuple(layers),
        heads=tuple(heads),
        groups=_groups(inside, [(known, bad) for known, bad in run.points if one_layer or known["layer"] in layers]),
        spared=chosen[0].spared if chosen else 0,
        hypothesis_error=chosen[0].error if chosen else float("nan"),
        oracle_error=oracle_error,
        failing=tuple(failing),
    )


def _groups(
    results: Sequence[CallResult], points: Sequence[tuple[Mapping[str, object], bool]]
) -> dict[Group, tuple[int, int]]:
    """Count the sequences with new tokens in each group: (wrong, all)."""
    counts: dict[Group, tuple[int, int]] = {}
    for o in results:
        bad = _sequences(o, o.failing) if o.fails else set()
        for b, (new, prefix) in enumerate(zip(o.call.lens_q, o.call.prefixes, strict=True)):
            if new:
                wrong, every = counts.get(group := (o.call.phase, prefix > 0), (0, 0))
                counts[group] = wrong + (b in bad), every + 1
    for known, is_wrong in points:
        place = str(known["phase"]), known["prefix"] != 0
        wrong, every = counts.get(place, (0, 0))
        counts[place] = wrong + is_wrong, every + 1
    return counts


def nearest(cause: Cause) -> tuple[Bug, float] | None:
    """Return the nearest hypothesis on the smallest failing calls and its relative L1 there, or None if attention is as near."""
    failing, distances = cause.failing[:_NEAREST_ON], list[tuple[float, Bug]]()
    for hypothesis in FAMILY:
        total = torch.zeros(len(SUMS), dtype=torch.float64)
        for o in failing:
            expected = hypothesis.compute(o.call, o.cells.rows)
            expected = truth(o.call) if expected is None else expected
            if not bool(expected.isfinite().all()):
                break
            total += deviation(o.out, expected, o.cells)[o.failing].sum(0)
        else:
            distances.append((float(relative_l1(total)) if total[_SIZE] else math.inf, hypothesis))
    off, bug = min(distances, key=lambda pair: pair[0], default=(math.inf, None))
    return (bug, off) if bug is not None and off <= _FIT_SHARE * float(relative_l1(_over(failing))) else None


def _scaled(failing: Sequence[CallResult]) -> Bug | None:
    """Return the scaled-output hypothesis with the factor of the finest dtype's failing cells, or None if it is not finite."""
    finest = min(torch.finfo(o.call.q.dtype).eps for o in failing)
    chosen = [o for o in failing if torch.finfo(o.call.q.dtype).eps == finest]
    factor = float(slope(_over(chosen)))
    if not math.isfinite(factor):
        return None
    if not factor:
        about = "the output is zero, as if it were not written"
        return Bug(OUTPUT_NOT_WRITTEN, "output not written", about, GAINS[OUTPUT_NOT_WRITTEN], "gain", _zero)

    def multiple(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor:
        return factor * oracle(call, rows)

    about = f"every output is {factor:.4g} times the correct value"
    return Bug(OUTPUT_SCALED, "output scaled", about, GAINS[OUTPUT_SCALED], "gain", multiple)


def _over(failing: Sequence[CallResult]) -> Tensor:
    """Sum the errors over all failing cells, float64 [7]."""
    return torch.stack([o.off[o.failing].sum(0) for o in failing]).sum(0)


def _zero(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor:
    queries = len(call.q) if rows is None else len(rows)
    return call.q.new_zeros(queries, call.q.shape[1], call.v.shape[2], dtype=torch.float64)


def _choose(fits: Sequence[_Fit]) -> list[_Fit]:
    """Choose the fits that are indistinguishable from the best and need the fewest restrictions; leaks before all others."""
    best = min((f.error for f in fits), default=0.0)
    tied = [f for f in fits if f.error <= _TIE_FACTOR * best + 1e-12]
    # A hypothesis that leaves much undefined matches anything there.
    tied = [f for f in tied if f.defined == max(g.defined for g in tied)]
    least = [f for f in tied if f.confined == min(g.confined for g in tied)]
    return sorted(least, key=lambda f: (f.hypothesis.kind != LEAK, f.error))


def _fit(
    hypothesis: Bug,
    inside: Sequence[CallResult],
    failing: Sequence[CallResult],
    heads: Sequence[int],
    oracle_error: float,
    compared: _Explaining,
) -> _Fit | None:
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    spared, everywhere = 0, True
    for o in failing:  # smallest first: most hypotheses are ruled out by one small call
        off = compared(hypothesis, o)
        if off is None:
            return None
        violated = _violated(o, relative_l1(off), heads)
        if _sequences(o, violated) & _sequences(o, o.failing):  # no condition on sequences separates these
            return None
        total += off[o.failing].sum(0)
        spared += bool(violated.any())
        others = sorted({o.call.spec.first_head + head for head in range(o.own.shape[1])} - set(heads))
        everywhere &= not bool(_violated(o, relative_l1(off), others).any())
    error = float(relative_l1(total)) if total[_SIZE] else 0.0
    defined = float(total[SUMS.index("compared")] + total[SUMS.index("nonfinite")])
    if not defined or error > _FIT_SHARE * oracle_error:
        return None
    seen = {id(o) for o in failing}
    for o in inside:
        if id(o) not in seen and (off := compared(hypothesis, o)) is not None:
            spared += bool(_violated(o, relative_l1(off), heads).any())
    if spared and len(failing) == 1:
        return None  # it fits one call by chance, and calls on which it would show are right
    return _Fit(hypothesis, error, spared, int(spared > 0) + int(not everywhere), defined)


def _violated(o: CallResult, off: Tensor, heads: Sequence[int]) -> Tensor:
    """Find the cells of these heads (those in the layer) that pass although the hypothesis predicts a failure."""
    chosen = torch.zeros_like(o.failing)
    columns = [head - o.call.spec.first_head for head in heads]
    chosen[:, [column for column in columns if 0 <= column < chosen.shape[1]]] = True
    return chosen & ~o.failing & (off > o.fit_bounds)


def _sequences(o: CallResult, cells: Tensor) -> set[int]:
    """Return the sequences with one of these cells (bool [cells, num_q_heads])."""
    return {o.cells.sequence[int(c)] for c in cells.any(1).nonzero()}


def explaining(hypothesis: Bug, result: CallResult) -> Tensor | None:
    """Sum the errors of an output against a hypothesis's output.

    Returns:
        float64 [cells, num_q_heads, 7], or None if the hypothesis does not show on the call, or if its distance exceeds the
        result's `fit_bounds` in a failing cell.
    """

    def against(cells: CallCells) -> Tensor | None:
        expected = hypothesis.compute(result.call, cells.rows)
        return None if expected is None else deviation(result.out, expected, cells)

    of_row = result.cells.of_row
    if of_row.numel() * result.call.k.shape[0] * result.call.q.shape[1] > _SMALL_SCORES:
        # A few queries rule out most hypotheses, which are far off. The limit is rigorous, so no correct one is lost.
        few = against(result.cells.at(torch.arange(0, of_row.numel(), _FEW, device=of_row.device)))
        if few is None or _ruled_out(few, result):
            return None
    total = against(result.cells)
    if total is None or bool((relative_l1(total) > result.fit_bounds)[result.failing].any()):
        return None
    return None if _leaves_queries(hypothesis, result) else total


def _leaves_queries(hypothesis: Bug, result: CallResult) -> bool:
    """Return True if a wrong query in a cell within bounds stays out of bounds: such a cell would accept any hypothesis."""
    wrong = result.wrong_queries
    if not wrong:
        return False
    places = sorted({query.place for query in wrong})
    cells = result.cells.at(torch.tensor(places, device=result.cells.of_row.device))
    expected = hypothesis.compute(result.call, cells.rows)
    if expected is None:
        return True
    off = with_all_heads(distance(row_deviation(result.out, expected, cells))).cpu()
    size = with_all_heads(result.by_row[..., _SIZE]).cpu()
    columns = [-1 if query.head is None else query.head for query in wrong]
    return any(
        float(off[places.index(query.place), head]) > query.bound * float(size[query.place, head])
        for query, head in zip(wrong, columns, strict=True)
    )


def _ruled_out(some: Tensor, result: CallResult) -> bool:
    """Return True if some of the queries prove that the distance over all queries exceeds a failing cell's bounds."""
    # Let d be the difference over some queries, D the difference over all, and S the size of the expected output. S is at most
    # |out| + D and D at least d, so D / S is at least d / (|out| + d).
    difference = some[..., SUMS.index("difference")]
    least = difference / (result.size + difference).clamp(min=torch.finfo(torch.float64).tiny)
    beyond = (least > result.fit_bounds) | (some[..., SUMS.index("nonfinite")] > 0)
    return bool(beyond[result.failing].any())
