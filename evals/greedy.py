"""Prompts for the greedy comparison: do both servers generate the same text, token by token?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from assay.evals.questions import Question
from assay.evals.synthetic import BUILTIN_SEED, questions

MAX_TOKENS = 48

# Short prompts without a shared header, as in smoke tests. Not for the tiny model, which knows only its own questions.
_PLAIN = (
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
    """Return up to `count` distinct prompts as (id, prompt).

    For the built-in set, they are synthetic questions that the accuracy suite does not ask. For any other set, they are the plain
    prompts followed by those of the questions, so that both short prompts and a shared, cached header occur.
    """
    prompts: Iterable[str] = (*_PLAIN, *(question.prompt for question in asked))
    if synthetic:
        prompts = (question.prompt for question in questions(BUILTIN_SEED + 1))
    distinct: dict[str, None] = {}  # equal prompts would count twice without adding evidence
    for prompt in prompts:
        if len(distinct) >= count:
            break
        distinct[prompt] = None
    return [(f"greedy-{index:03d}", prompt) for index, prompt in enumerate(distinct)]
