"""GSM8K: grade-school word problems whose answer is a number, compared exactly.

The release has two fields, ``question`` and ``answer``, whose last line is ``#### NUMBER`` (Cobbe et al., arXiv 2110.14168; the
files ``test.jsonl`` of openai/grade-school-math, and the dataset openai/gsm8k, configuration ``main``). The prompt comes from
simple-evals' MGSM in English (``mgsm_eval.py``), since GSM8K itself does not prescribe one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from assay.evals.mmlu import Drawn, in_random_order, load_set
from assay.evals.questions import Question, number_form
from assay.harness.errors import UsageError
from assay.harness.reading import LARGEST

_NAME = "gsm8k"
_HUB_NAME = "openai/gsm8k"
_COLUMNS = ("question", "answer")
_PROMPT = (
    "Solve this math problem. Give the reasoning steps before giving the final answer on the last line by itself in the "
    'format of "Answer:". Do not add anything other than the integer answer after "Answer:".\n\n{problem}'
)
_ANSWER = re.compile(r"####\s*(-?[\d,]+(?:\.\d+)?)\s*$")
_WHAT_TO_GIVE = (
    f"give {_NAME!r}, {_NAME + ':FILE.jsonl'!r} with the fields question and answer, or "
    f"{_NAME + ':NAME'!r} of a dataset or a folder laid out like {_HUB_NAME}"
)


def is_gsm8k(data: str) -> bool:
    """Return True if ``--data`` names problems of this kind: ``gsm8k``, ``gsm8k:SOURCE`` or a ``.jsonl`` file."""
    return data.partition(":")[0] == _NAME or data.endswith(".jsonl")


def draw_gsm8k(data: str, most: int, seed: int = 0) -> Drawn:
    """Draw problems in a random order.

    Args:
        data: see `is_gsm8k`; SOURCE is a ``.jsonl`` file, a folder or a dataset's name, by default `_HUB_NAME`.

    Returns:
        The problems, with ids ``gsm8k-<index in the set>``.

    Raises:
        UsageError: the set cannot be loaded, or a row is not a problem.
    """
    name, _, rest = data.partition(":")
    source = (rest if name == _NAME else data) or _HUB_NAME
    try:
        problems = [_question(source, index, row) for index, row in enumerate(_load(source))]
    except UnicodeDecodeError as error:  # Arrow treats bytes as text without checking them
        raise UsageError(f"{source} is not text: {error}.", "UTF-8", "convert it to UTF-8") from None
    return in_random_order(problems, most, seed)


def _load(source: str) -> Any:
    path = Path(source).expanduser()
    if path.suffix == ".jsonl" and not path.is_file():
        raise UsageError(f"{source} does not exist.", "a file", _WHAT_TO_GIVE)
    if not path.is_file():
        return load_set(source, _COLUMNS, _WHAT_TO_GIVE, source, "main", split="test")
    if (size := path.stat().st_size) > LARGEST:
        raise UsageError(f"{source} has {size:,} bytes.", f"at most {LARGEST:,}", "check that it is the right file")
    return load_set(source, _COLUMNS, _WHAT_TO_GIVE, "json", data_files=str(path), split="train")


def _question(source: str, index: int, row: dict[str, Any]) -> Question:
    number = _ANSWER.search(str(row["answer"] or ""))
    if not isinstance(row["question"], str):
        raise UsageError(f"{source}, row {index}: the question is not a string.", "a text", "correct or drop that row")
    if not row["question"] or number is None:
        raise UsageError(
            f"{source}, row {index}: the answer ends in {str(row['answer'])[-40:]!r}.",
            "#### and a number",
            "correct or drop that row",
        )
    prompt, id_ = _PROMPT.format(problem=row["question"]), f"gsm8k-{index}"
    return Question(id_, "gsm8k", "stem", prompt, number_form(number[1]), row["question"], unit=id_)
