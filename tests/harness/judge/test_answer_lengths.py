from __future__ import annotations

import numpy as np
import pytest

from assay.harness.judge.answer_lengths import _SURE, AnswerEnd, AnswerLengths, check_ends, check_lengths, compare_lengths
from assay.harness.statement import state
from assay.reports.wording.requirements import said_check

LIMIT = 64


def end(tokens: int) -> AnswerEnd:
    return AnswerEnd("length" if tokens == LIMIT else "stop", tokens)


def lengths(reference: list[int], candidate: list[int], units: tuple[str, ...] = ()) -> AnswerLengths:
    return compare_lengths([*zip(map(end, reference), map(end, candidate), strict=True)], 0.05, units=units)


def test_shorter_answers_and_those_that_a_limit_hides_are_not_shown_to_be_the_same() -> None:
    shorter = lengths(list(range(20, 36)), [10] * 16)
    assert (shorter.differ, shorter.beyond, shorter.same) == (True, True, False)
    hidden = lengths([63] * 1000, [LIMIT] * 45 + [63] * 955)
    assert (hidden.differ, hidden.same) == (False, False), "4.5 % ran to the limit, and none of the reference"
    assert (check_lengths(hidden).status, said_check(check_lengths(hidden)).settles) == ("missing", "a higher token limit")
    few = lengths([40] * 100, [440] * 2 + [40] * 98)
    assert (few.differ, few.beyond, said_check(check_lengths(few)).settles) == (False, False, "more questions")
    assert check_lengths(few).status == "missing", "the mean is 20 % longer, by 1 % of the answers"


def test_equal_lengths_and_single_flips_are_not_reported() -> None:
    assert lengths([12] * 16, [12] * 16).same
    assert not lengths([12] * 16, [12] * 14 + [9, 60]).differ


def test_a_significant_but_tiny_difference_is_not_reported() -> None:
    found = lengths([100] * 16, [101] * 16)
    assert (found.same, found.differ, found.beyond) == (True, False, False)


def test_too_few_answers_show_neither() -> None:
    found = lengths([20, 30, 40, 50], [22, 29, 47, 49])
    assert (found.same, found.differ, found.beyond) == (False, False, False)
    assert (lengths([], []).prompts, lengths([20], [30]).ratio, lengths([20], [30]).beyond) == (0, 1.5, False)


def test_answers_that_run_to_the_limit_more_often_differ() -> None:
    ours = [63] * 200
    found = lengths(ours, [64] * 40 + [63] * 160)
    assert found.ratio == pytest.approx(1, abs=0.01), "the limit hides how long they would be"
    assert (found.beyond, found.differ, found.same) == (True, True, False)
    some, few = (lengths(ours, [64] * cut + [63] * (200 - cut)) for cut in (8, 4))
    assert (some.same, check_lengths(some).status) == (False, "missing"), "4 % might be of any length; p = .008"
    assert (few.same, check_lengths(few).status) == (True, "ok"), "p = .125"
    both = lengths([64] * 10 + [63] * 190, [63] * 10 + [64] * 12 + [63] * 178)
    assert check_lengths(both).status == "ok", "as many of both"


def test_counts_that_differ_where_texts_are_equal_are_no_lengths() -> None:
    def ends(counted: int, more: str = "") -> Pairs:
        short = "so it is " * 3
        told = [(short, 9 + counted)] * 60 + [(short + more, 9 + counted + len(more) // 3)] * 40
        return [(AnswerEnd("stop", 9, text=short), AnswerEnd("stop", tokens, text=text)) for text, tokens in told]

    alike, eos, longer, unseen = (compare_lengths(each, 0.05) for each in (ends(0), ends(1), ends(1, "so " * 9), ends(20)))
    assert (alike.recounted, alike.reference) == (None, 9)
    assert (eos.recounted, eos.same, eos.reference, eos.candidate) == (1, True, 27, 27)
    assert (longer.recounted, longer.beyond) == (1, True)
    assert (unseen.same, unseen.beyond, check_lengths(unseen).status) == (False, False, "missing")
    assert "equal texts the servers count +1.0 tokens" in said_check(check_lengths(eos)).found
    mixed = compare_lengths(ends(0)[:60] + ends(1)[:9], 0.05)
    assert (mixed.recounted, mixed.reference) == (None, 9), "most equal texts have equal counts"


def test_questions_of_one_passage_count_once() -> None:
    reference, candidate = [20] * 60, [28] * 30 + [20] * 30
    alone = lengths(reference, candidate)
    shared = lengths(reference, candidate, units=tuple(f"passage-{n // 30}" for n in range(60)))
    assert alone.ratio == shared.ratio
    assert alone.beyond
    assert not shared.beyond


@pytest.mark.few(1)
@pytest.mark.parametrize(("true", "called"), [(1.05, False), (1.3, True), (0.7, True)])
def test_simulated_lengths(true: float, called: bool) -> None:
    """Of sets of 200 skewed lengths, those with a ratio on the bound are not called, and those far beyond it are."""
    rng, seen, covered, sets = np.random.default_rng(7), 0, 0, 5 if called else 60
    for _ in range(sets):
        reference = np.exp(rng.normal(4, 0.6, 200))
        candidate = true * reference * np.exp(rng.normal(-0.045, 0.3, 200))
        pairs = [(AnswerEnd("stop", round(a)), AnswerEnd("stop", round(b))) for a, b in zip(reference, candidate, strict=True)]
        found = compare_lengths(pairs, 0.05)
        seen += found.beyond
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= true <= found.high
    assert seen == sets if called else seen <= 1, f"an error rate of {_SURE}"
    assert covered >= 0.8 * sets, "two ends of 0.05 each"


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ([0] * 100, [20] * 100, "no tokens"),
        ([LIMIT] * 10, [LIMIT] * 10, "all cut"),
        ([], [], "no prompt"),
        ([LIMIT] * 10, [20] * 10, ""),
    ],
)
def test_why_lengths_prove_nothing(ours: list[int], theirs: list[int], why: str) -> None:
    found = lengths(ours, theirs)
    assert found.uninformative == why
    if why:
        assert check_lengths(found).outcome == state("lengths-prove-nothing", why=why, prompts=len(ours))


Pairs = list[tuple[AnswerEnd, AnswerEnd]]
STOP, CUT, ABORT = AnswerEnd("stop", at="2"), AnswerEnd("length"), AnswerEnd("abort")
SAME: Pairs = [(STOP, STOP)] * 90


@pytest.mark.parametrize(
    ("changed", "status", "says"),
    [
        ([(STOP, STOP)] * 10, "ok", "stop at 2: 100 against 100"),
        (
            [(STOP, ABORT)] * 12 + [(ABORT, ABORT)],
            "failed",
            "stop at 2: 102 against 90 (p = 0.001); abort: 1 against 13 (p = 0.001)",
        ),
        ([(ABORT, STOP)] * 12, "failed", "abort: 12 against 0"),
        ([(STOP, ABORT)], "failed", "abort: 0 against 1, on one side only"),
        ([(ABORT, ABORT)] * 4, "ok", "abort: 4 against 4"),
        ([(STOP, AnswerEnd("content_filter"))], "failed", "content_filter: 0 against 1, on one side only"),
        ([(STOP, AnswerEnd("tool_calls"))] * 4, "ok", "tool_calls: 0 against 4"),
        ([(STOP, AnswerEnd("stop", at="7"))] * 16, "failed", "stop at 7: 0 against 16"),
        ([(STOP, AnswerEnd("stop"))] * 90, "ok", "stop: 180 against 180"),
        ([(STOP, CUT)] * 90, "ok", "stop at 2: 90 against 90"),
        ([(CUT, ABORT)] * 16, "failed", "abort: 0 against 16"),
        ([(STOP, AnswerEnd("tool_calls"))] * 8 + [(STOP, AnswerEnd("content_filter"))] * 8, "failed", "stop at 2: 106 against 90"),
        ([(STOP, AnswerEnd("content_filter"))] * 16, "failed", "content_filter: 0 against 16"),
    ],
)
def test_reasons_are_counted_in_pairs(changed: Pairs, status: str, says: str) -> None:
    check = check_ends(SAME + changed)
    assert (check.id, check.status) == ("finish-reasons", status)
    assert says in said_check(check).found


def test_reasons_that_are_not_recorded_are_not_compared() -> None:
    unknown = AnswerEnd("")
    assert check_ends([(STOP, unknown)] * 9).status == "not checked"
    assert check_ends([]).status == "not checked"
    assert check_ends([(STOP, unknown), (unknown, ABORT), (STOP, STOP)]).outcome.values["ends"] == [["stop at 2", 1, 1, None]]
    assert said_check(check_ends([(CUT, CUT)])).found == "all ran to the limit"
