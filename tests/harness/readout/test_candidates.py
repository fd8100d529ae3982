"""From what was read off a kernel with one fault comes the effect that made it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.reading import read
from assay.harness.readout.candidates import effects_of, key_factors
from assay.harness.readout.conditions import Condition, Literal, Term
from assay.harness.readout.edges import Amount, Sum
from assay.harness.readout.effects import (
    Answer,
    _block_scales,
    _kv_heads,
    _of_scores,
    _online_softmax,
    general_effects,
    merged,
    multiplied,
)
from assay.harness.readout.forms import Row, Tolerance, fits
from assay.harness.readout.formulas import DESCALES, SCALES, TIMES, Formula, constant_formula
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.operators import Effect, Operator
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample
from assay.harness.readout.sentences import sentence

CALLS = ([(9, 0)], [(5, 12), (6, 7)], [(1, 20), (1, 9)])


def call(number: int) -> AttentionCall:
    found = call_of(CALLS[number], (4, 2), 32, torch.float32, "cpu", seed=number)
    return found.with_spec(phase="decode" if number == 2 else "extend")


def outputs(effect: Effect, given: AttentionCall) -> Tensor:
    queries = Queries(given, range(len(given.q)))
    return torch.from_numpy(Operator(effect).outputs(queries))


def explained(effect: Effect, given: AttentionCall) -> Sample:
    """What is read off a kernel with this effect in one call."""
    queries = Queries(given, range(len(given.q)))
    reading = read(lambda one: outputs(effect, one), given, range(len(given.q)))
    assert reading is not None
    out = effect.outputs(queries)
    bad = (np.abs(out - queries.right).sum(-1) > 1e-4 * np.abs(queries.right).sum(-1)).ravel()
    rows = (Row(reading, *divmod(place, queries.heads), Tolerance()) for place in range(len(bad)))
    found = tuple(tuple(fits(row)) if wrong else () for row, wrong in zip(rows, bad, strict=True))
    return Sample(queries, out, bad, 1e-4, fits=found)


def readings(effect: Effect) -> list[Sample]:
    found = [explained(effect, call(number)) for number in range(len(CALLS))]
    return [one for one in found if one.bad.any()]


def words(effects: Iterable[Effect]) -> list[str]:
    return [sentence(Operator(effect)) for effect in effects]


def only(*literals: Literal) -> Condition:
    return Condition(literals)


def block_scale(*args: object) -> Effect:
    return next(one for one in _block_scales() if one.args == args)


CACHED = only(Literal(Term("j", "prefix", cost=0.2), "<", 0))


@pytest.mark.few(6)
@pytest.mark.parametrize("effect", [
    multiplied(SCALES[0]), multiplied(SCALES[3]), multiplied(constant_formula(0.75)),

    KeyFactors((), phantom=Sum((), 2)), KeyFactors((), phantom=Sum(((1, Amount("total", "gap", 16)),))),
    merged(0, "equal"), merged(0, "base2"),
], ids=lambda effect: words([effect])[0])  # fmt: skip
def test_the_effect_is_among_the_candidates(effect: Effect) -> None:
    assert words([effect])[0] in words(effects_of(readings(effect)))


@pytest.mark.few(4)
@pytest.mark.parametrize("effect", [
    KeyFactors((KeyFactor("seen", only(Literal(Term("pos", "j"), "<", 1)), 0.0),)),
    KeyFactors((KeyFactor("seen", CACHED, 0.0),)),
    KeyFactors((KeyFactor("seen", only(Literal(Term("j", modulo=3), "==", 1)), 0.0),)),
    KeyFactors((KeyFactor("seen", CACHED, 0.5),)),
    KeyFactors((KeyFactor("hidden", only(Literal(Term("pos", "j"), ">=", -1)), 1.0),)),
    KeyFactors((KeyFactor("foreign", only(Literal(Term("other"), "<", 0)), 1.0),)),

    KeyFactors((KeyFactor("seen", only(Literal(Term("pos", "j"), "==", 2)), 0.0),
                KeyFactor("hidden", only(Literal(Term("pos", "j"), "==", -2)), 1.0))),
], ids=lambda effect: words([effect])[0])  # fmt: skip
def test_a_rule_on_keys_is_mined(effect: KeyFactors) -> None:
    rules = key_factors(readings(effect))
    given = [Queries(call(number), range(sum(new for new, _ in CALLS[number]))) for number in range(len(CALLS))]
    assert any(all(np.allclose(rule.outputs(one), effect.outputs(one)) for one in given) for rule in rules)


def test_keys_whose_weight_would_be_too_small_to_read_do_not_hide_a_rule() -> None:
    no_mask = KeyFactors((KeyFactor("hidden", only(), 1.0),))
    given = call(1)
    sharp = replace(given, q=given.q * 8)
    sample = explained(no_mask, sharp)
    factors = np.array([fit.keys for fits_ in sample.fits or () for fit in fits_ if fit.form == "keys"])
    assert (factors[:, :17] == 0).any(), "each hidden key has a weight"
    assert no_mask.parts in [rule.parts for rule in key_factors([sample])]


@pytest.mark.few(8)
@pytest.mark.parametrize("effect", [
    next(_kv_heads()), multiplied(output=TIMES[0]), multiplied(output=constant_formula(0.9)), block_scale("v", 4, "previous"),
    *(_online_softmax(8, law) for law in ("neither", "numerator", "denominator", "late", "base2")), *list(_of_scores())[::9],
])  # fmt: skip
def test_effects_that_follow_from_outputs_alone_are_proposed(effect: Effect) -> None:
    answers: list[Answer] = []
    for number in range(len(CALLS)):
        queries = Queries(call(number), range(len(call(number).q)))
        out = effect.outputs(queries)
        bad = (np.abs(out - queries.right).sum(-1) > 1e-4 * np.abs(queries.right).sum(-1)).ravel()
        if bad.any():
            answers.append((queries, out, bad))
    assert words([effect])[0] in words(general_effects(answers))


@pytest.mark.parametrize("scales", DESCALES, ids=lambda scales: scales[0].words)
def test_a_scale_of_other_keys_is_computed_beside_a_sequence_without_keys(scales: tuple[Formula, Formula]) -> None:
    given = call_of([(0, 0), (5, 12)], (4, 2), 32, torch.float32, "cpu", seed=1)
    queries = Queries(given, range(len(given.q)))
    assert all(np.isfinite(scale.of(queries)).all() for scale in scales)
