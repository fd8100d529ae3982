"""Paired answers to multiple-choice questions, by outcome."""

from __future__ import annotations

import numpy as np

from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import Pair
from assay.harness.sides import Role


def paired(both_right: int = 0, lost: int = 0, gained: int = 0, both_wrong: int = 0) -> list[Pair]:
    """Questions with these outcomes, in an order that mixes them."""
    outcomes = [("A", "A")] * both_right + [("A", "B")] * lost + [("B", "A")] * gained + [("B", "C")] * both_wrong
    np.random.default_rng(0).shuffle(outcomes)
    items = [Item(suite="accuracy", id=str(n), prompt=str(n), prompt_hash=str(n), expected="A") for n in range(len(outcomes))]

    def answer(item: Item, role: Role, letter: str) -> Answer:
        return Answer(
            suite="accuracy", role=role, item=item.id, prompt_hash=item.prompt_hash, text="", parsed=letter,
            finish_reason="stop", prompt_tokens=1, completion_tokens=1, latency_s=0.1,
        )  # fmt: skip

    return [
        Pair(item, answer(item, "reference", str(a)), answer(item, "candidate", str(b)))
        for item, (a, b) in zip(items, outcomes, strict=True)
    ]
