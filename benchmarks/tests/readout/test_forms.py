"""Each form, on weights that have it and on weights that have others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Flags, Numbers, WeightReading, right_weights, scores_of, visible
from assay.harness.readout.forms import BLANK, Fit, Row, Tolerance, fits
from assay.harness.readout.probing import CallPlan
from assay.harness.readout.queries import Queries

CALL = CallPlan(((6, 10), (5, 9)), (4, 2), 32, seed=3).make()
KEYS = 30
QUERY, HEAD, OWN = 3, 2, 1
"""The row that is explained: position 13 in the first sequence, so that it sees 14 keys; q head 2 reads kv head 1."""
SEEN = 14
ROWS = np.arange(11)
SCORES = scores_of(CALL, ROWS)
RIGHT = right_weights(CALL, ROWS, SCORES)
OF_ROW = SCORES[QUERY, HEAD, OWN]
VISIBLE: Flags = np.arange(KEYS) < SEEN


def row_of(
    weights: Numbers,
    constant: float | Numbers = 0.0,
    off: float = 0.0,
    call: AttentionCall = CALL,
    noise: float = 2e-6,
    tolerance: Tolerance | None = None,
) -> Row:
    """The row with these weights, [num_kv_heads, total_k], as a float32 kernel gives them."""
    draw = np.random.default_rng(0)
    every = right_weights(call, ROWS, scores_of(call, ROWS))
    every[QUERY, HEAD] = weights * (1 + noise * draw.standard_normal(weights.shape))
    constants = np.zeros((11, 4, 32))
    constants[QUERY, HEAD] = constant
    reading = WeightReading(call, ROWS, every, constants, np.full((11, 4), off))
    return Row(reading, Queries(call, range(len(call.q))), QUERY, HEAD, tolerance or Tolerance())


def on_own(weights: Numbers) -> Numbers:
    """Weights of one kv head's keys, [total_k], among those of all."""
    found = np.zeros((2, KEYS))
    found[OWN] = weights
    return found


def softmax(scores: Numbers, factors: Numbers | Flags = VISIBLE, denominator: float | None = None) -> Numbers:
    """exp(score) times a factor, divided by its sum or by another denominator."""
    exps = factors * np.exp(scores)
    found: Numbers = exps / (exps.sum() if denominator is None else denominator)
    return found


def factors(**of: float) -> Numbers:
    """1 for the keys that should be seen, and other factors for some: key3=2.0."""
    found = VISIBLE.astype(float)
    for name, value in of.items():
        found[int(name.removeprefix("key"))] = value
    return found


def moved_values() -> Numbers:
    """The value of key 4 is that of key 20, the values of keys 8 and 9 are that of kv head 0's key 2."""
    weights = RIGHT[QUERY, HEAD].copy()
    weights[OWN, 20], weights[OWN, 4] = weights[OWN, 4], 0.0
    weights[0, 2] = weights[OWN, [8, 9]].sum()
    weights[OWN, [8, 9]] = 0.0
    return weights


def read_twice() -> Numbers:
    """The values of keys 4 and 5 are those of keys 8 and 7, which are also read in their own place."""
    weights = RIGHT[QUERY, HEAD].copy()
    weights[OWN, [8, 7]] += weights[OWN, [4, 5]]
    weights[OWN, [4, 5]] = 0.0
    return weights


def split() -> Numbers:
    """Keys from 8 on have a fifth more weight: splits that are merged wrongly."""
    return on_own(softmax(OF_ROW, np.where(np.arange(KEYS) < 8, 1.0, 1.2) * VISIBLE))


ALL_OF_ROW = float((VISIBLE * np.exp(OF_ROW)).sum())


CASES: dict[str, Callable[[], Row]] = {
    "right": lambda: row_of(RIGHT[QUERY, HEAD]),
    "unseen": lambda: row_of(on_own(softmax(OF_ROW, factors(key0=0, key1=0)))),
    "seen too": lambda: row_of(on_own(softmax(OF_ROW, factors(key14=1, key20=1)))),
    "twice": lambda: row_of(on_own(softmax(OF_ROW, factors(key13=2)))),
    "of all": lambda: row_of(on_own(softmax(OF_ROW, factors(key0=0), ALL_OF_ROW))),
    "blank": lambda: row_of(on_own(softmax(OF_ROW, factors(key5=0), ALL_OF_ROW - np.exp(OF_ROW[5]) + 1))),
    "phantoms": lambda: row_of(on_own(softmax(OF_ROW, VISIBLE, ALL_OF_ROW + 3))),
    "scale": lambda: row_of(on_own(softmax(1.4 * OF_ROW))),
    "pieces": lambda: row_of(split()),
    "output": lambda: row_of(RIGHT[4, 3]),
    "query": lambda: row_of(on_own(softmax(SCORES[9, 1, OWN]))),
    "values": lambda: row_of(moved_values()),
    "read twice": lambda: row_of(read_twice()),
}


@pytest.mark.parametrize(
    ("case", "forms"),
    [
        ("right", {"right"}),
        ("unseen", {"keys", "pieces"}),  # one factor for all that are seen
        ("seen too", {"keys"}),
        ("twice", {"keys", "pieces"}),
        ("of all", {"keys-and-mass", "pieces"}),
        ("blank", {"keys", "pieces"}),
        ("phantoms", {"keys-and-mass", "pieces"}),
        ("scale", {"scale"}),
        ("pieces", {"keys", "pieces"}),
        ("output", {"output"}),
        ("query", {"query"}),
        ("values", {"values"}),
        ("read twice", {"keys", "values"}),  # four keys, four factors
    ],
)
def test_the_forms_that_fit(case: str, forms: set[str]) -> None:
    assert {fit.form for fit in fits(CASES[case]())} == forms


def fit_of(case: str, form: str) -> Fit:
    (found,) = [fit for fit in fits(CASES[case]()) if fit.form == form]
    return found


def test_the_number_of_a_form_is_the_factor_of_scores() -> None:
    assert fit_of("scale", "scale").number == pytest.approx(1.4, rel=1e-4)


@pytest.mark.parametrize(
    ("case", "form", "keys"),
    [
        ("unseen", "keys", factors(key0=0, key1=0)),
        ("seen too", "keys", factors(key14=1, key20=1)),
        ("twice", "keys", factors(key13=2)),
        ("of all", "keys-and-mass", factors(key0=0)),
        ("blank", "keys", factors(key5=BLANK)),
        ("phantoms", "keys-and-mass", factors()),
        ("pieces", "keys", np.where(np.arange(KEYS) < 8, 1.0, 1.2) * VISIBLE),
    ],
)
def test_the_factors_of_keys(case: str, form: str, keys: Numbers) -> None:
    found = fit_of(case, form).keys
    assert found is not None
    np.testing.assert_allclose(found, keys, atol=1e-4)


def test_what_the_denominator_counts_in_vain() -> None:
    found = fit_of("phantoms", "keys-and-mass")
    assert found.phantom == pytest.approx(3, rel=1e-4)


def test_another_query_must_give_every_weight() -> None:
    scores = SCORES[9, 1, OWN].copy()
    scores[6] += 0.01
    assert fits(row_of(on_own(softmax(scores)))) == []


def test_the_pieces_say_their_factors() -> None:
    found = fit_of("pieces", "pieces").keys
    assert found is not None
    assert np.isnan(found[SEEN:]).all()
    assert found[8] - found[7] == pytest.approx(np.log(1.2), rel=1e-3)
    unchanged = fit_of("of all", "pieces").keys
    assert unchanged is not None
    assert np.abs(unchanged[1:SEEN]).max() < 1e-4  # relative to the right weights


def test_where_values_come_from() -> None:
    found = fit_of("values", "values").keys
    assert found is not None
    wanted = np.where(VISIBLE, OWN * KEYS + np.arange(KEYS), -1)
    wanted[4], wanted[[8, 9]] = OWN * KEYS + 20, 2
    assert found.tolist() == wanted.tolist()


def test_a_right_row_is_only_right_however_noisy_within_the_tolerance() -> None:
    assert fits(row_of(RIGHT[QUERY, HEAD], noise=2e-5)) == [Fit("right")]
    assert Fit("right") not in fits(row_of(RIGHT[QUERY, HEAD], noise=1e-3))


def test_right_weights_with_something_added_are_not_right() -> None:
    assert Fit("right") not in fits(row_of(RIGHT[QUERY, HEAD], 0.1))


def test_weights_that_do_not_give_the_output_are_not_explained() -> None:
    assert fits(row_of(on_own(softmax(1.4 * OF_ROW)), off=0.1)) == []
    assert fits(row_of(RIGHT[QUERY, HEAD], off=0.1)) == [Fit("right")]


def test_weights_at_random_have_no_form() -> None:
    weights = np.random.default_rng(1).random((2, KEYS))
    assert fits(row_of(weights / weights.sum())) == []


def test_all_queries_that_fit_are_named_up_to_a_dozen() -> None:
    def sources(equal: int) -> list[tuple[int, int]]:
        """Sources of a row that takes the place of queries, of which so many are equal."""
        q = CALL.q.clone()
        q.view(44, 32)[:equal] = q[0, 0]
        q[QUERY, HEAD] = CALL.q[QUERY, HEAD]
        call = replace(CALL, q=q)
        taken = on_own(softmax(scores_of(call, np.array([0]))[0, 0, OWN]))
        return [fit.source for fit in fits(row_of(taken, call=call)) if fit.form == "query"]

    assert sources(6) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert len(sources(44)) == 12


def long_row(weights: Callable[[Numbers, Flags], Numbers]) -> Row:
    call = CallPlan(((1, 299),), (2, 1), 32).make()
    rows = np.array([0])
    scores = scores_of(call, rows)[0, 0, 0]
    every = right_weights(call, rows, scores_of(call, rows))
    every[0, 0, 0] = weights(scores, visible(call, rows)[0])
    reading = WeightReading(call, rows, every, np.zeros((1, 2, 32)), np.zeros((1, 2)))
    return Row(reading, Queries(call, range(1)), 0, 0, Tolerance())


def test_in_a_long_row_a_plain_form_is_enough() -> None:
    def last_unseen(scores: Numbers, seen: Flags) -> Numbers:
        return softmax(scores, seen & (np.arange(300) < 299))

    def last_faint(scores: Numbers, seen: Flags) -> Numbers:
        return softmax(scores, np.where(np.arange(300) < 200, 1.0, 1.3) * seen)

    assert {fit.form for fit in fits(long_row(last_unseen))} == {"keys"}
    assert {fit.form for fit in fits(long_row(last_faint))} == {"keys", "pieces"}


def test_a_key_whose_weight_is_too_small_to_be_read_counts_as_seen() -> None:
    k = CALL.k.clone()
    k[2, OWN] = -20 * CALL.q[QUERY, HEAD]
    call: AttentionCall = replace(CALL, k=k)
    scores = scores_of(call, ROWS)[QUERY, HEAD, OWN]
    assert softmax(scores)[2] < 1e-8
    seen = factors(key13=2)
    (found,) = [fit for fit in fits(row_of(on_own(softmax(scores, seen)), call=call)) if fit.form == "keys"]
    assert found.keys is not None
    assert found.keys.tolist() == seen.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype) -> None:
    rounding = torch.finfo(dtype).eps
    for tolerance, is_read in ((Tolerance(), False), (Tolerance(2 * rounding, 8 * rounding, rounding / 1000), True)):
        row = row_of(on_own(softmax(1.4 * OF_ROW)), noise=rounding / 2, tolerance=tolerance)
        assert ("scale" in {fit.form for fit in fits(row)}) == is_read


def test_the_source() -> None:
    assert fit_of("output", "output").source == (4, 3)
    assert fit_of("query", "query").source == (9, 1)


def test_values_that_are_read_twice() -> None:
    found = fit_of("read twice", "values").keys
    assert found is not None
    wanted = np.where(VISIBLE, OWN * KEYS + np.arange(KEYS), -1)
    wanted[[4, 5]] = OWN * KEYS + np.array([8, 7])
    assert found.tolist() == wanted.tolist()


def test_what_two_keys_gained_must_be_what_two_others_lost() -> None:
    weights = read_twice()
    weights[OWN, 8] *= 1.01
    weights[OWN, 7] += 1 - weights.sum()
    assert "values" not in {fit.form for fit in fits(row_of(weights))}
    swapped = RIGHT[QUERY, HEAD].copy()
    swapped[OWN, [4, 5]] = swapped[OWN, [5, 4]]
    (found,) = [fit for fit in fits(row_of(swapped)) if fit.form == "values"]
    assert found.keys is not None
    assert found.keys[[4, 5, 6]].tolist() == [OWN * KEYS + 5, OWN * KEYS + 4, OWN * KEYS + 6]
