"""GSM8K: grade-school word problems whose answer is a number, compared exactly.

The release has two fields, ``question`` and ``answer``, whose last line is ``#### NUMBER`` (Cobbe et al., arXiv 2110.14168; the
files ``test.jsonl`` of openai/grade-school-math, and the dataset openai/gsm8k, configuration ``main``). The prompt is that of
simple-evals' MGSM in English (``mgsm_eval.py``), since GSM8K itself prescribes none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from assay.evals.mmlu import Drawn, in_random_order
from assay.evals.questions import Question, number_form
from assay.harness.errors import UsageError
from assay.harness.reading import LARGEST

NAME = "gsm8k"
_HUB_NAME = "openai/gsm8k"
_PROMPT = (
    "Solve this math problem. Give the reasoning steps before giving the final answer on the last line by itself in the "
    'format of "Answer:". Do not add anything other than the integer answer after "Answer:".\n\n{problem}'
)
_ANSWER = re.compile(r"####\s*(-?[\d,]+(?:\.\d+)?)\s*$")
_WHAT_TO_GIVE = (
    f"give {NAME!r}, {NAME + ':FILE.jsonl'!r} with the fields question and answer, or "
    f"{NAME + ':NAME'!r} of a dataset or a folder laid out like {_HUB_NAME}"
)


def draw_gsm8k(source: str, most: int, seed: int) -> Drawn:
    """Draw problems in a random order.

    Args:
        source: a ``.jsonl`` file, a folder or a dataset's name; empty for `_HUB_NAME`.
        most: largest number of problems.
        seed: of the order.

    Returns:
        Ids are ``gsm8k-<index in the set>``.

    Raises:
        UsageError: the set cannot be loaded, or a row of it is not a problem.
    """
    if most < 1:
        raise UsageError(f"{most} questions were asked for.", "1 or more", "give a larger --questions")
    rows = _load(source or _HUB_NAME)
    if missing := {"question", "answer"} - set(rows.column_names):
        raise UsageError(
            f"{source} has the columns {', '.join(rows.column_names)}: {', '.join(sorted(missing))} missing.",
            "question and answer",
            _WHAT_TO_GIVE,
        )
    try:
        problems = [_question(source or _HUB_NAME, index, row) for index, row in enumerate(rows)]
    except UnicodeDecodeError as error:  # Arrow reads bytes as text without a look at them
        raise UsageError(f"{source or _HUB_NAME} is no text: {error}.", "UTF-8", "convert it to UTF-8") from None
    return in_random_order(problems, most, seed)


def _load(source: str) -> Any:
    import datasets  # slow to import, and not needed for the other kinds of data

    path = Path(source).expanduser()
    if path.suffix == ".jsonl" and not path.is_file():
        raise UsageError(f"{source} does not exist.", "a file", _WHAT_TO_GIVE)
    if path.is_file() and (size := path.stat().st_size) > LARGEST:
        raise UsageError(f"{source} has {size:,} bytes.", f"at most {LARGEST:,}", "check that it is the right file")
    said = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would write file names to the terminal as they are
    try:
        if path.is_file():
            return datasets.load_dataset("json", data_files=str(path), split="train")
        return datasets.load_dataset(source, "main", split="test")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(
            f"GSM8K cannot be loaded from {source!r}: {error}.", "a file or a dataset", _WHAT_TO_GIVE
        ) from None
    finally:
        datasets.logging.set_verbosity(said)


def _question(source: str, index: int, row: dict[str, Any]) -> Question:
    number = _ANSWER.search(str(row["answer"] or ""))
    if not isinstance(row["question"], str):
        raise UsageError(f"{source}, row {index}: the question is no text.", "a text", "correct or drop that row")
    if not row["question"] or number is None:
        raise UsageError(
            f"{source}, row {index}: the answer ends in {str(row['answer'])[-40:]!r}.",
            "#### and a number",
            "correct or drop that row",
        )
    prompt, id_ = _PROMPT.format(problem=row["question"]), f"gsm8k-{index}"
    return Question(id_, "gsm8k", "stem", prompt, number_form(number[1]), row["question"], unit=id_)
