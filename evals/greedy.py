"""Prompts of the greedy comparison: do both servers generate the same text, token by token?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from assay.evals.questions import Question
from assay.evals.synthetic import BUILTIN_SEED, questions

MAX_TOKENS = 48

# Short prompts without a shared header, as in smoke tests. Not for the tiny model, which knows only its own questions.
PLAIN = (
    "The capital of France is",
    "What is 2 + 2?",
    "Write the numbers from one to twenty in words.",
    "Explain in one paragraph why the sky is blue.",
    "Translate into German: The early bird catches the worm.",
    "List the planets of the solar system in order.",
    "Write a Python function that reverses a linked list.",
    "Who wrote Pride and Prejudice, and when was it published?",
)


def greedy_prompts(asked: Sequence[Question], count: int, synthetic: bool) -> list[tuple[str, str]]:
    """Return `count` prompts as (id, prompt).

    For the built-in set they are further synthetic questions that the accuracy suite does not ask. For any other set they are the
    plain prompts followed by those of the questions, so that both short prompts and a shared, cached header occur.
    """
    if synthetic:
        fresh = itertools.islice(questions(BUILTIN_SEED + 1), count)
        return [(f"greedy-{index:03d}", question.prompt) for index, question in enumerate(fresh)]
    prompts = [*PLAIN, *(question.prompt for question in asked)][:count]
    return [(f"greedy-{index:03d}", prompt) for index, prompt in enumerate(prompts)]
