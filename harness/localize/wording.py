"""The headline of a kernel with a named bug: "applies a top-left causal mask once a prefix is cached"."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.attention.bugs.bug import Bug

_ONCE = {
    "cached prefix > 0": "once a prefix is cached",
    "no cached prefix": "where no prefix is cached",
    "extend only": "in extend",
    "decode only": "in decode",
    "not the first of its batch": "where it is not the first of its batch",
    "not the last of its batch": "where it is not the last of its batch",
}
_PLACES = {"cached prefix > 0": "with a cached prefix", "no cached prefix": "without a cached prefix"}
_RIGHT = {"prefix 0": "without a cached prefix", "a cached prefix": "with a cached prefix"}


def does(bug: Bug | None, condition: str) -> str:
    """Describe what the kernel does and when, in words that follow its name.

    Args:
        bug: the hypothesis; None if none fits.
        condition: words of the condition under which it shows, as `SequenceCondition.words`; empty for always.
    """
    act = "computes something other than attention" if bug is None else bug.does or f"computes {bug.title}"
    return f"{act} {_when(condition)}".rstrip()


def _when(condition: str) -> str:
    """Describe the condition as a headline does: "once a prefix is cached"; empty for always."""
    return _ONCE.get(condition, f"where {condition}") if condition else ""


def place(phases: Sequence[str], condition: str, only_there: bool, spans: Sequence[str]) -> str:
    """Describe where a bug shows: "in extend with a cached prefix (all 4 layers, all 4 heads)".

    Args:
        phases: in which it shows.
        condition: as of `does`.
        only_there: whether the bug must be confined to the condition.
        spans: layers, heads and query positions, in words.
    """
    under = ""
    if condition and not condition.endswith(" only"):
        under = _PLACES.get(condition, f"where {condition}")
        under = f" {'only ' if only_there else ''}{under}"
    return f"in {' and '.join(phases)}{under} ({', '.join(spans)})"


def correct(otherwise: str) -> str:
    """Describe where a kernel is correct, after "Correct": "without a cached prefix"."""
    return _RIGHT.get(otherwise, f"at {otherwise}" if otherwise else "in all other calls")
