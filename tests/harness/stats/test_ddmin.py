"""Delta debugging leaves nothing to spare, and bisection before it takes few tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from assay.harness.stats.ddmin import ddmin, narrow


def counted(holds: Callable[[set[int]], bool | None]) -> tuple[list[set[int]], Callable[[Sequence[int]], bool | None]]:
    asked: list[set[int]] = []

    def test(some: Sequence[int]) -> bool | None:
        asked.append(set(some))
        return holds(set(some))

    return asked, test


@pytest.mark.parametrize(("guilty", "most"), [({37}, 9), ({0}, 9), ({59}, 9), ({3, 40}, 16), ({1, 2, 3}, 23), ({0, 30, 59}, 23)])
def test_bisection_finds_a_few_of_sixty_items(guilty: set[int], most: int) -> None:
    asked, holds = counted(guilty.issubset)
    assert set(narrow(range(60), holds)) == guilty
    assert len(asked) <= most


def test_what_cannot_be_said_is_stepped_over() -> None:
    """Item 20 needs item 24: nothing can be said of a part with the first alone."""
    _, holds = counted(lambda some: None if 20 in some and 24 not in some else 40 in some)
    assert narrow(range(60), holds) == [40]
    _, holds = counted(lambda some: None if len(some) not in (0, 8) else len(some) == 8)
    assert sorted(narrow(range(8), holds)) == list(range(8))  # nothing can be said of any part


def test_an_item_that_hides_another_one_does_not_end_the_search() -> None:
    def holds(some: Sequence[int]) -> bool:
        return 5 in some and (7 not in some or 9 in some)

    assert ddmin(sorted(narrow(range(20), holds)), holds) == [5]


def test_delta_debugging_leaves_nothing_to_spare() -> None:
    assert ddmin(range(30), lambda some: {4, 17, 18} <= set(some)) == [4, 17, 18]
