"""Bisecting: the layers that need the reference, the differences that break a candidate, and the commit that broke a kernel.

In all three, an outcome may differ from probe to probe: here is when it is clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

SCHEMA: Literal["assay.bisect/7"] = "assay.bisect/7"
Outcome = Literal["good", "bad", "skip"]
LEAD, MOST = 2, 5
"""One outcome must lead by so many probes, of at most so many."""


def majority(seen: Sequence[Outcome], lead: int = LEAD, most: int = MOST) -> Outcome | None:
    """Return the outcome that leads clearly, "skip" if none can or a probe was not made, or None if more probes are needed."""
    ahead = seen.count("bad") - seen.count("good")
    if abs(ahead) >= lead:
        return "bad" if ahead > 0 else "good"
    return "skip" if "skip" in seen or len(seen) >= most else None
