"""Any multiple-choice or exact-match task of lm-eval, loaded by its own task loader.

Read in lm-eval 0.4.13: ``tasks/__init__.py`` (`TaskManager`), ``api/task.py`` (`ConfigurableTask`: doc_to_text, doc_to_choice,
doc_to_target, eval_docs, fewshot_context). Only the questions are taken from it. They are asked as chat messages and answered in
words, so that the answers are sampled from a cached prefix as in production; lm-eval's own multiple-choice scores compare the
likelihoods of the options instead. The score is therefore not comparable with a published one; both roles are asked the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.evals.mmlu import Drawn, in_random_order
from assay.evals.questions import LETTERS, PROMPT_HEADER, Question, number_form, text_form
from assay.harness.errors import UsageError

NAME = "lm-eval"
_EXACT_FOOTER = (
    "\n\nThe last line of your response should be of the following format: 'Answer: $ANSWER' (without quotes)."
)
_NUMBER = re.compile(r"-?[\d,]*\d(?:\.\d+)?")


def draw_task(name: str, most: int, seed: int) -> Drawn:
    """Draw questions of a task in a random order.

    Args:
        name: of the task; of a task of one's own ``FOLDER/TASK``, where the folder has its YAML file.
        most: largest number of questions.
        seed: of the order.

    Raises:
        UsageError: lm-eval is not installed, it has no such task, its data cannot be loaded, or it is of another kind.
    """
    task = _task(name)
    kind = task.OUTPUT_TYPE
    if kind not in ("multiple_choice", "generate_until"):
        raise UsageError(
            f"lm-eval's task {name} is of the kind {kind}.", "multiple_choice or generate_until", "name another task"
        )
    make = _choices if kind == "multiple_choice" else _exact
    return in_random_order(list(make(task, name.rpartition("/")[2])), most, seed)


def _task(name: str) -> Any:
    folder, _, task_name = name.rpartition("/")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UsageError(
            f"--data lm-eval:{name} needs lm-eval, which is not installed.",
            "lm-eval 0.4.13 or newer",
            'pip install "assay-harness[lm-eval]"',
        ) from None
    if folder and not Path(folder).is_dir():
        raise UsageError(f"There is no folder {folder}.", "the folder with the task's YAML file", "check the path")
    manager = TaskManager(include_path=folder or None)
    if task_name not in manager.all_subtasks:
        what = "is a group of tasks" if task_name in manager.all_groups else "is not known"
        raise UsageError(f"lm-eval's task {task_name} {what}.", "the name of one task", "see lm-eval ls tasks")
    try:
        return next(iter(manager.load([task_name])["tasks"].values()))
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        raise UsageError(
            f"lm-eval's task {name} cannot be loaded: {error}.",
            "a task whose data are on this machine or can be downloaded",
            "check the task",
        ) from None


def _choices(task: Any, name: str) -> Iterator[Question]:
    for index, doc in enumerate(task.eval_docs):
        text, options, target = task.doc_to_text(doc), task.doc_to_choice(doc), task.doc_to_target(doc)
        if not isinstance(text, str) or not 2 <= len(options) <= len(LETTERS):
            raise UsageError(
                f"lm-eval's task {name}, document {index}, has {len(options)} options.",
                f"2 to {len(LETTERS)} options of one text",
                "name another task",
            )
        right = target if isinstance(target, int) else options.index(target)
        listed = "\n".join(f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False))
        own = f"{text}\n\n{listed}"
        id_, prompt = f"{name}-{index}", f"{PROMPT_HEADER}\n\n{own}"
        yield Question(id_, name, "other", prompt, LETTERS[right], own, unit=id_)


def _exact(task: Any, name: str) -> Iterator[Question]:
    shots = task.config.num_fewshot or 0
    for index, doc in enumerate(task.eval_docs):
        target = task.doc_to_target(doc)
        if not isinstance(target, str):
            raise UsageError(
                f"lm-eval's task {name}, document {index}, has the target {target!r}.", "one text", "name another task"
            )
        text = task.fewshot_context(doc, num_fewshot=shots)
        id_, own = f"{name}-{index}", str(task.doc_to_text(doc))
        yield Question(id_, name, "other", f"{text}{_EXACT_FOOTER}", _expected_form(target), own, unit=id_)


def _expected_form(target: str) -> str:
    """Return a target in the form in which `parse_answer` gives answers: of a worked solution, what follows the last "####"."""
    final = target.rpartition("####")[2].strip()
    if final in LETTERS:
        return final
    return number_form(final) if _NUMBER.fullmatch(final) else text_form(final)
