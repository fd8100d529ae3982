"""The search for the differences between two sides that break the candidate. No server, no clock; it calls a probe.

A probe receives the differences that are applied to the reference. The whole candidate must come out bad, the reference itself
good. Bisection picks a set that is bad, `ddmin` removes what it has to spare, and the claim is probed again: the set is bad, and
good without any one of its differences. The rest, without the set, is then searched in the same way until it is good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from assay.harness.drivers.bisect import LEAD, MOST, Outcome, majority
from assay.harness.statement import Statement, state
from assay.harness.stats.ddmin import ddmin, narrow

Names = frozenset[str]
MOST_PROBES = 300
"""Most probes of a search. Of 400 seeded histories, all 206 with steady outcomes end within 85 probes; of the 194 whose outcomes
change by chance, half end within 71 and 98 % within 265."""
# Sets that are looked for, and searches of one set before contradictory outcomes end it.
_MOST_SETS, _MOST_SEARCHES = 5, 6
# Probes of a set that may be made more, for each by which an outcome must lead more than usual.
_MORE = 4


class _Exhausted(Exception):
    """The search has made as many probes as it may."""


class Votes:
    """What the probes of each set came out as. A set is probed once as long as no probe contradicts another, then until one leads.

    Args:
        probe: receives the names of the differences that are applied.
        known: probes that were made before; they count towards `MOST_PROBES`.

    Attributes:
        steady: whether no set has come out both ways.
        doubts: how often what was concluded was contradicted: by so much more must an outcome lead.
    """

    def __init__(self, probe: Callable[[Names], Outcome], known: Iterable[tuple[Names, Outcome]] = ()) -> None:
        self._probe, self.steady, self.doubts = probe, True, 0
        self.seen: dict[Names, list[Outcome]] = {}
        for names, outcome in known:
            self._note(names, outcome)

    def _note(self, names: Names, outcome: Outcome) -> None:
        seen = self.seen.setdefault(names, [])
        seen.append(outcome)
        self.steady = self.steady and not {"good", "bad"} <= set(seen)

    def of(self, names: Collection[str], more: int = 0) -> Outcome:
        """Return the outcome of a set; `more` is by how many more probes it must lead than usual."""
        key = frozenset(names)
        while True:
            extra = more + self.doubts
            lead = (1 if self.steady else LEAD) + extra
            seen = self.seen.get(key, [])
            if (outcome := majority(seen, lead, MOST + _MORE * extra)) is not None:
                # What keeps coming out both ways is broken: the reference alone does not.
                return "bad" if outcome == "skip" and "skip" not in seen else outcome
            if sum(map(len, self.seen.values())) >= MOST_PROBES:
                raise _Exhausted
            self._note(key, self._probe(key))

    def sure(self, names: Collection[str]) -> Outcome:
        """Return the outcome of a set on which a conclusion rests: from more probes, and most if outcomes are unsteady."""
        outcome = self.of(names, more=1)
        return outcome if self.steady else self.of(names, more=2)


class Searched(NamedTuple):
    """What a search ended with: the sets that are bad, each as small as it can be, and why it ended."""

    outcome: Literal["found", "nothing", "inconclusive"]
    why: Statement
    sets: tuple[tuple[str, ...], ...] = ()


def find_sets(names: Sequence[str], votes: Votes) -> Searched:
    """Find the smallest sets of differences that break the candidate, up to `_MOST_SETS` of them that share none.

    Args:
        names: the differences, related ones next to each other.
        votes: makes the probes, at most `MOST_PROBES`.
    """
    sets: list[tuple[str, ...]] = []
    try:
        return _find_sets(names, votes, sets)
    except _Exhausted:
        unsteady = sum({"good", "bad"} <= set(seen) for seen in votes.seen.values())
        why = state("probes-exhausted", probes=MOST_PROBES, unsteady=unsteady, sets=len(votes.seen))
        return Searched("inconclusive", why, tuple(sets))


def _find_sets(names: Sequence[str], votes: Votes, sets: list[tuple[str, ...]]) -> Searched:
    """Find the sets, and append each to `sets` as soon as it is sure."""
    # Twice: whether outcomes are steady decides how often every set is probed.
    whole = votes.of(names, more=1)
    if whole == "good" and votes.of(names, more=2) == "good":
        return Searched("nothing", state("candidate-not-broken", differences=len(names)))
    if whole == "skip":
        return Searched("inconclusive", state("candidate-undecided"))
    if votes.of(()) != "good" and votes.of((), more=2) != "good":
        return Searched("inconclusive", state("reference-differs-from-itself"))
    left, searches = list(names), 0
    while left and len(sets) < _MOST_SETS and votes.sure(left) == "bad":
        guilty = _smallest(left, votes)
        if guilty and _is_sure(guilty, votes):
            sets.append(tuple(guilty))
            left, searches = [name for name in left if name not in guilty], 0
        elif (searches := searches + 1) == _MOST_SEARCHES:
            return Searched("inconclusive", state("outcomes-contradict"), tuple(sets))
        else:
            votes.doubts += 1
            votes.steady = False
    if not sets:
        return Searched("inconclusive", state("outcomes-contradict"))
    return Searched("found", state("differences-named", sets=len(sets), differences=len(names)), tuple(sets))


def _smallest(names: Sequence[str], votes: Votes) -> list[str]:
    """Return a part of a bad set that is bad and has nothing to spare, in the order of the names, or [] if outcomes contradict."""

    def holds(some: Sequence[str]) -> bool | None:
        outcome = votes.of(some)
        return None if outcome == "skip" else outcome == "bad"

    among = set(narrow(names, holds))
    picked = [name for name in names if name in among]
    # Without it, a wrong outcome has sent the bisection astray.
    return ddmin(picked, lambda some: holds(some) is True) if holds(picked) else []


def _is_sure(guilty: Sequence[str], votes: Votes) -> bool:
    """Probe a claim again: a set is bad, and not without any one of its differences."""
    if votes.sure(guilty) != "bad":
        return False
    rests = [[name for name in guilty if name != spared] for spared in guilty] if len(guilty) > 1 else []
    # A part that cannot be served is no doubt; a part that comes out both ways is.
    return all(votes.sure(rest) == "good" or "skip" in votes.seen[frozenset(rest)] for rest in rests)
