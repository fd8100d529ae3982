"""When an outcome that may differ from probe to probe is clear: in all three bisections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Outcome = Literal["good", "bad", "skip"]
LEAD, MOST = 2, 5
"""One outcome must lead by so many probes, of at most so many."""


def majority(seen: Sequence[Outcome], lead: int = LEAD, most: int = MOST) -> Outcome | None:
    """Return the outcome that leads clearly, "skip" if none can or a probe was not made, or None if more probes are needed."""
    ahead = seen.count("bad") - seen.count("good")
    if abs(ahead) >= lead:
        return "bad" if ahead > 0 else "good"
    return "skip" if "skip" in seen or len(seen) >= most else None
