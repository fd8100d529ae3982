"""Settings that both servers were given because a backend forces them -> the words of the check that they agree."""

from __future__ import annotations

from assay.harness.evidence.common_settings import CommonSettings
from assay.harness.verdict import Check


def with_common_settings(check: Check, common: CommonSettings | None) -> Check:
    """Add to the check that both servers had the same flags what they were given so that it could be met.

    Args:
        check: `check_same_servers`.
        common: the common settings of the run; None if they were not looked for.
    """
    if common is None:
        return check
    words = list(common.because)
    if check.status == "failed":
        words += [f"not made equal: {one}" for one in common.impossible]
    return check.model_copy(update={"found": "; ".join([check.found, *words])})
