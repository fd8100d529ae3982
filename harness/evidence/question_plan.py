"""``questions.json``: how the questions of a run were planned, before any was asked, and where asking stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Literal

from assay.harness.evidence.nonce import RunRecord
from assay.harness.evidence.records import Item
from assay.harness.evidence.run_file import RUN_AGAIN, RunFile

Stop = Literal["decided", "hopeless", "all asked"]
"""Why asking stopped: the answers decided; they show that no number of questions would; or there was none left."""


class QuestionPlan(RunRecord):
    """The stopping rule of a run's questions. What it says of the stop is for a reader: a verdict is computed from the answers.

    Attributes:
        seed: of the random order.
        order_hash: `order_hash` of the questions in their order.
        most: questions planned, the most that can be asked.
        population: units of the set from which the order was drawn.
        margin: largest loss that still passes, as a share of 1.
        alpha: level of the test that the loss is below the margin.
        regression_alpha: level of the test that it is above.
        stopped: why asking stopped; None before.
        pairs: questions that both roles had answered by then.
    """

    seed: int
    order_hash: str
    most: int
    population: int
    margin: float
    alpha: float
    regression_alpha: float
    stopped: Stop | None = None
    pairs: int | None = None


QUESTION_PLAN = RunFile("questions.json", QuestionPlan, RUN_AGAIN)


def order_hash(items: Iterable[Item]) -> str:
    """Hash ids, prompts, units and conditions of the questions in order, with SHA-256."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.id, item.prompt_hash, item.unit, item.cold]).encode() + b"\n")
    return total.hexdigest()
