"""The one way from numbers and ids to sentences: a function or a template for each id, which renderers reach by `say`."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import string
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from assay.harness.judge.judgement import Metric
from assay.harness.statement import Statement
from assay.harness.text import counted, few, listed, one_line, percent, points, ranges, three_digits, times
from assay.harness.verdict import Check, Finding


class Found(NamedTuple):
    """The text of a check's outcome: what was found, and what would resolve it if the check is not met."""

    found: str
    settles: str = ""


class Measured(NamedTuple):
    """The text of a metric: its name, its number with its unit, and where it comes from."""

    title: str
    text: str
    explain: str = ""


_Said = TypeVar("_Said", str, Found, Measured)
_SAYS: dict[str, Callable[..., Any]] = {}


def says(function: Callable[..., _Said]) -> Callable[..., _Said]:
    """Let a function say the statements whose id is its name, so ``_all_answered`` says "all-answered"."""
    _SAYS[function.__name__.strip("_").replace("_", "-")] = function
    return function


_Words = str | Found | Measured


class Cases(NamedTuple):
    """Templates of one id: the value `by` chooses among them; the template of "" is the fallback."""

    by: str
    words: Mapping[str, _Words]


Templates = Mapping[str, _Words | Cases]
"""Texts of statements by id, as templates such as "{share:percent} of {questions:,}" or "{cached:if some|none}". A module of this
package has them as ``SENTENCES``; a function says a statement that needs more than inserted values."""
_FORMATS: Mapping[str, Callable[[Any, str], str]] = {
    "percent": lambda share, _: percent(share),
    "digits": lambda number, _: three_digits(number),
    "points": lambda number, _: points(number),
    "times": lambda ratio, _: times(ratio),
    "ranges": lambda numbers, _: ranges(numbers),
    "listed": lambda words, _: listed(words),
    "counted": lambda many, what: counted(many if isinstance(many, int) else len(many), what),
    "line": lambda text, most: one_line(text, int(most or 200)),
    "count": lambda many, _: str(len(many)),
    "commas": lambda words, _: ", ".join(words),
    "parts": lambda words, most: "; ".join(words[: int(most)] if most else words),
    "said": lambda statements, _: say(*statements),
    "few": lambda words, most: few(words, int(most)),
    "or": lambda text, otherwise: text or otherwise,
    "are": lambda many, _: "is" if many == 1 else "are",
    "noise": lambda worst, _: f"{times(worst)} what rounding explains" if math.isfinite(worst) else "not finite",
    "if": lambda holds, words: words.split("|")[0 if holds else 1],
    "measured": lambda number, how: (
        "not measured" if number is None else " ".join([format(number, how.split()[0]), *how.split()[1:]])
    ),
}


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        how, _, rest = format_spec.partition(" ")
        if isinstance(value, Statement):
            return say(value)
        if value is None and how not in _FORMATS:  # also within words that are not chosen
            return "not measured"
        return _FORMATS[how](value, rest) if how in _FORMATS else str(super().format_field(value, format_spec))


class _Template:
    """A template as a function of its values. A value that only chooses words is false if not stated."""

    def __init__(self, words: _Words) -> None:
        self._words = words
        needed: dict[str, bool] = {}
        for name, how in (field for text in ([words] if isinstance(words, str) else words) for field in _fields(text)):
            needed[name] = needed.get(name, False) or not how.startswith("if ")
        self._unstated = {name: None for name, is_needed in needed.items() if not is_needed}
        kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        taken = [inspect.Parameter(name, kind, default=self._unstated.get(name, empty)) for name in needed]
        if isinstance(words, Measured):
            taken = [_METRIC, *(each for each in taken if each.name != _METRIC.name)]
        self.__signature__ = inspect.Signature(taken)

    def __call__(self, *metric: Metric, **values: Any) -> _Words:
        values = {**self._unstated, **values, _METRIC.name: metric[0] if metric else None}
        if isinstance(self._words, str):
            return _Formatter().vformat(self._words, (), values)
        return type(self._words)(*(_Formatter().vformat(text, (), values) for text in self._words))


class _Choice:
    """`Cases` as a function of their values."""

    def __init__(self, cases: Cases) -> None:
        self._by, self._of = cases.by, {case: _Template(words) for case, words in cases.words.items()}
        taken = {name for template in self._of.values() for name in template.__signature__.parameters} - {cases.by}
        kind = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(cases.by, kind),
                *(inspect.Parameter(name, kind, default=None) for name in sorted(taken)),
            ]
        )

    def __call__(self, **values: Any) -> _Words:
        return (self._of.get(values[self._by]) or self._of[""])(**values)


_METRIC = inspect.Parameter("metric", inspect.Parameter.POSITIONAL_ONLY)


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a template's values with their formats, including those within formats."""
    for _, name, how, _ in string.Formatter().parse(text):
        if name:
            yield re.split(r"[.\[]", name)[0], how or ""
            yield from _fields(how or "")


@cache
def sayings() -> dict[str, Callable[..., Any]]:
    """Return the function that says each id. The modules are imported on first use."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        templates: Templates = getattr(importlib.import_module(f"{package}.{module.name}"), "SENTENCES", {})
        _SAYS.update(
            {id_: _Choice(words) if isinstance(words, Cases) else _Template(words) for id_, words in templates.items()}
        )
    return _SAYS


def say(*statements: Statement) -> str:
    """Say statements, one sentence after the other. A statement with an unknown id, from a later assay, is shown as it is."""
    return " ".join(text for text in map(_sentence, statements) if text)


def _sentence(statement: Statement) -> str:
    said = _said(statement.id, statement.values)
    return said if isinstance(said, str) else said[0]


def _said(id_: str, values: dict[str, Any], *metric: Metric) -> _Words:
    says_it = sayings().get(id_)
    if says_it is not None and _takes(says_it, *metric, **values):
        said: _Words = says_it(*metric, **values)
        return said
    return f"{id_}: {', '.join(f'{name} {value}' for name, value in values.items())}" if values else id_


def _takes(function: Callable[..., Any], *arguments: Any, **values: Any) -> bool:
    """Return True if a function takes these values: a later assay may state more of them."""
    try:
        inspect.signature(function).bind(*arguments, **values)
    except TypeError:
        return False
    return True


def found_of(check: Check) -> Found:
    """Say what a check found, and, if it is not met, what would resolve it."""
    said = found_in(check.outcome)
    return said._replace(settles="") if check.status == "ok" else said


def found_in(outcome: Statement) -> Found:
    """Say what the outcome of a check states."""
    said = _said(outcome.id, outcome.values)
    return said if isinstance(said, Found) else Found(said if isinstance(said, str) else said.text)


def measured_of(metric: Metric) -> Measured:
    """Describe a metric, with its number."""
    said = _said(metric.quantity, metric.values, metric)
    return (
        said if isinstance(said, Measured) else Measured(metric.id, "" if metric.value is None else f"{metric.value:g}")
    )


def said_finding(finding: Finding) -> Finding:
    """Return a finding with all its statements as text."""
    diagnosis = say(finding.claim) if finding.claim else finding.diagnosis
    evidence = (*finding.evidence, *map(say, finding.shown_by))
    return finding.model_copy(update={"diagnosis": diagnosis, "evidence": evidence, "shown_by": ()})
