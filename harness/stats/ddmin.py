"""Delta debugging: reduce a failing input to a part that still fails and that needs every one of its items.

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
