"""A question, its prompt, and how an answer is parsed.

The prompt of multiple-choice questions and the answer pattern are those of OpenAI's simple-evals (``common.py``), which SGLang's
own MMLU evaluation follows, so that scores can be compared with published ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

BUILTIN_DATA = "builtin"
"""Name of the built-in set (`assay.evals.synthetic`)."""
LETTERS = ("A", "B", "C", "D")
# Characters from which on a text before the question itself counts as a passage. Those of MMLU have 200 and more.
_SHORTEST_PASSAGE = 100
GROUPS = ("stem", "humanities", "social_sciences", "other")

PROMPT_HEADER = (
    "Answer the following multiple choice question. The last line of your response should be of the following "
    "format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering."
)
_ANSWER_LINE = re.compile(r"(?i)Answer[ \t]*:")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ANSWER_PATTERN = re.compile(r"(?i)Answer[ \t]*:[ \t]*\$?([A-D])\$?")


@dataclass(frozen=True)
class Question:
    """One question, answered by a letter or a number.

    Attributes:
        id: stable within its set; the key by which both roles' answers are paired.
        subject: the MMLU subject, the relation of a synthetic question, or the task.
        group: one of `GROUPS`.
        prompt: the text of the single user message.
        answer: the right answer, as `parse_answer` gives it.
        own: what it asks: the part of the prompt without the instructions and examples that prompts of its set share.
        unit: id of its unit: its own, or one for all questions that follow the same passage or are alike (`assay.evals.alike`).
    """

    id: str
    subject: str
    group: str
    prompt: str
    answer: str
    own: str
    unit: str


def choice_question(id: str, subject: str, group: str, text: str, options: Sequence[str], answer: str) -> Question:
    """Make a question with four options, and the prompt of simple-evals.

    Questions of a subject that follow the same passage are one unit. The passage is all but the last line of the text, if that is
    long enough to be one; the last line asks.
    """
    passage = text.rpartition("\n")[0].strip()
    unit = f"passage-{prompt_hash(f'{subject}/{passage}')}" if len(passage) >= _SHORTEST_PASSAGE else id
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
    own = f"{text}\n\n{listed}"
    return Question(id, subject, group, f"{PROMPT_HEADER}\n\n{own}", answer, own, unit)


def prompt_hash(prompt: str) -> str:
    """Return the first 16 hex digits of a prompt's SHA-256; shows whether two runs asked the same question."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]


def parse_answer(text: str, expected: str | None = None) -> str | None:
    """Extract the answer that a response gives, in the form of the expected one; None if it gives none.

    None is an *unparsed* answer, which is counted separately from wrong ones.

    - A letter, or nothing known of the form: as in simple-evals, the first match counts.
    - A number: the last one after the last "Answer:", as in simple-evals' MGSM (``mgsm_eval.py``), in `number_form`.

    Args:
        expected: the right answer; it decides only in which form the answer is looked for.
    """
    if expected is not None and _NUMBER.fullmatch(expected):
        given = _ANSWER_LINE.split(text)
        numbers = _NUMBER.findall(given[-1].replace(",", "")) if len(given) > 1 else []
        return number_form(numbers[-1]) if numbers else None
    match = _ANSWER_PATTERN.search(text)
    return match.group(1).upper() if match else None


def number_form(number: str) -> str:
    """Return a number without thousands separators, trailing zeros and plus sign: "1,250.0" is "1250"."""
    plain = f"{Decimal(number.replace(',', '')).normalize():f}"
    return "0" if plain == "-0" else plain
