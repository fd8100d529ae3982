from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.drivers.bisect.layer_search import SearchResult, find_layers
from assay.harness.statement import Statement, state

LAYERS = tuple(range(32))
guilty_sets = st.frozensets(st.sampled_from(LAYERS), min_size=1)
Task = Callable[[frozenset[int]], bool]


def alone(guilty: frozenset[int]) -> Task:
    """Right unless one of the guilty layers runs the candidate."""
    return lambda candidate: not candidate & guilty


class Asked:
    """A probe that keeps its answers; it must not be asked about the same set twice unless it may repeat."""

    def __init__(self, task: Task, repeats: bool = False) -> None:
        self.task, self.repeats = task, repeats
        self.answers: list[tuple[frozenset[int], bool]] = []

    def __call__(self, candidate: frozenset[int]) -> bool:
        assert self.repeats or candidate not in dict(self.answers)
        self.answers.append((candidate, self.task(candidate)))
        return self.answers[-1][1]


def found(search: SearchResult) -> frozenset[int]:
    assert search.outcome == "found", search.why
    return frozenset(one.layer for one in search.restored)


def check_needed(task: Task, restored: frozenset[int], layers: tuple[int, ...] = LAYERS) -> None:
    kept = frozenset(layers) - restored
    assert task(kept)
    assert not any(task(kept | {layer}) for layer in restored)


@given(guilty_sets)
def test_guilty_layers_are_found_exactly(guilty: frozenset[int]) -> None:
    search = find_layers(LAYERS, Asked(alone(guilty)), steady=True)
    assert found(search) == guilty
    assert search.monotone
    assert all(one.alone in (True, None if len(guilty) > 4 else True) for one in search.restored)


@given(st.frozensets(st.sampled_from(LAYERS), min_size=2, max_size=2))
def test_two_layers_that_fail_only_together(pair: frozenset[int]) -> None:
    task: Task = lambda candidate: not pair <= candidate  # noqa: E731
    asked = Asked(task)
    search = find_layers(LAYERS, asked, steady=True)
    (one,) = search.restored
    check_needed(task, found(search))
    assert not one.alone
    assert one.layer in pair
    assert len(asked.answers) <= 20


@given(st.lists(st.frozensets(st.sampled_from(LAYERS), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_set_of_layers_that_fails_together_is_hit_by_what_is_restored(groups: list[frozenset[int]]) -> None:
    task: Task = lambda candidate: not any(group <= candidate for group in groups)  # noqa: E731
    search = find_layers(LAYERS, Asked(task), steady=True)
    check_needed(task, found(search))
    assert search.monotone
    assert all(one.alone in (None, frozenset({one.layer}) in groups) for one in search.restored)


@pytest.mark.parametrize(("wrong_from", "restored"), [(10, 23), (31, 2)])
def test_small_errors_that_add_up_are_not_blamed_on_a_few(wrong_from: int, restored: int) -> None:
    search = find_layers(LAYERS, Asked(lambda candidate: len(candidate) < wrong_from), steady=True)
    assert len(search.restored) == restored
    assert not any(one.alone for one in search.restored)


def test_a_layer_whose_error_another_cancels_is_not_restored() -> None:
    # 1 is wrong without 5; 7 is always wrong. The search meets 1 first, and finds at the end that it is not needed.
    def task(candidate: frozenset[int]) -> bool:
        return 7 not in candidate and (1 not in candidate or 5 in candidate)

    search = find_layers(range(8), Asked(task), steady=True)
    assert found(search) == {7}
    assert not search.monotone


@given(st.randoms(use_true_random=False))
def test_every_restored_layer_is_needed_for_any_answers(draw: random.Random) -> None:
    layers = tuple(range(7))
    right = {frozenset(some): draw.random() < 0.5 for size in range(8) for some in combinations(layers, size)}
    right[frozenset()], right[frozenset(layers)] = True, False
    probe = Asked(right.__getitem__)
    search = find_layers(layers, probe, steady=True)
    check_needed(right.__getitem__, found(search), layers)
    asked = dict(probe.answers)
    assert search.monotone != any(asked[big] for small in asked if not asked[small] for big in asked if small < big)


@pytest.mark.parametrize(
    ("name", "guilty", "most"),
    [
        ("first", {0}, 9),
        ("last", {31}, 9),
        ("two", {7, 22}, 20),
        ("four", {3, 10, 17, 28}, 35),
        ("two at once, one far behind", {0, 1, 2, 31}, 23),
        ("every eighth", set(range(7, 32, 8)), 27),
        ("half", set(range(16)), 43),
        ("every second", set(LAYERS[::2]), 72),
        ("all but one", set(LAYERS) - {20}, 74),
        ("all", set(LAYERS), 43),
    ],
)
def test_probes_over_32_layers(name: str, guilty: set[int], most: int) -> None:
    asked = Asked(alone(frozenset(guilty)))
    find_layers(LAYERS, asked, steady=True)
    assert len(asked.answers) <= most, name


@pytest.mark.parametrize(
    ("right", "outcome", "asked", "why"),
    [(True, "nothing", 2, state("right-in-all-layers", layers=32)), (False, "inconclusive", 1, state("prompts-too-noisy"))],
)
def test_nothing_is_found_where_all_layers_are_right_or_the_reference_fails(
    right: bool, outcome: str, asked: int, why: Statement
) -> None:
    probe = Asked(lambda candidate: right)
    search = find_layers(LAYERS, probe, steady=True)
    assert (search.outcome, search.restored, len(probe.answers)) == (outcome, (), asked)
    assert search.why == why


def noisy(task: Task, noise: float, seed: int) -> Task:
    draw = random.Random(seed)
    return lambda candidate: task(candidate) != (draw.random() < noise)


def test_answers_that_are_not_steady_are_repeated_until_one_leads() -> None:
    def misled(steady: bool) -> int:
        searches = [find_layers(LAYERS, noisy(alone(frozenset({9})), 0.05, seed), steady) for seed in range(100)]
        decided = [{one.layer for one in search.restored} for search in searches if search.outcome != "inconclusive"]
        assert len(decided) > 85
        return sum(restored != {9} for restored in decided)

    assert misled(steady=False) <= 5
    assert misled(steady=True) > 15, "one answer is not enough where there is noise"


def test_a_set_without_a_clear_outcome_is_inconclusive() -> None:
    draw = random.Random(1)
    search = find_layers(LAYERS, lambda candidate: draw.random() < 0.5 if candidate else True, steady=False)
    assert search.outcome == "inconclusive"
    assert search.why.id == "no-outcome-leads"
    assert abs(search.why.values["right"] - search.why.values["wrong"]) < 2
