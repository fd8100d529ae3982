from __future__ import annotations

import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.call_conditions import SequenceShape, separating, sequence_shapes


def extend(new: int, prefix: int, batch: int = 1, index: int = 0) -> SequenceShape:
    return SequenceShape("extend", new, prefix, batch, index)


def test_sequence_shapes_of_a_call() -> None:
    found = sequence_shapes(call_of([(5, 3), (1, 9)], (2, 1), 8, torch.float32, "cpu"))
    assert found == [extend(5, 3, 2, 0), extend(1, 9, 2, 1)]


@pytest.mark.parametrize(
    ("failing", "passing", "words"),
    [
        ([extend(9, 1), extend(9, 77)], [extend(9, 0), extend(80, 0)], "cached prefix > 0"),
        ([extend(9, 0), extend(80, 0)], [extend(9, 1), extend(9, 77)], "no cached prefix"),
        ([extend(9, 1)], [extend(9, 0), extend(9, 2), extend(9, 30)], "cached prefix 1"),
        ([extend(9, 2), extend(7, 15)], [extend(9, 0), extend(9, 1), extend(9, 30)], "cached prefix 2-15"),
        ([extend(9, 16), extend(7, 99)], [extend(9, 0), extend(9, 15)], "cached prefix >= 16"),
        ([extend(9, 0), extend(7, 192)], [extend(9, 16), extend(9, 77)], "cached prefix % 64 == 0"),
        ([extend(9, 64), extend(7, 192)], [extend(9, 0), extend(9, 77)], "cached prefix > 0 and cached prefix % 64 == 0"),
        ([SequenceShape("decode", 1, 9, 1, 0)], [extend(1, 9), extend(3, 9)], "decode only"),
        ([extend(9, 3, 2, 1)], [extend(9, 3, 2, 0), extend(9, 3)], "not the first of its batch"),
        ([extend(9, 3, 2, 0), extend(9, 3, 2, 1)], [extend(9, 3)], "batch > 1"),
        ([extend(200, 0), extend(65, 0)], [extend(64, 0), extend(9, 0)], "length > 64"),
        ([extend(9, 37), extend(9, 80)], [extend(9, 36), extend(200, 0)], "cached prefix >= 37"),
        ([extend(9, 0), extend(40, 0)], [extend(41, 0), extend(50, 3)], "new tokens <= 40"),
        (
            [extend(9, 37), extend(9, 80)],
            [extend(9, 36), SequenceShape("decode", 1, 90, 1, 0)],
            "extend only and cached prefix >= 37",
        ),
        # One failing pair of lengths tells nothing of where it begins; nor do limits that no sequence comes near.
        ([extend(256, 256)], [extend(128, 128), extend(256, 0), extend(7, 193)], "new+prefix is 256+256"),
        ([extend(300, 0), extend(400, 0)], [extend(9, 0), extend(50, 3)], "new tokens >= 300"),
    ],
)
def test_the_simplest_condition_is_first(failing: list[SequenceShape], passing: list[SequenceShape], words: str) -> None:
    assert separating(failing, passing)[0].words == words


def test_the_passing_side_of_a_limit_is_what_was_seen_to_pass() -> None:
    first, *_ = separating([extend(9, 256), extend(7, 300)], [extend(9, 193), extend(9, 0)])
    assert (first.words, first.otherwise) == ("cached prefix >= 256", "cached prefix <= 193")


def test_what_no_condition_separates_has_none() -> None:
    assert separating([extend(9, 3)], [extend(9, 3)]) == []
