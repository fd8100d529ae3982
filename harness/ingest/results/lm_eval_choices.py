"""Samples of lm-eval for people: the question, and of a multiple-choice task the letters and texts of the choices.

Read in lm-eval 0.4.9: ``resps`` of such a sample holds, for each choice, its log-likelihood and whether it is the greedy text, as
text; ``arguments`` the context and the continuation of each request; ``target`` the index of the right choice, or its text. `acc`
takes the choice with the largest log-likelihood, `acc_norm` that with the largest per character (``api/task.py``,
``ConfigurableTask.process_results``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from assay.harness.text import one_line

_QUESTION = ("question", "query", "problem", "input", "prompt", "goal", "ctx", "sentence", "text")
_SHOWN = 300


class Choice(NamedTuple):
    """One choice of a question: its letter, its text, and the log-likelihood that the model gives it."""

    letter: str
    text: str
    loglikelihood: float

    @property
    def shown(self) -> str:
        """The letter, with the text where it adds to it."""
        return self.letter if self.text in (self.letter, "") else f"{self.letter}: {self.text}"


def question(row: Mapping[str, Any]) -> str:
    """Return the question of a sample: that of its document, or else the end of its prompt; empty if neither is there."""
    doc = row.get("doc")
    named = [doc[name] for name in _QUESTION if isinstance(doc.get(name), str)] if isinstance(doc, dict) else []
    if named:
        return one_line(named[0], _SHOWN)
    first = next(iter(_requests(row)), ())
    return one_line(str(first[0])[-_SHOWN:], _SHOWN) if first else ""


def choices(row: Mapping[str, Any]) -> tuple[Choice, ...]:
    """List the choices of a sample, in order; empty if it is not of a multiple-choice task, or damaged."""
    responses = row.get("resps")
    if not isinstance(responses, list) or len(responses) < 2:
        return ()
    scores = [_loglikelihood(response) for response in responses]
    if any(math.isnan(score) for score in scores):
        return ()
    texts = [str(request[1]).strip() if len(request) > 1 else "" for request in _requests(row)]
    texts += [""] * (len(scores) - len(texts))
    named = zip(scores, texts, strict=False)
    return tuple(Choice(chr(ord("A") + at % 26), text, score) for at, (score, text) in enumerate(named))


def chosen(given: Sequence[Choice], metric: str) -> Choice:
    """Return the choice that the model takes by a metric: `acc_norm` divides by the length of the text."""
    by_length = metric == "acc_norm" and all(choice.text for choice in given)
    return max(given, key=lambda choice: choice.loglikelihood / (len(choice.text) if by_length else 1))


def described(given: Sequence[Choice], metric: str) -> str:
    """Describe the choice that the model takes, and the log-likelihood of each."""
    each = ", ".join(f"{choice.letter} {choice.loglikelihood:.2f}" for choice in given)
    return f"{chosen(given, metric).shown} ({each})"


def target(given: Sequence[Choice], written: object) -> str:
    """Return the right choice with its letter: `written` is its index or its text."""
    text = str(written).strip()
    if text.isdigit() and int(text) < len(given) and all(choice.text != text for choice in given):
        return given[int(text)].shown
    return next((choice.shown for choice in given if text and choice.text == text), text)


def _requests(row: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """List the arguments of each request: the context and the continuation; lm-eval 0.4.5 and later name them."""
    arguments = row.get("arguments")
    given = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    return [
        tuple(item.values()) if isinstance(item, dict) else tuple(item)
        for item in given
        if isinstance(item, (dict, list))
    ]


def _loglikelihood(response: Any) -> float:
    """Return the first number of a response, however deep it lies in lists; NaN if it is none."""
    for _ in range(4):
        if not (isinstance(response, list) and response):
            break
        response = response[0]
    else:
        return math.nan
    try:
        return float(response)
    except (TypeError, ValueError):
        return math.nan
