"""Names and sentences of what was read, in findings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.faults import fault, rounded_oracle
from assay.harness.localize.diagnose import STATE_KEPT
from assay.harness.readout.named import name_of, public_reports, said, with_operator
from assay.harness.readout.readout import ReadOut, read_out
from assay.harness.readout.samples import Tally
from assay.harness.verdict import OPERATOR, UNEXPLAINED, Finding, Severity


def flipped(call: AttentionCall) -> Tensor:
    """What no hypothesis is."""
    return rounded_oracle(call).flip(-1)


@pytest.fixture(scope="module")
def missing_mask() -> ReadOut:
    return read_out(fault("mask-missing"))


@pytest.fixture(scope="module")
def unlisted() -> ReadOut:
    return read_out(flipped)


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
    took = f"read off the kernel in {missing_mask.calls} calls and {missing_mask.seconds:.1f} s: gives "
    assert first.evidence[1].startswith(took)
    assert (first.where, first.reproduce, first.severity) == ("extend", "again", "serious")


def test_a_budget_that_was_spent_is_said(missing_mask: ReadOut) -> None:
    [first] = with_operator([finding("mask-missing")], replace(missing_mask, complete=False))
    assert " s, which was all of its budget: gives " in first.evidence[1]


def test_nothing_serious_is_left_as_it_is(missing_mask: ReadOut) -> None:
    findings = [finding("nondeterminism", "info")]
    assert with_operator(findings, missing_mask) == findings
    assert with_operator([], missing_mask) == []


def test_a_known_operator_has_its_name(missing_mask: ReadOut) -> None:
    known = name_of(missing_mask.operator, missing_mask.samples)
    assert known is not None
    assert known.id == "mask-missing"
    [named] = with_operator([finding(UNEXPLAINED)], missing_mask)
    assert (named.id, named.title, named.diagnosis) == (known.id, known.title, missing_mask.sentence)
    assert named.does == "applies no causal mask", "the headline must not keep the words of the first guess"


def test_a_name_comes_with_its_public_reports() -> None:
    reports = public_reports("leak-all-keys-previous")
    assert reports[0].startswith("https://")
    [named] = with_operator([finding(UNEXPLAINED)], read_out(fault("leak-all-keys-previous")))
    assert named.id == "leak-all-keys-previous"
    assert named.evidence[-1].startswith(f"public reports of such a bug: {reports[0]}")
    assert public_reports("no-such-bug") == ()


def test_another_operator_has_the_sentence_and_no_name(unlisted: ReadOut) -> None:
    assert unlisted.exact
    assert name_of(unlisted.operator, unlisted.samples) is None
    [named] = with_operator([finding(UNEXPLAINED)], unlisted)
    assert (named.id, named.title) == (OPERATOR, "another operator")
    assert named.does == "computes something other than attention"
    assert named.diagnosis == named.operator == unlisted.sentence


def test_what_is_not_exact_gives_no_name(missing_mask: ReadOut) -> None:
    most = replace(missing_mask, all=Tally(wrong=100, explained=90, false=3))
    [first] = with_operator([finding(UNEXPLAINED)], most)
    assert (first.id, first.diagnosis) == (UNEXPLAINED, "it is wrong")
    assert first.operator == said(most)
    assert "this gives 90 % of the wrong outputs that were seen, and is wrong on 3 that are right" in first.operator


def test_what_explains_too_little_is_not_said(missing_mask: ReadOut) -> None:
    [first] = with_operator([finding(UNEXPLAINED)], replace(missing_mask, all=Tally(wrong=100, explained=40)))
    assert (first.id, first.operator, first.picture) == (UNEXPLAINED, "", None)
    assert first.evidence[1].endswith("no rule was found that gives its 100 wrong outputs")


def test_a_kernel_that_was_right_when_it_was_read_is_said_to_be() -> None:
    read = read_out(rounded_oracle)
    [first] = with_operator([finding("mask-top-left")], read)
    assert (first.operator, first.id) == ("", "mask-top-left")
    assert first.evidence[1].endswith("answered all of them right: it is wrong only on other calls")


def test_a_kernel_that_answers_nothing_is_said_to() -> None:
    def raises(call: AttentionCall) -> Tensor:
        raise ValueError("no such tile")

    [first] = with_operator([finding("mask-top-left")], read_out(raises))
    assert first.evidence[1].startswith("the kernel could not be read: it answered none of ")
    assert "ValueError" in first.evidence[2]


def test_a_name_that_was_read_as_well_is_kept(missing_mask: ReadOut) -> None:
    [first] = with_operator([finding("mask-missing", equivalent=("mask-one-key-too-many",))], missing_mask)
    assert (first.id, first.diagnosis) == ("mask-missing", "it is wrong")
    assert first.equivalent == (), "the read-out tells them apart"


def test_of_names_that_fit_the_calls_alike_the_one_that_was_read_is_taken(missing_mask: ReadOut) -> None:
    given = finding("mask-one-key-too-many", equivalent=("scale-twice", "mask-missing"))
    [first] = with_operator([given], missing_mask)
    assert (first.id, first.equivalent) == ("mask-missing", ())
    assert first.title != given.title
    assert first.does == "applies no causal mask"


@pytest.mark.parametrize("id", ["mask-one-key-too-many", "scale-twice"])
def test_an_exact_read_out_wins_over_a_name_that_it_contradicts(unlisted: ReadOut, id: str) -> None:
    [first] = with_operator([finding(id)], unlisted)
    assert first.id == OPERATOR
    assert first.diagnosis.startswith(f'{unlisted.sentence}; "title of {id}" fits the failing calls, but not ')
    [kept] = with_operator([finding(id)], replace(unlisted, all=replace(unlisted.all, false=1)))
    assert (kept.id, kept.diagnosis) == (id, "it is wrong"), "one that is not exact does not"


def test_what_another_finding_explains_contradicts_nothing() -> None:
    long, short = fault("mask-missing", when=lambda new, prefix: prefix > 0), fault("scale-twice")

    def two(call: AttentionCall) -> Tensor:
        return long(call) if any(call.prefixes) else short(call)

    read = read_out(two)
    read = replace(read, all=Tally(read.all.wrong, read.all.wrong))  # whatever was mined
    [alone] = with_operator([finding("scale-twice")], read)
    assert alone.id != "scale-twice"
    first, other = with_operator([finding("scale-twice"), finding("mask-missing")], read)
    assert (first.id, other) == ("scale-twice", finding("mask-missing"))


def test_what_a_name_does_not_change_contradicts_nothing() -> None:
    cached, other = fault("prefix-dropped"), fault("scale-twice")

    def two(call: AttentionCall) -> Tensor:
        return cached(call) if any(call.prefixes) else other(call)

    read = read_out(two)
    read = replace(read, all=Tally(read.all.wrong, read.all.wrong))  # whatever was mined
    [first] = with_operator([finding("prefix-dropped")], read)
    assert (first.id, first.diagnosis) == ("prefix-dropped", "it is wrong")


def test_how_a_kernel_behaves_keeps_its_name(unlisted: ReadOut) -> None:
    [first] = with_operator([finding(STATE_KEPT)], unlisted)
    assert (first.id, first.diagnosis) == (STATE_KEPT, "it is wrong")
    assert first.operator == unlisted.sentence
