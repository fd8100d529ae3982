from __future__ import annotations

import random
from itertools import combinations

import pytest

from assay.harness.judge.invariance_arms import Arm
from assay.harness.run.invariance.drive import reduce


class Bug:
    """Fails where all of some features are on, and counts how often it was run."""

    def __init__(self, *carriers: str) -> None:
        self.carriers, self.runs = frozenset(carriers), 0

    def __call__(self, arm: Arm) -> bool:
        self.runs += 1
        return self.carriers <= arm


FEATURES = frozenset("abcdefgh")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_set_is_found(size: int) -> None:
    for carriers in combinations(sorted(FEATURES), size):
        assert reduce(FEATURES, Bug(*carriers), [FEATURES], [], lambda arm: arm) == set(carriers)


def test_a_set_that_cannot_be_switched_on_counts_as_no_failure() -> None:
    def fails(arm: Arm) -> bool | None:
        return None if len(arm) == 1 else {"a", "b"} <= arm

    assert reduce(frozenset("abcd"), fails, [frozenset("abcd")], [], lambda arm: arm) == {"a", "b"}


def test_what_a_feature_requires_comes_with_it() -> None:
    def of(arm: Arm) -> Arm:
        return arm | {"b"} if "a" in arm else arm

    assert reduce(FEATURES, Bug("a"), [FEATURES], [], of) == {"a", "b"}


def test_few_runs_are_needed_where_a_covering_array_came_before() -> None:
    rng = random.Random(0)
    worst = 0
    for _ in range(50):
        carriers = rng.sample(sorted(FEATURES), 2)
        arms = [frozenset(rng.sample(sorted(FEATURES), 4)) for _ in range(14)] + [FEATURES]
        failed = [arm for arm in arms if set(carriers) <= arm]
        passed = [arm for arm in arms if not set(carriers) <= arm]
        bug = Bug(*carriers)
        assert reduce(failed[0], bug, failed, passed, lambda arm: arm) == set(carriers)
        worst = max(worst, bug.runs)
    assert worst <= 12
