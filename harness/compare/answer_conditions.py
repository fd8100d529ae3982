"""Both roles' answers by condition, and the condition that tells where the candidate is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import fisher_exact
from statsmodels.stats.multitest import multipletests

from assay.harness.compare.answers import Pair

UNKNOWN = "unknown"
NOT_OBSERVED = "not observed"

FINE = 0.1
"""A condition is fine if the candidate lost at most this share of what the reference got right there."""


def prefix_bucket(cached_tokens: int | None) -> str:
    """Bucket of a cached prefix, in tokens: a single one is only the beginning-of-sequence token."""
    if cached_tokens is None:
        return UNKNOWN
    if cached_tokens >= 16:
        return ">= 16"
    return "0" if cached_tokens < 1 else "1 (BOS)" if cached_tokens == 1 else "2-15"


def length_bucket(prompt_tokens: int) -> str:
    """Bucket of a prompt's length, in tokens: up to 64, then by powers of two."""
    if prompt_tokens <= 64:
        return "<= 64"
    high = 1 << (prompt_tokens - 1).bit_length()
    return f"{high // 2 + 1}-{high}"


def batch_bucket(batch_size: int | None) -> str:
    """Bucket of the number of sequences in the prefill batch that admitted the request."""
    if batch_size is None:
        return NOT_OBSERVED
    for high, name in ((1, "1"), (4, "2-4"), (8, "5-8"), (16, "9-16")):
        if batch_size <= high:
            return name
    return "> 16"


_BY: dict[str, tuple[Callable[[Pair], str], Callable[[Pair], float]]] = {
    # name: (bucket of a pair, key that sorts buckets; an unknown one is last)
    "cached prefix": (
        lambda p: prefix_bucket(p.candidate.cached_tokens),
        lambda p: _or_last(p.candidate.cached_tokens),
    ),
    "prompt length": (lambda p: length_bucket(p.candidate.prompt_tokens), lambda p: p.candidate.prompt_tokens),
    "batch size": (lambda p: batch_bucket(p.candidate.batch_size), lambda p: _or_last(p.candidate.batch_size)),
    "group": (lambda p: p.item.group, lambda p: 0),
}


def _or_last(number: int | None) -> float:
    return float("inf") if number is None else number


@dataclass(frozen=True)
class ConditionRow:
    """How both roles did on the items of one condition, by the candidate's own condition.

    Attributes:
        by: what the items were split by: "cached prefix", "prompt length", "batch size" or "group".
        bucket: the condition.
        n: pairs in it.
        reference_right: right by the reference.
        candidate_right: right by the candidate.
        candidate_unparsed: candidate's answers without a letter.
        lost: right by the reference only.
    """

    by: str
    bucket: str
    n: int
    reference_right: int
    candidate_right: int
    candidate_unparsed: int
    lost: int


def by_condition(pairs: Sequence[Pair]) -> list[ConditionRow]:
    """Split the pairs by each condition in turn; only buckets that hold a pair have a row."""
    rows = []
    for by, (bucket_of, rank) in _BY.items():
        buckets: dict[str, list[Pair]] = {}
        for p in sorted(pairs, key=lambda p: (rank(p), bucket_of(p))):
            buckets.setdefault(bucket_of(p), []).append(p)
        rows += [_row(by, bucket, inside) for bucket, inside in buckets.items()]
    return rows


def _row(by: str, bucket: str, pairs: Sequence[Pair]) -> ConditionRow:
    return ConditionRow(
        by=by,
        bucket=bucket,
        n=len(pairs),
        reference_right=sum(p.right("reference") for p in pairs),
        candidate_right=sum(p.right("candidate") for p in pairs),
        candidate_unparsed=sum(p.candidate.parsed is None for p in pairs),
        lost=sum(p.right("reference") and not p.right("candidate") for p in pairs),
    )


@dataclass(frozen=True)
class Telling:
    """A split in which the candidate is fine under some conditions and broken under others.

    Attributes:
        by: what the items were split by.
        broken: conditions under which the candidate loses more than elsewhere, worst first.
        fine: conditions under which it loses hardly anything.
        p_value: of the worst condition, corrected for all that were looked at.
        summary: the same as a sentence, without its full stop.
    """

    by: str
    broken: tuple[ConditionRow, ...]
    fine: tuple[ConditionRow, ...]
    p_value: float
    summary: str


def most_telling(rows: Sequence[ConditionRow], alpha: float = 0.01) -> Telling | None:
    """The split that separates best where the candidate is right from where it is not, or None if none does.

    Of the questions that the reference got right, the share that the candidate lost in a bucket is held against that in the
    other buckets of the same split (Fisher's exact test, one-sided), so that a hard subject does not look like a
    broken one. All buckets of all splits are one family (Holm's correction). A split is told only if the
    candidate is fine (loses at most `FINE`) in one of its other buckets. Unknown conditions are left out.

    Args:
        rows: as `by_condition` gives them.
        alpha: the corrected p value below which a bucket is broken.
    """
    known = [row for row in rows if row.bucket not in (UNKNOWN, NOT_OBSERVED) and row.reference_right]
    tested = [(row, others) for row in known if (others := [o for o in known if o.by == row.by and o != row])]
    if not tested:
        return None
    p_values = [_p_loses_more(row, others) for row, others in tested]
    _, corrected, _, _ = multipletests(p_values, method="holm")
    found = []
    for by in dict.fromkeys(row.by for row in known):
        broken = sorted(
            ((float(p), row) for p, (row, _) in zip(corrected, tested, strict=True) if row.by == by and p < alpha),
            key=lambda entry: (entry[0], -_share_lost(entry[1])),
        )
        worst = [row for _, row in broken]
        fine = tuple(row for row in known if row.by == by and row not in worst and _share_lost(row) <= FINE)
        if worst and fine:
            found.append(Telling(by, tuple(worst), fine, broken[0][0], _summary(by, worst, fine, broken[0][0])))
    # Of two splits that tell the same, the one that comes first in `_BY` is nearer to a cause.
    return min(found, key=lambda telling: telling.p_value, default=None)


def _share_lost(row: ConditionRow) -> float:
    return row.lost / row.reference_right


def _p_loses_more(row: ConditionRow, others: Sequence[ConditionRow]) -> float:
    lost, right = sum(o.lost for o in others), sum(o.reference_right for o in others)
    table = [[row.lost, row.reference_right - row.lost], [lost, right - lost]]
    return float(fisher_exact(table, alternative="greater").pvalue)


def _summary(by: str, broken: Sequence[ConditionRow], fine: Sequence[ConditionRow], p_value: float) -> str:
    return (
        f"by {by}, the candidate is right on {_counts(fine)}, but on {_counts(broken)} (Fisher, Holm p = {p_value:.2g})"
    )


def _counts(rows: Sequence[ConditionRow]) -> str:
    return ", ".join(f"{r.candidate_right}/{r.n} at {r.bucket} (reference {r.reference_right}/{r.n})" for r in rows)
