"""From a failing arm to the smallest failing set of features, by delta debugging.

Every test may start a server, so a passing set excludes its subsets, and the sets that all failing arms share are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import combinations

from assay.harness.judge.invariance_arms import Arm
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


def _guesses(failing: Arm, failed: Collection[Arm], passed: Collection[Arm], of: Callable[[Arm], Arm]) -> Iterator[Arm]:
    """Yield the smallest sets that nothing excludes, starting with those that most failing arms contain."""
    sets = {of(frozenset(chosen)) for size in (1, 2) for chosen in combinations(sorted(failing), size)}
    left = [arm for arm in sets if arm < failing and not any(arm <= other for other in passed)]
    left.sort(key=lambda arm: (-sum(arm <= other for other in failed), len(arm), sorted(arm)))
    yield from left[:_GUESSED]
