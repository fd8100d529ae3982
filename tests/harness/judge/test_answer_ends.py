from __future__ import annotations

import pytest

from assay.harness.judge.answer_lengths import AnswerEnd, check_ends, compare_ends

Pairs = list[tuple[AnswerEnd, AnswerEnd]]
STOP, CUT, ABORT = AnswerEnd("stop", "2"), AnswerEnd("length"), AnswerEnd("abort")
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
        ([(STOP, ABORT)] * 4, "ok", "stop at 2: 94 against 90; abort: 0 against 4"),
        ([(STOP, AnswerEnd("stop", "7"))] * 16, "failed", "stop at 7: 0 against 16"),
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
    assert says in check.found


def test_reasons_that_are_not_recorded_are_not_compared() -> None:
    unknown = AnswerEnd("")
    assert check_ends([(STOP, unknown)] * 9).status == "not checked"
    assert check_ends([]).status == "not checked"
    assert compare_ends([(STOP, unknown), (unknown, ABORT), (STOP, STOP)])[0].text == "stop at 2: 1 against 1"
    assert check_ends([(CUT, CUT)]).found == "all ran to the limit"
