"""Question sets by what ``--data`` names, and where each is made."""

from __future__ import annotations

from collections.abc import Callable

from assay.evals import gsm8k, mmlu, retrieval
from assay.evals.retrieval import PromptRoom


def draw(data: str, most: int, seed: int, fit: Callable[[], PromptRoom]) -> mmlu.Drawn:
    """Draw questions of a set in a random order.

    Args:
        data: ``gsm8k`` or ``gsm8k:SOURCE`` (`assay.evals.gsm8k`); ``retrieval`` or ``retrieval:LENGTHS``
            (`assay.evals.retrieval`); otherwise see `assay.evals.mmlu`.
        most: largest number of questions.
        seed: of the order.
        fit: says what fits into the model; called only for a set whose prompts depend on it.

    Raises:
        UsageError: the set does not exist, cannot be read, or does not fit into the model.
    """
    name, _, rest = data.partition(":")
    if name == gsm8k.NAME or data.endswith(".jsonl"):
        return gsm8k.draw_gsm8k(rest if name == gsm8k.NAME else data, most, seed)
    if name == retrieval.NAME:
        return retrieval.draw_retrieval(rest, most, seed, fit())
    return mmlu.draw_questions(data, most, seed)
