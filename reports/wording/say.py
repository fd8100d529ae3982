"""The one way from numbers and ids to words: a function for each id, which any renderer reaches by `say`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from assay.harness.judge.judgement import Metric
from assay.harness.statement import Statement
from assay.harness.verdict import Check, Finding


class Found(NamedTuple):
    """The words of a check's outcome: what was found, and what would resolve it where the check is not met."""

    found: str
    settles: str = ""


class Measured(NamedTuple):
    """The words of a metric: its name, its number with its unit, and where it comes from."""

    title: str
    text: str
    explain: str = ""


_Said = TypeVar("_Said", str, Found, Measured)
_SAYS: dict[str, Callable[..., Any]] = {}


def says(function: Callable[..., _Said]) -> Callable[..., _Said]:
    """Let a function say the statements of one id: that of its name, so ``_all_answered`` says "all-answered"."""
    _SAYS[function.__name__.strip("_").replace("_", "-")] = function
    return function


@cache
def sayings() -> dict[str, Callable[..., Any]]:
    """Return the functions that say something by id. Their modules are imported when the first is needed."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return _SAYS


def say(*statements: Statement) -> str:
    """Say statements, one sentence after the other. One of an unknown id, as a later assay may write, is shown as it is."""
    return " ".join(text for text in map(_sentence, statements) if text)


def _sentence(statement: Statement) -> str:
    said = _said(statement.id, statement.values)
    return said if isinstance(said, str) else said[0]


def _said(id_: str, values: dict[str, Any], *metric: Metric) -> str | Found | Measured:
    says_it = sayings().get(id_)
    if says_it is not None and _takes(says_it, *metric, **values):
        said: str | Found | Measured = says_it(*metric, **values)
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
    """Say what a check found, and what would resolve it; nothing would where it is met."""
    said = found_in(check.outcome)
    return said._replace(settles="") if check.status == "ok" else said


def found_in(outcome: Statement) -> Found:
    """Say what the outcome of a check states."""
    said = _said(outcome.id, outcome.values)
    return said if isinstance(said, Found) else Found(said if isinstance(said, str) else said.text)


def measured_of(metric: Metric) -> Measured:
    """Say what a metric is, with its number."""
    said = _said(metric.quantity, metric.values, metric)
    return (
        said if isinstance(said, Measured) else Measured(metric.id, "" if metric.value is None else f"{metric.value:g}")
    )


def said_finding(finding: Finding) -> Finding:
    """Return a finding with all that it states in words."""
    diagnosis = say(finding.claim) if finding.claim else finding.diagnosis
    evidence = (*finding.evidence, *map(say, finding.shown_by))
    return finding.model_copy(update={"diagnosis": diagnosis, "evidence": evidence, "shown_by": ()})
