"""The headline of a kernel with a named bug: "applies a top-left causal mask once a prefix is cached"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from assay.harness.attention.hypotheses import Hypothesis

_ACTS = {
    r"leak-(keys|values|keys-values)-(previous|next)": r"reads the \1 of the \2 request",
    r"leak-prefix-(previous|next)": r"reads the cached prefix of the \1 request",
    r"leak-last-key-previous": "also sees the last key of the previous request",
    r"leak-first-key-next": "also sees the first key of the next request",
    r"leak-all-keys-previous": "also sees all keys of the previous request",
    r"mask-top-left": "applies a top-left causal mask",
    r"mask-one-key-too-many": "lets each query see the key after its own",
    r"mask-one-key-too-few": "hides its own key from each query",
    r"mask-missing": "applies no causal mask",
    r"prefix-dropped": "drops the cached prefix",
    r"prefix-one-token-(late|early)": r"reads the cached prefix one token \1",
    r"prefix-values-shifted": "reads the cached values one token late",
    r"sliding-window-(\d+)": r"sees only the last \1 keys",
    r"scale-missing": "does not scale the scores",
    r"scale-twice": "scales the scores twice",
    r"scale-doubled": "scales the scores by twice the scale",
    r"scale-of-head-dim-v": "scales the scores by the values' head dim",
    r"scale-of-all-heads": "scales the scores by the dims of all q heads",
    r"exp2-without-log2e": "applies exp2 to scores that lack log2(e)",
    r"exp-with-log2e": "applies exp to scores that hold log2(e)",
    r"kv-heads-interleaved": "interleaves the kv heads of its q heads",
    r"kv-head-(next|previous)-group": r"reads the kv head of the \1 group",
    r"([kq])-scale-(previous|next)-block": r"dequantises \1 with the scale of the \2 block",
    r"k-smoothed-by-block": "subtracts another mean of K in each block",
    r"k-smoothed-new-only": "subtracts the mean of K from new keys only",
    r"k-smoothing-lost": "does not subtract the mean of K",
    r"last-block-lost-(\d+)": r"loses the last partial block of \1 keys",
    r"newest-token-stale": "reads the token before in place of the newest one",
    r"newest-token-zero": "reads zeros in place of the newest token",
    r"accumulator-(\w+)": r"accumulates in \1",
    r"(values|scores)-saturate-fp8-e4m3": r"clamps \1 to the range of fp8 e4m3",
    r"(values|scores)-saturate-fp16": r"clamps \1 to the range of fp16",
    r"(values|scores)-overflow-fp16": r"overflows fp16 in its \1",
    r"output-scaled": "scales its output",
    r"output-not-written": "does not write its output",
}
"""Id of a bug -> verb phrase, in which groups of the id stand."""
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


def does(bug: Hypothesis | None, condition: str) -> str:
    """Describe what the kernel does and when, in words that follow its name.

    Args:
        bug: the hypothesis; None if none fits.
        condition: words of the condition under which it shows, as `SequenceCondition.words`; empty for always.
    """
    act = "computes something other than attention" if bug is None else _act(bug)
    return f"{act} {when(condition)}".rstrip()


def when(condition: str) -> str:
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


def _act(bug: Hypothesis) -> str:
    for pattern, phrase in _ACTS.items():
        if found := re.fullmatch(pattern, bug.id):
            return found.expand(phrase).replace("keys-values", "keys and values")
    return f"computes {bug.title}"
