"""``questions.json``: how the questions of a run were planned, before any was asked, and where asking stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from assay.harness.evidence.nonce import check_run
from assay.harness.evidence.records import Item
from assay.harness.files import write_whole
from assay.harness.schema import Record, read_json

FILE = "questions.json"
Stop = Literal["decided", "hopeless", "all asked"]
"""Why asking stopped: the answers decided; they show that no number of questions would; or there was none left."""


class QuestionPlan(Record):
    """The stopping rule of a run's questions. What it says of the stop is for a reader: a verdict is computed from the answers.

    Attributes:
        run: nonce of the run.
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

    run: str = ""
    seed: int
    order_hash: str
    most: int
    population: int
    margin: float
    alpha: float
    regression_alpha: float
    stopped: Stop | None = None
    pairs: int | None = None


def order_hash(items: Iterable[Item]) -> str:
    """SHA-256 of ids, prompts, units and conditions of the questions, in order."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps([item.id, item.prompt_hash, item.unit, item.cold]).encode() + b"\n")
    return total.hexdigest()


def write_question_plan(folder: Path, plan: QuestionPlan) -> None:
    """Write the plan of a run's questions, in place of an earlier one.

    Raises:
        EvidenceError: it cannot be written.
    """
    write_whole(folder / FILE, plan.model_dump_json(indent=1))


def read_question_plan(folder: Path, nonce: str = "") -> QuestionPlan | None:
    """The plan of a run's questions; None where there is none.

    Raises:
        EvidenceError: the file is damaged, or another run's.
    """
    path = folder / FILE
    if not path.exists():
        return None
    plan = read_json(path, QuestionPlan, "run again with a new --out")
    check_run(path, plan.run, nonce)
    return plan
