from __future__ import annotations

import random
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest

from assay.harness.engines.sglang.features import Feature
from assay.harness.judge.invariance_arms import Arm
from assay.harness.run.invariance.reduction import reduce, unexplained


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


KNOWN = {id_: Feature(id_, id_) for id_ in sorted(FEATURES)}


def test_pairs_that_only_failing_arms_have_are_run_without_what_fails() -> None:
    states: dict[Arm, bool | None] = {frozenset("abcd"): True, frozenset("ab"): True, frozenset("cd"): None}
    assert unexplained(states, KNOWN) == frozenset("acd"), "b with a is what fails"
    assert not unexplained({frozenset("ab"): True, frozenset("a"): False, frozenset("b"): False}, KNOWN)
    assert not unexplained({FEATURES: False}, KNOWN)


def test_two_bugs_are_both_found() -> None:
    """Each cell of the map that stays red is explained by a set that is named."""
    rng = random.Random(1)
    for _ in range(60):
        first, second = (frozenset(rng.sample(sorted(FEATURES), 2)) for _ in range(2))
        arms = [frozenset(rng.sample(sorted(FEATURES), 5)) for _ in range(8)]
        states: dict[Arm, bool | None] = {}

        def fails(arm: Arm, first: Arm = first, second: Arm = second, states: dict[Arm, bool | None] = states) -> bool:
            states[arm] = first <= arm or second <= arm
            return bool(states[arm])

        def shrink(arm: Arm, states: dict[Arm, bool | None] = states, fails: Any = fails) -> None:
            if fails(arm):
                known = [each for each, state in states.items() if state], [each for each, state in states.items() if not state]
                reduce(arm, fails, *known, lambda features: features)

        for arm in arms:
            shrink(arm)
        further = 0
        while arm := unexplained(states, KNOWN):
            shrink(arm)
            further += 1
        assert further <= 12
        failed = [arm for arm, state in states.items() if state]
        named = [arm for arm in failed if not any(other < arm for other in failed)]
        for pair in combinations_with_replacement(sorted(FEATURES), 2):
            having = [state for arm, state in states.items() if arm.issuperset(pair)]
            if having and all(having):
                assert any(arm <= set(pair) for arm in named), pair
