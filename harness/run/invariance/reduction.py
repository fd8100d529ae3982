"""From a failing arm to the smallest failing set of features, by delta debugging.

Every test may start a server, so a passing set excludes its subsets, and the sets that all failing arms share are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, combinations_with_replacement

from assay.harness.engines.features import Feature
from assay.harness.judge.invariance_arms import BASE, Arm, closed, possible
from assay.harness.stats.ddmin import ddmin

_Fails = Callable[[Arm], bool | None]
"""True if an arm fails, False if it passes, or None if that is unknown, since it cannot be, or was not shown to be, on."""
# Most sets to try before `ddmin` begins.
_GUESSED = 4


def reduce(
    failing: Arm, fails: _Fails, failed: Collection[Arm], passed: Collection[Arm], of: Callable[[Arm], Arm]
) -> Arm:
    """Return the smallest subset of a failing arm's features that was seen to fail.

    Args:
        of: completes a set of features to one that can be switched on.
    """
    seen: dict[Arm, bool | None] = {failing: True}
    seen.update(dict.fromkeys(failed, True) | dict.fromkeys(passed, False))

    def test(features: Arm) -> bool:
        arm = of(features)
        if arm not in seen:
            excluded = not arm or any(seen[other] is False and arm <= other for other in seen)
            seen[arm] = False if excluded else fails(arm)
        return seen[arm] is True

    known = min((arm for arm, state in seen.items() if state and arm <= failing), key=len)
    for guess in _guesses(known, failed, passed, of):
        if test(guess):
            known = guess
            break
    # Completion adds back required features, so a part is tested as it is run.
    return of(frozenset(ddmin(sorted(known), lambda some: test(frozenset(some)))))


def unexplained(states: Mapping[Arm, bool | None], known: Mapping[str, Feature]) -> Arm:
    """Join pairs of features that only failing arms have, though no failing arm is a part of them: a second fault may hide there.

    Args:
        states: whether each arm that was run failed, or None if unknown.

    Returns:
        The features of as many such pairs as can be on together without a failing arm as a part, or no features without a pair.
    """
    failed = [arm for arm, state in states.items() if state]
    joined = BASE
    for pair in combinations_with_replacement(known, 2):
        having = [state for arm, state in states.items() if arm.issuperset(pair)]
        larger = joined | closed(pair, known)
        if having and all(having) and possible(larger, known) and not any(arm <= larger for arm in failed):
            joined = larger
    return joined


def _guesses(failing: Arm, failed: Collection[Arm], passed: Collection[Arm], of: Callable[[Arm], Arm]) -> Iterator[Arm]:
    """Yield the smallest sets that nothing excludes, starting with those that most failing arms contain."""
    sets = {of(frozenset(chosen)) for size in (1, 2) for chosen in combinations(sorted(failing), size)}
    left = [arm for arm in sets if arm < failing and not any(arm <= other for other in passed)]
    left.sort(key=lambda arm: (-sum(arm <= other for other in failed), len(arm), sorted(arm)))
    yield from left[:_GUESSED]
