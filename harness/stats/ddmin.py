"""Delta debugging: reduce a failing input to a part that still fails and that needs every one of its items. Bisection is cheaper.

Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering 28(2),
2002, figure 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

_Item = TypeVar("_Item")


def ddmin(items: Sequence[_Item], holds: Callable[[Sequence[_Item]], bool]) -> list[_Item]:
    """Reduce `items`, for which `holds` is true, to a part for which it is true, and false if any one of its items is removed.

    The property need not be monotone: it may hold for a part and fail for a larger part.
    """
    some, parts = list(items), 2
    while len(some) > 1:
        edges = [len(some) * part // parts for part in range(parts + 1)]
        chunks = [some[start:stop] for start, stop in pairwise(edges)]
        smaller = next((chunk for chunk in chunks if holds(chunk)), None)
        if smaller is not None:
            some, parts = smaller, 2
            continue
        rests = ([item for item in some if item not in chunk] for chunk in chunks)
        smaller = next((rest for rest in rests if holds(rest)), None)
        if smaller is not None:
            some, parts = smaller, max(parts - 1, 2)
        elif parts == len(some):
            break
        else:
            parts = min(2 * parts, len(some))
    return some


# Parts that may not be decided before a bisection takes all items between its ends.
_MOST_UNDECIDED = 6


def narrow(items: Sequence[_Item], holds: Callable[[Sequence[_Item]], bool | None]) -> list[_Item]:
    """Find a small part of `items` for which `holds` is true, by bisection: k of n items take about k (log2 n + 1) tests.

    Of the shortest prefix that holds together with what was picked before, the last item is picked, until what is picked holds by
    itself. It may still have items to spare where the property is not monotone: `ddmin` removes them.

    Args:
        items: for which `holds` is true.
        holds: is None for a part for which that cannot be said. Where too many are, all items between are picked.
    """
    picked: list[_Item] = []
    rest = list(items)
    while rest and not (picked and holds(picked)):
        # What is picked holds with rest[:high], and does not with rest[:low].
        low, high, undecided = 0, len(rest), set[int]()
        while len(undecided) <= _MOST_UNDECIDED:
            start, stop = max(pairwise(sorted({low, high, *undecided})), key=lambda ends: ends[1] - ends[0])
            middle = (start + stop) // 2
            if middle == start:
                break
            answer = holds([*picked, *rest[:middle]])
            if answer is None:
                undecided.add(middle)
                continue
            low, high = (low, middle) if answer else (middle, high)
            undecided = {place for place in undecided if low < place < high}
        picked += rest[low:high]
        rest = rest[:low]
    return picked
