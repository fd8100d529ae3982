"""A question, its prompt, and the parsing of its answer.

The prompt for multiple-choice questions and the answer pattern come from OpenAI's simple-evals (``common.py``), which SGLang's own
MMLU evaluation follows, so that scores can be compared with published ones.
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
# Fewest characters before the question itself that count as a passage. MMLU's passages have 200 and more.
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
    """A question, answered by a letter or a number.

    Attributes:
        id: stable within its set; the key for pairing both roles' answers.
        subject: the MMLU subject, the relation of a synthetic question, or the task.
        group: one of `GROUPS`.
        prompt: the text of the single user message.
        answer: the right answer, in the form that `parse_answer` returns.
        own: the question itself: the prompt without the instructions and examples that all prompts of its set share.
        unit: id of its unit: its own, or one shared by questions on the same passage or by similar questions
            (`assay.evals.alike`).
    """

    id: str
    subject: str
    group: str
    prompt: str
    answer: str
    own: str
    unit: str


def choice_question(id: str, subject: str, group: str, text: str, options: Sequence[str], answer: str) -> Question:
    """Make a question with four options, and simple-evals' prompt.

    A subject's questions on the same passage are one unit. The passage is the text without its last line, which asks, if that is
    long enough.
    """
    passage = text.rpartition("\n")[0].strip()
    unit = f"passage-{prompt_hash(f'{subject}/{passage}')}" if len(passage) >= _SHORTEST_PASSAGE else id
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
    own = f"{text}\n\n{listed}"
    return Question(id, subject, group, f"{PROMPT_HEADER}\n\n{own}", answer, own, unit)


def prompt_hash(prompt: str) -> str:
    """Return the first 16 hex digits of a prompt's SHA-256, which show whether two runs asked the same question."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]


def parse_answer(text: str, expected: str | None = None) -> str | None:
    """Extract the answer from a response, in the form of the expected one, or return None if it is *unparsed*.

    Unparsed answers are counted separately from wrong ones.

    - A letter, or an unknown form: the first match counts, as in simple-evals.
    - A number: the last one after the last "Answer:", as in simple-evals' MGSM (``mgsm_eval.py``), in `number_form`.

    Args:
        expected: the right answer, which is only used to choose the form.
    """
    if expected is not None and _NUMBER.fullmatch(expected):
        given = _ANSWER_LINE.split(text)
        numbers = _NUMBER.findall(given[-1].replace(",", "")) if len(given) > 1 else []
        return number_form(numbers[-1]) if numbers else None
    match = _ANSWER_PATTERN.search(text)
    return match.group(1).upper() if match else None


def number_form(number: str) -> str:
    """Return a number without thousands separators, trailing zeros and plus sign: "1,250.0" becomes "1250"."""
    plain = f"{Decimal(number.replace(',', '')).normalize():f}"
    return "0" if plain == "-0" else plain
