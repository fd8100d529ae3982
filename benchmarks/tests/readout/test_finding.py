"""Each step of the search for an operator, on kernels with faults that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.kernels import declares
from assay.harness.bugs.faults import fault, rounded_oracle
from assay.harness.readout import finding, fitting
from assay.harness.readout.asking import _RIGHT_ROWS, _WRONG_ROWS
from assay.harness.readout.effects import constant, multiplied
from assay.harness.readout.finding import Finder
from assay.harness.readout.fitting import _CLAUSES, _FAR_FETCHED, _by_chance
from assay.harness.readout.forms import Tolerance
from assay.harness.readout.formulas import constant_formula
from assay.harness.readout.key_factors import KeyFactor, KeyFactors
from assay.harness.readout.mining import Condition, Literal, Term
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.readout.probing import BudgetSpentError, CallPlan, Prober, drawn_plans, extreme_plans, steep_plans
from assay.harness.readout.samples import Agreement, Sample, close
from assay.harness.readout.sentences import sentence

Kernel = Callable[[AttentionCall], Tensor]
ZERO, TWICE = constant(0.0), multiplied(output=constant_formula(2.0))
NEW = Term("new", cost=0.3)
EXTEND, PREFIX, BATCH = CallPlan(((9, 0),)), CallPlan(((6, 11),)), CallPlan(((4, 8), (7, 3)))
DECODE, DECODE_BATCH = CallPlan(((1, 14),)), CallPlan(((1, 5), (1, 12)))
SMALL = (EXTEND, PREFIX, BATCH, DECODE, DECODE_BATCH)


@dataclass
class Faulty:
    """A kernel whose outputs are multiplied where this says, and that remembers what it was asked for.

    Attributes:
        where: (call, number of the call) -> factors, which broadcast to the output.
        asked: the calls.
    """

    where: Callable[[AttentionCall, int], Tensor | float]
    asked: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> Tensor:
        self.asked.append(call)
        return rounded_oracle(call) * self.where(call, len(self.asked) - 1)


def nothing(call: AttentionCall, number: int) -> float:
    return 0.0


def finder(kernel: Kernel, plans: Iterable[CallPlan] = (), **more: bool) -> Finder:
    """A finder that has screened some plans."""
    found = Finder(Prober(kernel), "normal", torch.float32, **more)
    found._screen(plans)
    return found


def index(call: AttentionCall) -> Tensor:
    """i of each query, [total_q, 1, 1]."""
    return torch.cat([torch.arange(new) for new in call.lens_q])[:, None, None]


def heads(call: AttentionCall) -> Tensor:
    return torch.arange(call.q.shape[1])[None, :, None]


def of_length(call: AttentionCall, least: int) -> Tensor:
    """0 for the queries of sequences with this many new tokens or more, else 1, [total_q, 1, 1]."""
    return torch.cat([torch.full((new,), float(new < least)) for new in call.lens_q])[:, None, None]


def everything(found: Finder) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    return [np.ones(len(sample.bad), bool) for sample in found.samples]


def literal(name: str, op: str, value: int, **more: int) -> Literal:
    return Literal(Term(name, cost=0.3, **more), op, value)  # type: ignore[arg-type]


def only(*literals: Literal) -> Condition:
    return Condition(literals)


# Counting


def test_close_is_relative_and_nan_agrees_with_nan() -> None:
    nan, inf = float("nan"), float("inf")
    a = np.array([[[1.0, 1.0], [nan, 1.0], [nan, 1.0], [inf, 1.0], [inf, 1.0], [-inf, 1.0]]])
    b = np.array([[[1.0, 1.2], [nan, 1.0], [0.0, 1.0], [inf, 1.1], [1.0, 1.0], [inf, 1.0]]])
    size = np.full((1, 6), 2.0)
    assert close(a, b, size, 0.11).tolist() == [True, True, False, True, False, False]
    assert close(a, b, size, 0.09).tolist() == [False, True, False, True, False, False]
    assert close(a, b, size / 2, 0.11).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("tally", "share", "exact"),
    [
        (Agreement(), 1.0, True),
        (Agreement(8, 8, 0), 1.0, True),
        (Agreement(8, 6, 0), 0.75, False),
        (Agreement(8, 8, 1), 1.0, False),
        (Agreement(8, 0, 0), 0.0, False),
    ],
)
def test_an_operator_is_exact_if_it_gives_right_and_wrong_outputs(tally: Agreement, share: float, exact: bool) -> None:
    assert (tally.share, tally.exact) == (share, exact)


# Asking


def test_wrong_and_right_queries_of_a_call_are_kept() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        return rounded_oracle(call) * (1 + 0.01 * ((index(call) >= 30) & (index(call) <= 60) & (heads(call) == 2)))

    found = finder(kernel, [CallPlan(((100, 0),))])
    (sample,) = found.samples
    rows = sample.queries.rows.tolist()
    assert rows == sorted(set(rows))
    assert {30, 31, 59, 60, 0, 1, 98, 99, 29, 61} <= set(rows)
    wrong = [row for row in rows if 30 <= row <= 60]
    assert 8 < len(wrong) <= _WRONG_ROWS
    assert 8 < len(rows) - len(wrong) <= _RIGHT_ROWS + 2
    expected = np.zeros((len(rows), 4), bool)
    expected[[rows.index(row) for row in wrong], 2] = True
    assert sample.bad.tolist() == expected.ravel().tolist()
    assert found._wrong
    np.testing.assert_allclose(
        sample.actual[:, 2], sample.queries.right[:, 2] * np.where(expected[:, 2:3], 1.01, 1), 1e-4
    )
    assert sample.errors[sample.bad] == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize(("declared", "asked"), [((128,), 128), ((32, 80), 80), ((64, 128), 64), (None, 64)])
def test_a_kernel_is_asked_for_the_nearest_head_dim_that_it_declares(
    declared: tuple[int, ...] | None, asked: int
) -> None:
    found = finder(declares(head_dims=declared)(lambda call: rounded_oracle(call)), [EXTEND])
    assert [sample.queries.call.q.shape[2] for sample in found.samples] == [asked]


def test_a_kernel_of_one_head_dim_is_read_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, SMALL)
    found = finder(declares(head_dims=(128,))(Faulty(nothing)))
    found.run()
    assert sentence(found.operator) == "the output is not written: it is zero"
    assert {sample.queries.call.q.shape[2] for sample in found.samples} == {128}


def test_what_was_seen_is_judged_again() -> None:
    found = finder(Faulty(lambda call, _: 1.01), [EXTEND])
    assert found.samples[0].bad.all()
    found._judge_by(0.02, Tolerance())
    assert not found._wrong
    assert found.samples[0].error == 0.02
    found._screen([PREFIX])
    assert (found.samples[1].error, found._wrong) == (0.02, False)
    found._judge_by(0.005, Tolerance())
    assert all(sample.bad.all() for sample in found.samples)


def test_scores_of_all_sizes_are_judged_loosely() -> None:
    found = finder(Faulty(lambda call, _: 1.01), [replace(EXTEND, data="scores"), replace(EXTEND, data="values")])
    assert [bool(sample.bad.any()) for sample in found.samples] == [False, True]


def test_a_kernel_that_is_causal_whatever_it_is_told_gets_causal_calls_only() -> None:
    asked: list[bool] = []

    def kernel(call: AttentionCall) -> Tensor:
        asked.append(call.causal)
        return rounded_oracle(call.with_spec(mask=Mask(causal=True)))

    found = finder(kernel)
    found._leave_out_not_causal()
    assert found.causal_only
    assert not found._wrong
    assert found.samples
    assert asked.count(False) == 2
    found._screen([replace(plan, causal=causal) for plan in SMALL for causal in (True, False)])
    assert asked.count(False) == 2
    assert asked.count(True) == 2 + len(SMALL)


@pytest.mark.parametrize(
    ("kernel", "without"),
    [(Faulty(lambda call, _: 1.0), 2), (Faulty(nothing), 2), (Faulty(lambda call, number: float(number != 3)), 2)],
    ids=["right", "wrong in both", "wrong once without a mask"],
)
def test_other_kernels_are_asked_for_both(kernel: Faulty, without: int) -> None:
    found = finder(kernel)
    found._leave_out_not_causal()
    assert not found.causal_only
    assert [call.causal for call in kernel.asked].count(False) == without
    assert len(found.samples) == 2 + without
    found._screen([replace(plan, causal=False) for plan in SMALL])
    assert [call.causal for call in kernel.asked].count(False) == without + len(SMALL)


def test_what_is_wrong_without_a_mask_alone_is_read() -> None:
    found = finder(Faulty(lambda call, _: 1.0 if call.causal else 2.0))
    found._leave_out_not_causal()
    assert found.causal_only
    found.run()
    assert sentence(found.operator) == "the output is multiplied by 2, only without a causal mask"
    assert not found.not_causal_note


def test_what_is_wrong_without_a_mask_in_a_way_of_its_own_is_left_out() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        if call.causal:
            return rounded_oracle(call) * (2.0 if call.phase == "decode" else 1.0)
        return torch.randn(*call.q.shape[:2], call.v.shape[2], generator=torch.Generator().manual_seed(len(call.k)))

    found = finder(kernel)
    found._leave_out_not_causal()
    found.run()
    assert sentence(found.operator) == "the output is multiplied by 2, only in decode"
    assert found.causal_only
    assert found.not_causal_note
    assert found.tally(found.operator, found.samples).exact


def test_far_fetched_conditions_may_be_chance_where_few_calls_are_told_apart() -> None:
    plain = only(literal("new", ">=", 8))
    far = Condition(tuple(literal(name, "==", 5) for name in ("new", "total", "prefix")))
    far = Condition(tuple(replace(one, term=replace(one.term, cost=1.2)) for one in far.literals))
    assert far.cost > _FAR_FETCHED > plain.cost
    assert not _by_chance(plain, 5, 10)
    assert _by_chance(far, 5, 10)
    assert not _by_chance(far, 30, 90)
    assert _by_chance(plain, 1, 90)


# Reading


def test_a_wrong_answer_is_explained_by_what_it_is_much_nearer_to() -> None:
    found = finder(Faulty(lambda call, _: 1.01), [EXTEND])
    found._judge_by(0.009, Tolerance())
    (sample,) = found.samples
    assert sample.bad.all()
    right = sample.queries.right
    assert sample.agrees(1.0101 * right).all()
    assert not sample.agrees(1.005 * right).any()  # within the error of the answer, and as near to the right output


def first_key_unseen(call: AttentionCall) -> Tensor:
    k = torch.cat([call.k, torch.ones_like(call.k[..., :1])], -1)
    k[call.cu_seqlens_k[:-1].long(), :, -1] = -1e6
    q = torch.cat([call.q, torch.ones_like(call.q[..., :1])], -1)
    return rounded_oracle(replace(call, q=q, k=k))


def test_a_sample_knows_its_place_among_the_calls() -> None:
    kernel = declares(phases=("extend",))(lambda call: rounded_oracle(call))
    found = finder(kernel, [EXTEND, replace(EXTEND, layer=3), DECODE, replace(EXTEND, seed=5)])
    found._screen([PREFIX], fresh=True)
    assert [(one.queries.number, one.queries.nth) for one in found.samples] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert [one.fresh for one in found.samples] == [False, False, False, True]
    assert not found._wrong


def test_what_shows_in_the_call_itself_is_read_without_another() -> None:
    asked: list[AttentionCall] = []
    found = finder(lambda call: asked.append(call) or first_key_unseen(call), [replace(DECODE, layer=1), DECODE])
    sample = found.samples[1]
    found._read(sample)
    assert sample.reading is not None
    assert {call.layer for call in asked[2:]} == {0}
    count = len(asked)
    assert count == 2 + 3  # 15 keys of two kv heads fit in one probe; zeros, the probe, and the call itself
    found._read(sample)
    assert len(asked) == count


def test_right_queries_have_no_forms_and_what_cannot_be_read_stays_so() -> None:
    def of_next_head(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        out[:, 1] = out[:, 2]
        return out

    found = finder(of_next_head, [PREFIX])
    (sample,) = found.samples
    found._read(sample)
    assert sample.fits is not None
    assert [bool(fits) for fits in sample.fits] == sample.bad.tolist()

    def kernel(call: AttentionCall) -> Tensor:
        if not call.v.any():
            raise ValueError
        return 2 * rounded_oracle(call)

    long = replace(PREFIX, lens=((3, 90),))
    found = finder(kernel, [long])
    found._read(found.samples[0])
    assert found.samples[0].reading is None
    assert found.samples[0].fits is None


def test_small_calls_of_each_kind_are_read_first() -> None:
    def plan(*lens: tuple[int, int]) -> CallPlan:
        return CallPlan(lens, (2, 1), 8)

    kinds = [
        [plan((5, 0)), plan((6, 0)), plan((30, 0))],
        [plan((3, 9)), plan((5, 9))],
        [plan((1, 20))],
        [plan((2, 0), (9, 0)), plan((2, 0), (10, 0))],
        [plan((80, 0))],
    ]
    left_out = [plan((2, 1)), replace(plan((4, 0)), data="values"), replace(plan((4, 4)), layer=5)]
    found = finder(
        Faulty(lambda call, _: float(call.layer == 5)),
        [*reversed([one for kind in kinds for one in kind]), *left_out],
    )
    assert not found.samples[-1].bad.any()
    order = [sample.plan for sample in found._to_read(found.samples, 50)]
    assert order[:5] == sorted((kind[0] for kind in kinds), key=lambda one: one.size)
    assert order[5:] == [*sorted((kinds[0][1], kinds[1][1], kinds[3][1]), key=lambda one: one.size), kinds[0][2]]
    assert [sample.plan for sample in found._to_read(found.samples, 3)] == order[:3]
    found._read(next(sample for sample in found.samples if sample.plan == order[0]))
    assert next(sample.plan for sample in found._to_read(found.samples, 50)) != order[0]


# Explaining


def test_wrong_queries_with_another_cause_are_kept_out_of_a_condition() -> None:
    found = finder(Faulty(lambda call, _: torch.where(heads(call) == 1, 0.0, 2.0)), SMALL)
    for effect, op in ((ZERO, "=="), (TWICE, "!=")):
        _, clauses = found._clauses(effect, everything(found))
        assert clauses[0].condition == only(Literal(Term("head", cost=0.3, words=True), op, 1))  # type: ignore[arg-type]
    closed = [(sample.queries.table["head"] != 1) for sample in found.samples]
    assert found._clauses(ZERO, closed) == (0, [])


def test_queries_that_are_wrong_without_a_rule_have_no_clause() -> None:
    kernel = Faulty(lambda call, _: ((call.q[:, :1, :1] > 0) | (call.layer == 1)).float())
    found = finder(kernel, [EXTEND, PREFIX, CallPlan(((60, 40),)), replace(EXTEND, layer=1)])
    hits, clauses = found._clauses(ZERO, everything(found))
    assert hits > 0
    assert clauses == []


def read_all(found: Finder) -> Finder:
    for sample in found._to_read(found.samples, 50):
        found._read(sample)
    return found


def readings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search among the effects that what was read shows, which takes milliseconds."""
    monkeypatch.setattr(fitting, "general_effects", lambda *_: [])
    monkeypatch.setattr(fitting, "known_effects", list)


def test_each_fault_gets_its_clause() -> None:
    kernel = Faulty(lambda call, _: torch.where(heads(call) == 1, 0.0, torch.where(heads(call) == 2, 2.0, 1.0)))
    found = read_all(finder(kernel, SMALL))
    operator = found.fit()[0]
    assert {clause.effect.compute for clause in operator.clauses} == {ZERO.compute, TWICE.compute}
    assert found.tally(operator, found.samples).exact


def test_there_are_a_few_clauses_at_most() -> None:
    kernel = Faulty(lambda call, _: 1 + 0.5 * heads(call))
    found = read_all(finder(kernel, [replace(plan, heads=(6, 1)) for plan in SMALL]))
    operator = found.fit()[0]
    assert len(operator.clauses) == _CLAUSES
    assert 0 < found.tally(operator, found.samples).share < 1


def test_a_right_kernel_has_no_clauses() -> None:
    assert finder(rounded_oracle, SMALL).fit() == [Operator()]


LONG_WRONG = Faulty(lambda call, _: of_length(call, 30))


def test_rivals_explain_as_much() -> None:
    found = read_all(finder(LONG_WRONG, [EXTEND, PREFIX, CallPlan(((60, 0),)), CallPlan(((50, 4), (8, 40)))]))
    operators = found.fit()
    assert len(operators) > 1
    assert len(set(operators)) == len(operators)
    assert all(found.tally(operator, found.samples).exact for operator in operators)
    values = {one.value for operator in operators for one in operator.clauses[0].condition.literals}
    assert {10, 50} <= values  # both ends of what was seen
    some = {one.term.name for operator in operators for one in operator.clauses[0].condition.literals}
    assert "new" in some


def test_clauses_that_later_ones_make_superfluous_are_dropped() -> None:
    decode = only(literal("decode", "==", 1))
    found = finder(Faulty(nothing), SMALL)
    first, last = Clause(ZERO, decode), Clause(ZERO)
    assert found._pruned(Operator((first, last))) == Operator((last,))
    found = finder(Faulty(lambda call, _: 2.0 if call.phase == "extend" else 0.0), SMALL)
    needed = Operator((first, Clause(TWICE)))
    assert found._pruned(needed) == needed
    found = finder(Faulty(lambda call, _: 1.0 if call.phase == "extend" else 0.0), SMALL)
    keeps_right = Operator((Clause(multiplied(constant_formula(1.0)), only(literal("decode", "==", 0))), last))
    assert found._pruned(keeps_right) == keeps_right  # without it, right outputs are spoilt


def test_effects_that_do_the_same_count_once() -> None:
    found = read_all(finder(fault("kv-head-next-group"), [replace(plan, heads=(2, 2)) for plan in (EXTEND, PREFIX)]))
    left = list(zip(found.samples, everything(found), strict=True))
    ranked = found._ranked(left)
    assert len(ranked) > 3
    alike: Counter[bytes] = Counter()
    for effect in ranked:
        flags = [sample.agrees(effect.outputs(sample.queries)) & sample.bad for sample, _ in left]
        alike[np.concatenate(flags).tobytes()] += 1
    assert max(alike.values()) == 3


def test_an_effect_that_spoils_right_queries_comes_after_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    readings_alone(monkeypatch)
    found = read_all(finder(Faulty(lambda call, _: (heads(call) != 1).float()), [EXTEND, PREFIX]))
    left = list(zip(found.samples, everything(found), strict=True))
    assert found._ranked(left)[0] == ZERO


def test_what_does_not_depend_on_what_was_read_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    readings_alone(monkeypatch)
    monkeypatch.setattr(fitting, "general_effects", lambda answers: asked.append(answers) or [])
    found = finder(Faulty(lambda call, _: 1 + 0.01 * index(call)), SMALL)
    left = list(zip(found.samples, everything(found), strict=True))
    found._ranked(left)
    found._ranked(left)
    assert len(asked) == 1


def test_what_explains_next_to_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    readings_alone(monkeypatch)

    def kernel(least: int) -> Faulty:
        return Faulty(
            lambda call, _: torch.where((index(call) < least) & (heads(call) < least), 0.0, 1.1 + 0.1 * index(call))
        )

    for least, expected in ((1, []), (4, [ZERO])):
        found = finder(kernel(least), [CallPlan(((40, 0),))])
        left = list(zip(found.samples, everything(found), strict=True))
        assert [one for one in found._ranked(left) if one == ZERO] == expected


def test_a_few_wrong_queries_stand_for_a_call() -> None:
    found = finder(Faulty(lambda call, _: ((index(call) < 4) | (heads(call) == 0)).float()), [CallPlan(((16, 0),))])
    (sample,) = found.samples
    left = np.ones(len(sample.bad), bool)
    tiny, flags = found._tiny(sample, left)
    wrong = [row for row in sample.queries.rows.tolist() if row >= 4]
    assert tiny.queries.rows.tolist() == [wrong[0], wrong[(len(wrong) - 1) // 2], wrong[-1]]
    assert tiny.bad.tolist() == [False, True, True, True] * 3
    assert flags.all()
    np.testing.assert_array_equal(tiny.actual, sample.actual[np.isin(sample.queries.rows, tiny.queries.rows)])
    left.reshape(-1, 4)[sample.queries.rows != 9] = False
    tiny, flags = found._tiny(sample, left)
    assert tiny.queries.rows.tolist() == [9]
    assert flags.all()


# Trying


@pytest.mark.parametrize(("one", "lens"), [
    (literal("new", ">=", 41), {((40, 0),), ((41, 0),), ((42, 0),)}),
    (literal("new", "<", 41), {((40, 0),), ((41, 0),), ((42, 0),)}),
    (literal("new", "==", 41), {((41, 0),)}),
    (literal("total", ">=", 20), {((19, 0),), ((20, 0),), ((21, 0),)}),
    (literal("prefix", ">=", 16), {((9, 15),), ((9, 16),), ((9, 17),)}),
    (literal("i", ">=", 12), {((13, 0),), ((14, 0),), ((15, 0),)}),
    (literal("pos", "==", 2, block=16), {((33, 0),), ((34, 0),), ((35, 0),)}),
    (literal("seqs", "==", 3), {((9, 0),) * 3}),
    (literal("seqs", ">=", 2), {((9, 0),), ((9, 0),) * 2, ((9, 0),) * 3}),
    (literal("new", "==", 1, modulo=4), set()),
    (literal("new", ">=", 5000), set()),
    (literal("head", "==", 1), set()),
])  # fmt: skip
def test_calls_lie_on_both_sides_of_a_threshold(one: Literal, lens: set[tuple[tuple[int, int], ...]]) -> None:
    found = finder(Faulty(nothing), [EXTEND])
    plans = found._edges([Operator((Clause(ZERO, only(one)),))])
    assert {plan.lens for plan in plans} == lens
    assert len(set(plans)) == len(plans)


def test_every_kind_of_wrong_call_has_its_edges() -> None:
    found = finder(Faulty(nothing), SMALL)
    plans = found._edges([Operator((Clause(ZERO, only(literal("prefix", ">=", 30))),))])
    lens = {plan.lens for plan in plans}
    assert {((1, 29),), ((1, 30),), ((1, 31),)} <= lens
    assert {((6, 29),), ((6, 30),), ((6, 31),)} <= lens
    assert {((9, 29),), ((9, 30),), ((9, 31),)} <= lens
    assert {plan.phase for plan in plans} == {"extend", "decode"}
    plans = found._edges([Operator((Clause(ZERO, only(literal("pos", ">=", 30))),))])
    assert ((1, 30),) in {plan.lens for plan in plans}


def test_one_sequence_of_a_batch_at_a_time_is_at_the_edge() -> None:
    found = finder(Faulty(nothing), [DECODE_BATCH])
    plans = found._edges([Operator((Clause(ZERO, only(literal("prefix", "==", 30))),))])
    assert {plan.lens for plan in plans} == {((1, 30), (1, 12)), ((1, 5), (1, 30))}


@pytest.mark.parametrize("effect", [
    KeyFactors((KeyFactor("seen", only(literal("j", "<", 40)), 0.0),)),

])  # fmt: skip
def test_conditions_on_keys_have_edges(effect: Effect) -> None:
    found = finder(Faulty(nothing), [EXTEND])
    assert {plan.lens for plan in found._edges([Operator((Clause(effect),))])} == {((39, 0),), ((40, 0),), ((41, 0),)}


def test_a_slow_kernel_gets_fewer_edges() -> None:
    conditions = [only(literal(name, ">=", value)) for name in ("new", "prefix", "total") for value in range(20, 80, 5)]
    operators = [Operator((Clause(ZERO, condition),)) for condition in conditions]
    assert len(finder(Faulty(nothing), SMALL, slow=True)._edges(operators)) == 20
    assert len(finder(Faulty(nothing), SMALL)._edges(operators)) == 60


def test_calls_tell_rivals_apart() -> None:
    found = finder(Faulty(nothing), [EXTEND])
    operators = [Operator((Clause(ZERO, only(Literal(NEW, ">=", least))),)) for least in (41, 41, 33, 60)]
    plans = found._telling(operators, drawn_plans("normal", torch.float32, 3))
    assert 1 <= len(plans) <= 2  # one for each rival that says something else
    news = [{new for new, _ in plan.lens} for plan in plans]
    assert any(33 <= new < 41 for some in news for new in some)
    assert any(41 <= new < 60 for some in news for new in some)
    assert found._telling(operators[:2], drawn_plans("normal", torch.float32, 3)) == []


# From end to end, on few calls


def few(monkeypatch: pytest.MonkeyPatch, plans: Sequence[CallPlan]) -> None:
    """A search that begins with these calls alone."""
    monkeypatch.setattr(finding, "repeated_plans", lambda *_: [])
    monkeypatch.setattr(finding, "fixed_plans", lambda *_: list(plans))
    monkeypatch.setattr(finding, "_FRESH", 6)


def test_a_threshold_between_the_calls_that_were_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, [EXTEND, PREFIX, DECODE, CallPlan(((60, 0),)), CallPlan(((50, 4), (8, 40)))])
    found = finder(LONG_WRONG)
    found.run()
    assert sentence(found.operator) == "the output is not written: it is zero, only where new >= 30"
    assert found.tally(found.operator, found.samples).exact
    assert {29, 30} <= {new for sample in found.samples for new, _ in sample.plan.lens}
    fresh = [sample.plan for sample in found.samples if sample.fresh]
    assert len(set(fresh)) == len(fresh)  # no call is made again in a later round


def test_a_right_kernel_is_asked_for_some_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, SMALL)
    found = finder(rounded_oracle)
    found.run()
    assert found.operator == Operator()
    assert len(found.samples) == len(SMALL) + len(steep_plans(torch.float32)) + len(extreme_plans()) + 6
    assert all(sample.reading is None for sample in found.samples)


def test_a_period_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, [replace(plan, seed=seed) for seed in range(3) for plan in SMALL])
    found = finder(Faulty(lambda call, number: 1.0 if number % 7 != 4 else float("nan")))
    found.run()
    assert sentence(found.operator) == "the output is NaN, only where the number of earlier calls mod 7 = 4"


def test_a_search_ends_with_its_time() -> None:
    found = read_all(finder(Faulty(nothing), SMALL))
    found.prober.until = 0.0
    with pytest.raises(BudgetSpentError):
        found.fit()


def test_what_is_known_when_the_budget_ends_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, SMALL)
    whole = finder(Faulty(nothing))
    whole.run()
    part = finder(Faulty(nothing))
    part.prober.calls_left = whole.prober.asked - 1
    with pytest.raises(BudgetSpentError):
        part.run()
    assert part.operator == whole.operator
    assert len(part.samples) == len(whole.samples) - 1


def test_a_sample_agrees_with_what_the_kernel_gave_and_differs_from_what_is_right() -> None:
    (sample,) = finder(Faulty(lambda call, _: 1.5), [EXTEND]).samples
    assert isinstance(sample, Sample)
    right = sample.queries.right
    assert sample.agrees(1.5 * right).all()
    assert sample.agrees(1.5 * (1 + 0.9 * sample.error) * right).all()
    assert not sample.agrees(1.5 * (1 + 1.2 * sample.error) * right).any()
    assert not sample.agrees(np.full_like(right, np.nan)).any()
    assert not sample.differs(right * (1 + 0.9 * sample.error)).any()
    assert sample.differs(right * (1 + 1.2 * sample.error)).all()


def test_a_tally_counts_what_is_explained_and_what_is_spoilt() -> None:
    found = finder(Faulty(lambda call, _: (index(call) < 4).float()), [EXTEND])  # of 9 queries, 5 are wrong in 4 heads
    some = found.samples
    assert found.tally(Operator(), some) == Agreement(20, 0, 0)
    assert found.tally(Operator((Clause(ZERO),)), some) == Agreement(20, 20, 16)
    assert found.tally(Operator((Clause(ZERO, only(literal("i", ">=", 6))),)), some) == Agreement(20, 12, 0)
    assert found.tally(Operator((Clause(ZERO, only(literal("i", ">=", 4))),)), some).exact
    assert found.tally(Operator((Clause(TWICE),)), some) == Agreement(20, 0, 16)
    assert found.tally(Operator(), []) == Agreement()


def test_a_clause_has_an_exact_condition() -> None:
    kernel = Faulty(lambda call, _: 1 - (heads(call) == 1).float() * (call.phase == "decode"))
    found = finder(kernel, [*SMALL, replace(DECODE, seed=9)])
    hits, clauses = found._clauses(ZERO, everything(found))
    assert hits == 1 + 2 + 1
    assert {(one.term.name, one.op, one.value) for one in clauses[0].condition.literals} == {
        ("decode", "==", 1),
        ("head", "==", 1),
    }
    for clause in clauses:
        assert found.tally(Operator((clause,)), found.samples).exact
    assert [clause.cost for clause in clauses] == sorted(clause.cost for clause in clauses)
    assert found._clauses(TWICE, everything(found)) == (0, [])


def test_what_tells_one_wrong_call_from_the_others_is_no_rule() -> None:
    kernel = Faulty(lambda call, _: 1 - float(call.layer == 3))
    found = finder(kernel, [replace(EXTEND, seed=n, layer=3 * (n == 4)) for n in range(5)])
    hits, clauses = found._clauses(ZERO, everything(found))
    assert hits > 0
    assert clauses == []
