"""Effects and operators give what a plain loop over queries, heads and keys gives with the same fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.bugs.family import BY_ID
from assay.harness.readout.edges import Amount, Sum
from assay.harness.readout.effects import (
    _BLOCK_SIZES,
    _TAILS,
    _block_scales,
    constant,
    known_bug,
    merged,
    multiplied,
)
from assay.harness.readout.elsewhere import SOURCES, from_elsewhere
from assay.harness.readout.forms import BLANK
from assay.harness.readout.formulas import DESCALES, SCALES, TIMES, constant_formula
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.readout.queries import Queries

Numbers = NDArray[np.float64]
LENS = [(3, 5), (4, 0), (2, 7)]
HEADS = (4, 2)
DIM = 32


@pytest.fixture(scope="module")
def call() -> AttentionCall:
    return call_of(LENS, HEADS, DIM, torch.float64, "cpu", seed=3)


class Naive:
    """Attention in loops, of which a test overrides what its fault changes. i, p and j are as in a rule, s is the sequence."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.q, self.k, self.v = (x.numpy().copy() for x in (call.q, call.k, call.v))
        self.starts_q, self.starts_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()

    def place(self, row: int) -> tuple[int, int, int]:
        """Sequence, i and p of a packed row."""
        s = max(s for s, start in enumerate(self.starts_q[:-1]) if start <= row)
        i = row - self.starts_q[s]
        return s, i, i + LENS[s][1]

    def sees(self, row: int, h: int, s: int, j: int) -> float:
        """The factor of the weight of key j of sequence s."""
        own, _, p = self.place(row)
        return float(s == own and j <= p)

    def score(self, row: int, h: int, key: int) -> float:
        return float(self.call.scale * self.q[row, h] @ self.k[key, h // 2])

    def extra(self, row: int, h: int) -> float:
        """Keys with a score of 0 that the denominator counts too."""
        return 0.0

    def value(self, key: int, row: int, h: int) -> Numbers:
        found: Numbers = self.v[key, h // 2]
        return found

    def weights(self, row: int, h: int) -> dict[int, float]:
        found = {}
        for s, (new, prefix) in enumerate(LENS):
            for j in range(new + prefix):
                key = self.starts_k[s] + j
                if factor := self.sees(row, h, s, j):
                    found[key] = factor * math.exp(self.score(row, h, key))
        total = sum(found.values()) + self.extra(row, h)
        return {key: weight / total for key, weight in found.items()}

    def row(self, row: int, h: int) -> Numbers:
        return sum((w * self.value(key, row, h) for key, w in self.weights(row, h).items()), np.zeros(self.v.shape[2]))

    def all(self) -> Numbers:
        return np.array([[self.row(row, h) for h in range(HEADS[0])] for row in range(len(self.q))])


def queries(call: AttentionCall) -> Queries:
    return Queries(call, range(len(call.q)))


def literal(name: str, op: str, value: int, minus: str = "", **more: int) -> Literal:
    return Literal(Term(name, minus, **more), op, value)  # type: ignore[arg-type]


def only(*literals: Literal) -> Condition:
    return Condition(literals)


def block_scale(*args: object) -> Effect:
    return next(one for one in _block_scales() if one.args == args)


def agree(effect: Effect, call: AttentionCall, expected: Numbers) -> None:
    given = queries(call)
    out = effect.outputs(given)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)
    some = Queries(call, [1, 4, 8])
    np.testing.assert_allclose(effect.outputs(some), expected[[1, 4, 8]], rtol=1e-9, atol=1e-12)
    assert not np.allclose(out, given.right, equal_nan=True), "the effect changes nothing on this call"


def test_the_right_output_is_attention(call: AttentionCall) -> None:
    np.testing.assert_allclose(queries(call).right, Naive(call).all(), rtol=1e-9, atol=1e-12)


# Masks and weights

OWN_KEY, CACHED = literal("pos", "==", 0, "j"), literal("j", "<", 0, "prefix")


class Unseen(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        return super().sees(row, h, s, j) * (j >= LENS[s][1])


class Heavier(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        return super().sees(row, h, s, j) * (3.0 if j % 3 == 1 else 1.0)


class OneTooMany(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        own, _, p = self.place(row)
        return float(s == own and j <= p + 1)


class PreviousToo(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        return super().sees(row, h, s, j) + 0.5 * (s == self.place(row)[0] - 1)


class OthersToo(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        return super().sees(row, h, s, j) + float(s != self.place(row)[0])


class Blank(Naive):
    def sees(self, row: int, h: int, s: int, j: int) -> float:
        return super().sees(row, h, s, j) * (j != 0)

    def extra(self, row: int, h: int) -> float:
        return 1.0


class Phantom(Naive):
    def extra(self, row: int, h: int) -> float:
        new, prefix = LENS[self.place(row)[0]]
        return float((new + prefix) % 4)


@pytest.mark.parametrize(("naive", "effect"), [
    (Unseen, KeyFactors((KeyFactor("seen", only(CACHED), 0.0),))),
    (Heavier, KeyFactors((KeyFactor("seen", only(literal("j", "==", 1, modulo=3)), 3.0),))),
    (OneTooMany, KeyFactors((KeyFactor("hidden", only(literal("pos", "==", -1, "j")), 1.0),))),
    (PreviousToo, KeyFactors((KeyFactor("foreign", only(literal("other", "==", -1)), 0.5),))),
    (OthersToo, KeyFactors((KeyFactor("foreign", ALWAYS, 1.0),))),
    (Blank, KeyFactors((KeyFactor("seen", only(literal("j", "<", 1)), BLANK),))),
    (Phantom, KeyFactors((), phantom=Sum(((1, Amount("total", "mod", 4)),)))),


])  # fmt: skip
def test_keys_are_seen_and_weighted(naive: type[Naive], effect: Effect, call: AttentionCall) -> None:
    agree(effect, call, naive(call).all())


def test_a_query_that_sees_no_key_has_an_output_of_zero(call: AttentionCall) -> None:
    assert not KeyFactors((KeyFactor("seen", ALWAYS, 0.0),)).outputs(queries(call)).any()


# Scores and outputs


def scored(change: Callable[[float, float, int], float]) -> type[Naive]:
    """Attention with other scores: (score, softmax scale, distance of the key) -> score."""

    class Changed(Naive):
        def score(self, row: int, h: int, key: int) -> float:
            s, _, p = self.place(row)
            return change(super().score(row, h, key), self.call.scale, abs(p - (key - self.starts_k[s])))

    return Changed


@pytest.mark.parametrize(("naive", "effect"), [
    (scored(lambda s, scale, d: s / scale), multiplied(SCALES[0])),
    (scored(lambda s, scale, d: s * scale), multiplied(SCALES[1])),
    (scored(lambda s, scale, d: s / scale**2), multiplied(SCALES[2])),
    (scored(lambda s, scale, d: s * math.log(2)), multiplied(SCALES[3])),
    (scored(lambda s, scale, d: s / math.log(2)), multiplied(SCALES[4])),
    (scored(lambda s, scale, d: s / 2), multiplied(SCALES[5])),
    (scored(lambda s, scale, d: s / 2**0.5), multiplied(SCALES[6])),
    (scored(lambda s, scale, d: s * 2**0.5), multiplied(SCALES[7])),
    (scored(lambda s, scale, d: 3.0 * s), multiplied(constant_formula(3.0))),


])  # fmt: skip
def test_scores_change(naive: type[Naive], effect: Effect, call: AttentionCall) -> None:
    agree(effect, call, naive(call).all())


def scale_of(x: Numbers, kv: int, rows: list[int]) -> float:
    """The largest size of a number in some rows of a kv head."""
    return max(abs(float(number)) for row in rows for number in x[row, kv])


@pytest.mark.parametrize("what", ["k", "v"])
def test_a_block_is_dequantised_with_the_scale_of_the_one_before_it(what: str, call: AttentionCall) -> None:
    naive = Naive(call)
    x, given = getattr(naive, what), getattr(Naive(call), what)
    for s, (new, prefix) in enumerate(LENS):
        total = new + prefix
        parts = [[naive.starts_k[s] + j for j in range(start, min(start + 4, total))] for start in range(0, total, 4)]
        for number, rows in enumerate(parts):
            beside = max(number - 1, 0)
            for kv in range(HEADS[1]):
                x[rows, kv] *= scale_of(given, kv, parts[beside]) / scale_of(given, kv, rows)
    agree(block_scale(what, 4, "previous"), call, naive.all())


def spans(naive: Naive) -> list[list[int]]:
    return [list(range(start, stop)) for start, stop in pairwise(naive.starts_k)]


@pytest.mark.parametrize("words", ["the next kv head", "kv head 0", "the first sequence", "the previous sequence"])
def test_k_and_v_get_the_scale_of_another_head_or_sequence(words: str, call: AttentionCall) -> None:
    both = Naive(call)
    for x in (both.k, both.v):
        given = x.copy()
        for s, rows in enumerate(spans(both)):
            for kv in range(HEADS[1]):
                if words.endswith(("head", "0")):
                    every = list(range(len(x)))
                    factor = scale_of(given, 0 if words.endswith("0") else 1 - kv, every) / scale_of(given, kv, every)
                else:
                    there = spans(both)[0 if words == "the first sequence" else max(s - 1, 0)]
                    factor = scale_of(given, kv, there) / scale_of(given, kv, rows)
                x[rows, kv] *= factor
    one = next(one for one in DESCALES if words in one[0].words)
    agree(multiplied(*one), call, both.all())


def test_v_gets_the_scale_of_k(call: AttentionCall) -> None:
    naive = Naive(call)
    given, every = naive.v.copy(), list(range(len(naive.v)))
    for kv in range(HEADS[1]):
        naive.v[:, kv] *= scale_of(naive.k, kv, every) / scale_of(given, kv, every)
    agree(multiplied(output=TIMES[0]), call, naive.all())


def test_blocks_of_all_sizes_are_tried() -> None:
    found = {one.args for one in _block_scales()}
    whose = {args[2] for args in found}
    assert found == {(what, size, other) for what in "kv" for size in _BLOCK_SIZES for other in whose}


def test_a_known_bug_is_its_hypothesis(call: AttentionCall) -> None:
    one = BY_ID["mask-top-left"]
    expected = one.compute(call)
    assert expected is not None
    agree(known_bug(one), call, expected.numpy())


# Dimensions


# Elsewhere


def source_of(words: str, what: str = "output") -> Effect:
    return from_elsewhere(next(one for one in SOURCES if one.words == words), what)


def there(words: str, row: int, h: int, naive: Naive) -> tuple[int, int] | None:
    """Where a query takes something from, for some sources."""
    s, i, _ = naive.place(row)
    starts = naive.starts_q
    return {
        "query i - 1": (row - 1, h) if i else None,
        "query i + 2": (row + 2, h) if i + 2 < LENS[s][0] else None,
        "the query in packed row r - 1": ((row - 1) % starts[-1], h),
        "the last query of its sequence": (starts[s + 1] - 1, h),
        "query i of the previous sequence": (starts[s - 1] + i, h) if s and i < LENS[s - 1][0] else None,
        "query i of the first sequence": (i, h) if i < LENS[0][0] else None,
        "the last query of the previous sequence": (starts[s] - 1, h) if s else None,
        "the next q head": (row, (h + 1) % 4),
        "the other q head of its pair": (row, h ^ 1),
        "the first q head of its group": (row, h // 2 * 2),
        "q head num_q_heads - 1 - h": (row, 3 - h),
        "query i - 1 of the previous q head": (row - 1, (h - 1) % 4) if i else None,
        "the query in packed row b + i": (s + i, h),
        "the query in packed row b x (new of the first sequence) + i": within(s * LENS[0][0] + i, h),
        "the query in packed row b x (the largest new) + i": within(s * max(new for new, _ in LENS) + i, h),
        "the query and q head that lie there in memory as [heads, tokens]": (
            (row * 4 + h) % starts[-1], (row * 4 + h) // starts[-1],
        ),
        "the query and q head that lie there in memory as [tokens, heads]": (
            (h * starts[-1] + row) // 4, (h * starts[-1] + row) % 4,
        ),
    }[words]  # fmt: skip


def within(row: int, h: int) -> tuple[int, int] | None:
    return (row, h) if row < sum(new for new, _ in LENS) else None


PLACES = ("query i - 1", "query i + 2", "the last query of its sequence",
          "query i of the previous sequence", "query i of the first sequence",
          "the next q head", "the other q head of its pair", "the first q head of its group",
          "query i - 1 of the previous q head", "the query in packed row b + i",
          "the query in packed row b x (new of the first sequence) + i", "the query in packed row b x (the largest new) + i",
          "the query and q head that lie there in memory as [heads, tokens]",
          "the query and q head that lie there in memory as [tokens, heads]")  # fmt: skip


# Merges


def test_outputs_are_multiplied_and_replaced(call: AttentionCall) -> None:
    right = Naive(call).all()
    agree(multiplied(output=constant_formula(0.9)), call, 0.9 * right)
    agree(constant(0.0), call, np.zeros_like(right))


@pytest.mark.parametrize("what", ["k", "v"])
def test_a_block_is_dequantised_with_the_scale_of_another_one(what: str, call: AttentionCall) -> None:
    naive = Naive(call)
    x, given = getattr(naive, what), getattr(Naive(call), what)
    blocks = [[rows[at : at + 8] for at in range(0, len(rows), 8)] for rows in spans(naive)]
    every = [block for some in blocks for block in some]
    for s, some in enumerate(blocks):
        for number, rows in enumerate(some):
            for kv in range(HEADS[1]):
                there = every[min(naive.starts_k[s] // 8 + number, len(every) - 1)]
                x[rows, kv] *= scale_of(given, kv, there) / scale_of(given, kv, rows)
    agree(block_scale(what, 8, "packed"), call, naive.all())


def test_dimensions_of_k_are_lost(call: AttentionCall) -> None:
    naive = Naive(call)
    naive.k = naive.k * (np.arange(DIM) < 8)
    agree(_TAILS[0], call, naive.all())


@pytest.mark.parametrize("words", PLACES)
def test_the_output_is_that_of_another_query(words: str, call: AttentionCall) -> None:
    naive = Naive(call)
    right = naive.all()
    expected = right.copy()
    for row in range(len(right)):
        for h in range(HEADS[0]):
            if place := there(words, row, h, naive):
                expected[row, h] = right[place]
    agree(source_of(words), call, expected)


@pytest.mark.parametrize("words", PLACES)
def test_the_q_is_that_of_another_query(words: str, call: AttentionCall) -> None:
    naive, other = Naive(call), Naive(call)
    for row in range(len(call.q)):
        for h in range(HEADS[0]):
            if place := there(words, row, h, naive):
                other.q[row, h] = naive.q[place]
    agree(source_of(words, "query"), call, other.all())


def merged_parts(call: AttentionCall, block: int, law: str) -> Numbers:
    """Each part's attention and log-sum-exp, and their merge with weights in proportion to exp of what `law` puts in its place."""
    naive = Naive(call)
    out = np.zeros_like(naive.all())
    for row in range(len(call.q)):
        s, _, p = naive.place(row)
        start, prefix = naive.starts_k[s], LENS[s][1]
        parts: dict[int, list[int]] = {}
        for j in range(p + 1):
            parts.setdefault(j // block if block else int(j >= prefix), []).append(start + j)
        for h in range(HEADS[0]):
            tops, outs = [], []
            for rows in parts.values():
                scores = np.array([naive.score(row, h, key) for key in rows])
                lse, weights = np.log(np.exp(scores).sum()), np.exp(scores) / np.exp(scores).sum()
                tops.append({"equal": 0.0, "base2": lse / math.log(2), "base-e": lse * math.log(2)}[law])
                outs.append(weights @ naive.v[rows, h // 2])
            out[row, h] = np.exp(tops) / np.exp(tops).sum() @ np.array(outs)
    return out


@pytest.mark.parametrize(("block", "law"), [(0, "equal"), (4, "equal"), (0, "base2"), (4, "base-e")])
def test_parts_are_merged_with_wrong_weights(block: int, law: str, call: AttentionCall) -> None:
    agree(merged(block, law), call, merged_parts(call, block, law))


@pytest.mark.parametrize("block", [0, 4])
def test_k_may_lose_the_mean_of_each_part(block: int, call: AttentionCall) -> None:
    naive = Naive(call)
    for s, (new, prefix) in enumerate(LENS):
        start, edges = naive.starts_k[s], list(range(0, new + prefix, 4)) if block else [0, prefix]
        for low, high in zip(edges, [*edges[1:], new + prefix], strict=True):
            if low < high:
                naive.k[start + low : start + high] -= naive.k[start + low : start + high].mean(0)
    agree(merged(block, "mean"), call, naive.all())


# Operators


def test_of_the_clauses_that_show_on_a_query_the_first_counts(call: AttentionCall) -> None:
    one, two = constant(1.0), constant(2.0)
    operator = Operator((Clause(one, only(literal("head", "==", 0))), Clause(two, only(literal("i", "<", 1)))))
    given = queries(call)
    expected = given.right.copy()
    for row in range(len(call.q)):
        if Naive(call).place(row)[1] == 0:
            expected[row] = 2.0
    expected[:, 0] = 1.0
    np.testing.assert_array_equal(operator.outputs(given), expected)


def test_without_clauses_an_operator_is_attention_and_does_not_share_its_output(call: AttentionCall) -> None:
    given = queries(call)
    out = Operator().outputs(given)
    np.testing.assert_array_equal(out, given.right)
    out[:] = 0
    assert given.right.any()
