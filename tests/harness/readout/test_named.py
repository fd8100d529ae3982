"""Names and sentences of what was read, in findings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.shapes import Shape
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.diagnose import does
from assay.harness.readout.conditions import Condition, Literal, Term
from assay.harness.readout.effects import constant, known_bug, multiplied
from assay.harness.readout.formulas import constant_formula
from assay.harness.readout.named import _name_of, with_operator
from assay.harness.readout.operators import Effect, Operator
from assay.harness.readout.queries import Queries
from assay.harness.readout.readout import ReadOut
from assay.harness.readout.samples import Agreement, Sample
from assay.harness.readout.sentences import sentence
from assay.harness.verdict import OPERATOR, UNEXPLAINED, Finding, Severity, cause_of
from tests.harness.readout.reads import read


@pytest.fixture(scope="module")
def missing_mask() -> ReadOut:
    return read(fault("mask-missing"))


@pytest.fixture(scope="module")
def unlisted() -> ReadOut:
    """What is read off a kernel that returns a constant, which no bug of the list does."""
    effect = constant(3.0)
    return read_of(Operator(effect), seen(effect, ((9, 20), (3, 5)), ((1, 30),), ((9, 0),)))


def finding(id: str, severity: Severity = "serious", equivalent: tuple[str, ...] = ()) -> Finding:
    return Finding(
        id=id, title=f"title of {id}", severity=severity, where="extend", diagnosis="it is wrong", evidence=("seen",),
        reproduce="again", equivalent=equivalent,
    )  # fmt: skip


def test_what_was_read_is_in_the_first_serious_finding(missing_mask: ReadOut) -> None:
    findings = [finding("a", "info"), finding("mask-missing"), finding("b")]
    info, first, other = with_operator(findings, missing_mask)
    assert (info, other) == (findings[0], findings[2])
    assert first.operator == missing_mask.sentence != ""
    assert first.picture is not None
    assert "!" in "".join(first.picture.cells)
    assert first.evidence[0] == "seen"
    took = f"inferred from the kernel in {missing_mask.calls} calls and {missing_mask.seconds:.1f} s: gives "
    assert first.evidence[1].startswith(took)
    assert (first.where, first.reproduce, first.severity) == ("extend", "again", "serious")


def test_a_known_operator_has_its_name(missing_mask: ReadOut) -> None:
    known = _name_of(missing_mask.operator, missing_mask.samples)
    assert known is not None
    assert known.id == "mask-missing"
    [named] = with_operator([finding(UNEXPLAINED)], missing_mask)
    assert (named.id, named.title, named.diagnosis) == (known.id, known.title, missing_mask.sentence)
    assert named.does == "applies no causal mask", "the headline must not keep the words of the first guess"


def test_another_operator_has_the_sentence_and_no_name(unlisted: ReadOut) -> None:
    assert unlisted.exact
    assert _name_of(unlisted.operator, unlisted.samples) is None
    [named] = with_operator([finding(UNEXPLAINED)], unlisted)
    assert (named.id, named.title) == (OPERATOR, unlisted.sentence)
    assert named.does == "computes something other than attention"
    assert named.diagnosis == named.operator == unlisted.sentence
    assert named.sentence == f"Not in the catalogue, but inferred by probing: {unlisted.sentence.rstrip('.')}."


@pytest.mark.parametrize("seen", [Agreement(100, 99), Agreement(100, 100, false=1)])
def test_what_does_not_give_every_output_is_not_said(missing_mask: ReadOut, seen: Agreement) -> None:
    [first] = with_operator([finding(UNEXPLAINED)], replace(missing_mask, all=seen))
    assert (first.id, first.operator, first.picture) == (UNEXPLAINED, "", None)
    assert first.evidence[1].endswith("no rule explains its 100 wrong outputs")


def test_a_name_that_does_not_give_what_was_seen_is_not_said(unlisted: ReadOut) -> None:
    silent = replace(unlisted, operator=Operator(), sentence="")
    [first] = with_operator([finding("scale-twice")], silent)
    assert (first.id, first.equivalent) == (UNEXPLAINED, ())
    assert first.diagnosis.startswith('"title of scale-twice" fits failing calls, but not ')
    [first, _] = with_operator([finding("scale-twice"), finding(OUTPUT_SCALED)], silent)
    assert first.id == "scale-twice", "the other one may explain the rest"


def test_a_name_that_was_read_as_well_is_kept(missing_mask: ReadOut) -> None:
    [first] = with_operator([finding("mask-missing", equivalent=("mask-one-key-too-many",))], missing_mask)
    assert (first.id, first.diagnosis) == ("mask-missing", "it is wrong")
    assert first.equivalent == (), "the read-out tells them apart"


@pytest.mark.parametrize("id", ["mask-one-key-too-many", "scale-twice", OUTPUT_SCALED, OUTPUT_NOT_WRITTEN])
def test_an_exact_read_out_wins_over_a_name_that_it_contradicts(unlisted: ReadOut, id: str) -> None:
    [first] = with_operator([finding(id)], unlisted)
    assert first.id == OPERATOR
    assert first.diagnosis.startswith(f'{unlisted.sentence}; "title of {id}" fits the failing calls, but not ')
    assert (first.title, first.does) == (unlisted.sentence, "computes something other than attention")


def test_a_headline_says_the_condition_that_was_read(missing_mask: ReadOut) -> None:
    operator = replace(missing_mask.operator, condition=Condition((Literal(Term("prefix"), ">=", 64),)))
    confined = replace(missing_mask, operator=operator, sentence=sentence(operator))
    given = finding("mask-missing").model_copy(update={"does": "applies no causal mask where batch > 1"})
    [first] = with_operator([given], confined)
    assert first.does == "applies no causal mask, only where prefix >= 64"
    assert first.diagnosis == confined.sentence
    assert "on the compared calls: it is wrong" in first.evidence


def seen(effect: Effect | Operator, *lens: tuple[tuple[int, int], ...]) -> list[Sample]:
    """What a kernel with this effect answers to calls of these lengths."""
    found = []
    for batch in lens:
        phase = "decode" if all(new == 1 and prefix for new, prefix in batch) else "extend"
        call = Shape(phase, batch).make(0)
        queries = Queries(call, np.arange(len(call.q)))
        actual = effect.outputs(queries)
        sample = Sample(queries, actual, np.zeros(actual.shape[0] * actual.shape[1], bool), 3e-4)
        sample.bad = sample.errors > sample.error
        found.append(sample)
    return found


def test_two_outputs_that_are_nearly_zero_are_compared_with_each_other() -> None:
    [sample] = seen(multiplied(output=constant_formula(1e-4)), ((9, 20),))
    assert sample.bad.all()
    assert sample.agrees(1e-4 * sample.queries.right).all()
    assert not sample.agrees(2e-5 * sample.queries.right).any()


def read_of(operator: Operator, samples: list[Sample]) -> ReadOut:
    wrong = sum(int(sample.bad.sum()) for sample in samples)
    every = Agreement(wrong, wrong)
    return ReadOut(operator, sentence(operator), every, every, samples=tuple(samples))


def test_a_name_must_give_every_wrong_output_and_not_only_those_of_some_calls() -> None:
    bug, other = known_bug(BY_ID["mask-missing"]), Operator(constant(3.0))
    samples = seen(bug, *(((new, 0),) for new in range(3, 19)))
    known = _name_of(other, samples)
    assert known is not None
    assert known.id == "mask-missing"
    samples[1:2] = seen(constant(3.0), ((4, 0),))
    assert _name_of(other, samples) is None


def test_nan_is_no_sign_of_a_bug_that_leaves_an_output_undefined() -> None:
    """Without its own key, the only query of a sequence sees nothing: that fits whatever is not finite."""
    operator = Operator(constant(float("nan")), Condition((Literal(Term("total"), "==", 1),)))
    samples = seen(constant(float("nan")), ((1, 0),))
    read = read_of(operator, samples)
    assert _name_of(operator, samples) is None
    for given in (finding(UNEXPLAINED), finding("mask-one-key-too-few")):
        [first] = with_operator([given], read)
        assert (first.id, first.title) == (OPERATOR, read.sentence)
        assert read.sentence.startswith("the output is NaN")


@pytest.mark.few(8)
@pytest.mark.parametrize("one", FAMILY, ids=lambda one: str(one.id))
def test_headline_and_sentence_say_one_thing_of_every_bug(one: Bug) -> None:
    """Whatever a check named first: the bug that the headline names gives the outputs that the sentence gives."""
    operator = Operator(known_bug(one))
    samples = [sample for sample in seen(operator, ((9, 20), (3, 5)), ((1, 30),)) if sample.bad.any()]
    if not samples:
        pytest.skip("it does not show on small calls")
    at = FAMILY.index(one)
    read = read_of(operator, samples)
    for other in (*FAMILY[at - 2 : at], one, *FAMILY[at + 1 : at + 3], BY_ID["scale-twice"]):
        given = finding(other.id).model_copy(update={"does": does(other, "")})
        [first] = with_operator([given], read)
        cause = cause_of([first])
        assert cause is not None
        assert read.sentence in f"{first.sentence} {first.observed}"
        if first.id not in BY_ID:
            assert read.sentence[:100] in cause.does
            continue
        named = known_bug(BY_ID[first.id])
        for sample in samples:
            out = named.outputs(sample.queries)
            assert (sample.agrees(out) | ~sample.differs(out) | np.isnan(out).any(-1).ravel())[sample.bad].all()


def test_what_another_finding_explains_contradicts_nothing(missing_mask: ReadOut) -> None:
    first, other = with_operator([finding("scale-twice"), finding("mask-missing")], missing_mask)
    assert (first.id, other) == ("scale-twice", finding("mask-missing"))
