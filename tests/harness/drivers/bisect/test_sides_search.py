"""Seeded histories: differences between two sides, of which one to three break the candidate, alone or together."""

from __future__ import annotations

import random
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import pytest

from assay.harness.drivers.bisect import Outcome
from assay.harness.drivers.bisect.sides_search import MOST_PROBES, Votes, find_sets


class History(NamedTuple):
    """Differences with a known truth.

    Attributes:
        names: of all differences.
        sets: each breaks the candidate.
        missed: how often a broken side comes out good.
        alarms: how often a right side comes out bad.
        needs: pairs of which the first is not served without the second.
    """

    names: list[str]
    sets: list[set[str]]
    missed: float = 0.0
    alarms: float = 0.0
    needs: list[tuple[str, str]] = []  # noqa: RUF012 (read alone)


def seeded(seed: int) -> History:
    chance = random.Random(seed)
    names = [f"d{number:02}" for number in range(chance.randint(5, 60))]
    guilty = chance.sample(names, chance.randint(1, 3))
    shapes = {1: [[1]], 2: [[2], [1, 1]], 3: [[3], [1, 2], [1, 1, 1]]}
    sets, rest = list[set[str]](), list(guilty)
    for size in chance.choice(shapes[len(guilty)]):
        sets.append({rest.pop() for _ in range(size)})
    missed, alarms = [(0.0, 0.0), (0.0, 0.0), (0.1, 0.1), (0.15, 0.02), (0.3, 0.0)][seed % 5]
    others = [name for name in names if name not in guilty]
    needs = [(others[0], others[-1])] if seed % 5 in (1, 3) and len(others) > 1 else []
    return History(names, sets, missed, alarms, needs)


def probed(history: History, seed: int = 0) -> tuple[list[frozenset[str]], Votes]:
    chance, asked = random.Random(seed), list[frozenset[str]]()

    def probe(names: frozenset[str]) -> Outcome:
        asked.append(names)
        if any(first in names and second not in names for first, second in history.needs):
            return "skip"
        broken = any(guilty <= names for guilty in history.sets)
        if chance.random() < (history.missed if broken else history.alarms):
            broken = not broken
        return "bad" if broken else "good"

    return asked, Votes(probe)


def named(sets: Iterable[Iterable[str]]) -> list[list[str]]:
    return sorted(map(sorted, sets))


def test_twenty_seeded_histories_are_named_rightly() -> None:
    """Eight of them are steady, twelve come out both ways; at most three differences of up to sixty are guilty."""
    wrong, steady = [], []
    for seed in range(20):
        history = seeded(seed)
        asked, votes = probed(history, seed)
        searched = find_sets(history.names, votes)
        if searched.outcome != "found" or named(searched.sets) != named(history.sets):
            wrong.append((seed, history.sets, searched))
        if not (history.missed or history.alarms):
            steady.append(len(asked))
    assert wrong == []
    assert median(steady) <= 30
    assert max(steady) <= 70


def test_hundreds_of_seeded_histories_are_seldom_named_wrongly() -> None:
    steady = unsteady = 0
    for seed in range(20, 220):
        history = seeded(seed)
        _, votes = probed(history, seed)
        right = named(find_sets(history.names, votes).sets) == named(history.sets)
        steady += not right and not history.missed
        unsteady += not right and bool(history.missed)
    assert (steady, unsteady <= 12) == (0, True)  # of 80 and 120


def test_a_difference_of_sixty_takes_a_dozen_probes() -> None:
    history = History([f"package {number}" for number in range(60)], [{"package 41"}])
    asked, votes = probed(history)
    assert named(find_sets(history.names, votes).sets) == [["package 41"]]
    assert len(asked) <= 13
    # The whole twice, the reference, the claim and the rest: everything else is bisection.
    assert asked[:2] == [frozenset(history.names)] * 2
    assert frozenset() in asked


def test_what_a_package_needs_is_named_with_it() -> None:
    """A new tokenizer is not served without the library that it needs: only both together say something."""
    names = ["a", "library", "tokenizer", "z"]
    _, votes = probed(History(names, [{"tokenizer"}], needs=[("tokenizer", "library")]))
    assert find_sets(names, votes).sets == (("library", "tokenizer"),)
    assert votes.seen[frozenset({"tokenizer"})] == ["skip"]  # and is not tried again


@pytest.mark.parametrize(
    ("outcome", "outcomes", "why"),
    [
        ("nothing", {"whole": "good", "none": "good"}, "candidate-not-broken"),
        ("inconclusive", {"whole": "skip", "none": "good"}, "candidate-undecided"),
        ("inconclusive", {"whole": "bad", "none": "bad"}, "reference-differs-from-itself"),
    ],
)
def test_a_search_without_ends_names_nothing(outcome: str, outcomes: dict[str, Outcome], why: str) -> None:
    searched = find_sets(["a", "b"], Votes(lambda names: outcomes["whole" if names else "none"]))
    assert (searched.outcome, searched.why.id, searched.sets) == (outcome, why, ())


def test_probes_that_keep_contradicting_each_other_end_at_a_limit() -> None:
    """Without a limit, this search of 54 differences ends after 1,592 probes."""
    history = seeded(142)
    asked, votes = probed(history, 142)
    searched = find_sets(history.names, votes)
    assert (searched.outcome, searched.why.id, len(asked)) == ("inconclusive", "probes-exhausted", MOST_PROBES)
    assert searched.sets == (("d10",),)  # what was sure by then stays
    # The probes of an earlier call count: the same search does not go on for ever.
    again, resumed = probed(history)
    full = Votes(resumed._probe, [(names, "bad") for names in asked])
    assert find_sets(["a", "b"], full).why.id == "probes-exhausted"
    assert again == []


def test_probes_that_were_made_before_are_not_made_again() -> None:
    history = seeded(5)
    asked, votes = probed(history)
    before = find_sets(history.names, votes)
    again, resumed = probed(history)
    half = len(asked) // 2
    known = [(names, "bad" if any(guilty <= names for guilty in history.sets) else "good") for names in asked[:half]]
    resumed = Votes(resumed._probe, known)  # type: ignore[arg-type]
    assert find_sets(history.names, resumed) == before
    assert again == asked[half:]
