"""Sets of lengths: what those that were met stand for, and what is missing."""

from __future__ import annotations

import pytest

from assay.evals.envelope_load import _border_points
from assay.harness.evidence.envelope import Ranges, _in_all, gaps, ranges_of, stood_for


def test_lengths_are_kept_as_ranges() -> None:
    assert ranges_of([5, 1, 2, 3, 3]) == ((1, 3), (5, 5))
    assert ranges_of([]) == ()
    assert _in_all([((1, 5),), ((2, 3), (5, 9))]) == ((2, 3), (5, 5))
    assert _in_all([((1, 5),), ()]) == _in_all([]) == ()


def test_a_block_was_met_where_its_first_last_but_one_and_last_length_were() -> None:
    wanted = _border_points(1, 128)
    assert wanted == (1, 63, 64, 65, 127, 128)
    met = ranges_of({*wanted, 40, 70})
    assert stood_for(met, wanted) == ((1, 128),)
    assert gaps(met, wanted) == ()


def test_the_ends_of_a_block_do_not_stand_for_what_lies_between_unless_a_call_had_a_length_of_it() -> None:
    """Zeros for 201 to 254 new tokens passed: no call had one of these lengths."""
    wanted = _border_points(1, 256)
    assert gaps(ranges_of({*wanted, 40, 70, 150}), wanted) == ((194, 254),)
    assert gaps(ranges_of(range(64, 257, 64)), _border_points(1, 256, 64), 64) == (), "prefixes come in pages"
    assert gaps(ranges_of(range(64, 257, 64)), _border_points(1, 256, 16), 16) == ((65, 127), (129, 191), (193, 255))


@pytest.mark.parametrize("lost", _border_points(1, 128))
def test_without_one_side_of_a_border_the_lengths_of_a_block_stand_for_themselves(lost: int) -> None:
    wanted = _border_points(1, 128)
    missing = gaps(ranges_of({*wanted, 40, 70} - {lost}), wanted)
    assert any(first <= lost <= last for first, last in missing)
    assert sum(last - first + 1 for first, last in missing) == 64 - 3


def test_what_was_met_beyond_stays_and_what_lies_between_is_a_gap() -> None:
    """The envelope of issue 25: decode was compared at 1 to 200 and at 577 to 584, and called "to 584"."""
    met: Ranges = ((1, 200), (577, 584))
    wanted = _border_points(1, 512)
    assert stood_for(met, wanted) == met
    assert gaps(met, wanted) == ((201, 512),)
