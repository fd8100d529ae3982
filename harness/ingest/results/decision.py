"""Pairs of scores and a margin -> a `ComparedTask`, by the decision that the judge makes as well."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from assay.harness.ingest.comparison import ComparedTask
from assay.harness.ingest.results.pairing import ItemPair, guessing
from assay.harness.judge.paired_accuracy import Rule, Scores, accuracy
from assay.harness.judge.suite_decisions import accuracy_sentence


def decide_pairs(pairs: Sequence[ItemPair], rule: Rule, adaptive: bool = False) -> ComparedTask:
    """Decide by the paired scores.

    Args:
        pairs: in the order in which they were asked.
        rule: of the test.
        adaptive: whether either side stopped asking because of its answers, as assay's own runs do.
    """
    scores = [Scores(a.key, a.score or 0.0, b.score or 0.0, (a.parsed is None, b.parsed is None)) for a, b in pairs]
    if not adaptive:
        # Files are often sorted by subject, and bets win or lose on values that come in a random order.
        scores.sort(key=lambda each: hashlib.sha256(each.unit.encode()).digest())
    result = accuracy(scores, rule, guessing(pairs), fixed=not adaptive)
    lost, gained = result.flips
    return ComparedTask(
        task="",
        verdict=result.verdict,
        why=accuracy_sentence(result, ("A", "B")),
        test="betting" if scores and not result.exact else "exact",
        pairs=len(scores),
        a=float(np.mean([each.reference for each in scores])) if scores else 0.0,
        b=float(np.mean([each.candidate for each in scores])) if scores else 0.0,
        lost=lost,
        gained=gained,
        loss=result.loss,
        low=result.interval.low,
        high=result.interval.high,
        p_mcnemar=result.p_mcnemar,
        p_inferior=result.p_inferior,
        p_regression=result.p_regression,
    )
