"""Every expression of the readers takes time in proportion to its input: on long inputs made from the expression itself."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import re._parser as parser  # the parse tree, from which inputs are made
import signal
import time
from collections.abc import Iterator
from re import _constants as c
from types import ModuleType
from typing import Any

import assay.harness.ingest as package

LONG = 20_000
"""Characters: a quadratic expression takes some hundred million steps, about a second; a linear one a millisecond."""
MOST_S = 0.25


def modules() -> list[ModuleType]:
    names = [one.name for one in pkgutil.walk_packages(package.__path__, "assay.harness.ingest.")]
    return [importlib.import_module(name) for name in names]


def expressions() -> Iterator[tuple[str, re.Pattern[str], bool]]:
    """The compiled expressions of all modules of the room, also those in lists, dicts and rules, each once, by where they are."""
    seen: set[int] = set()
    for module in modules():
        source = inspect.getsource(module)
        for name, value in vars(module).items():
            for number, one in enumerate(found(value, 0)):
                if isinstance(one.pattern, str) and id(one) not in seen:
                    seen.add(id(one))
                    where = f"{module.__name__.removeprefix('assay.harness.ingest.')}.{name}[{number}]"
                    searched = re.search(rf"\b{name}\.(?:search|finditer|findall|sub|split)\(", source) is not None
                    yield where, one, searched


def found(value: Any, depth: int) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth < 4 and isinstance(value, dict):
        yield from (one for part in value.values() for one in found(part, depth + 1))
    elif depth < 4 and isinstance(value, list | tuple | set | frozenset):
        yield from (one for part in value for one in found(part, depth + 1))
    elif depth < 4 and hasattr(value, "__dict__") and type(value).__module__.startswith("assay.harness.ingest"):
        yield from (one for part in vars(value).values() for one in found(part, depth + 1))


def sample(tree: Any) -> str:
    """A short text that a part of an expression matches, as far as it consumes text."""
    return "".join(piece(*node) for node in tree)


def piece(op: Any, of: Any) -> str:
    if op is c.LITERAL:
        return chr(of)
    if op is c.NOT_LITERAL:
        return "a" if of != ord("a") else "b"
    if op is c.ANY:
        return "a"
    if op is c.IN:
        return member(of)
    if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
        return sample(of[2]) * max(of[0], 1 if of[1] else 0)
    if op is c.SUBPATTERN:
        return sample(of[3])
    if op is c.ATOMIC_GROUP:
        return sample(of)
    if op is c.BRANCH:
        return sample(of[1][0])
    return ""


def member(of: Any) -> str:
    kinds = {c.CATEGORY_DIGIT: "1", c.CATEGORY_WORD: "a", c.CATEGORY_SPACE: " ", c.CATEGORY_NOT_SPACE: "a"}
    if of[0][0] is c.NEGATE:
        text = "".join(map(chr, range(32, 127)))
        return next(one for one in "a1 ." + text if not any(inside(one, part) for part in of[1:]))
    op, value = of[0]
    return chr(value) if op is c.LITERAL else chr(value[0]) if op is c.RANGE else kinds.get(value, "!")


def inside(char: str, part: Any) -> bool:
    op, value = part
    if op is c.RANGE:
        return value[0] <= ord(char) <= value[1]
    if op is c.LITERAL:
        return ord(char) == value
    return {c.CATEGORY_DIGIT: char.isdigit(), c.CATEGORY_SPACE: char.isspace()}.get(value, char.isalnum() or char == "_")


def pumped(tree: Any, before: str = "") -> Iterator[str]:
    """What an expression matches, with each of its unbounded repetitions repeated until the text is long, and then cut off."""
    for op, of in tree:
        if op in (c.MAX_REPEAT, c.MIN_REPEAT):
            if of[1] is c.MAXREPEAT:
                once = sample(of[2]) or "a"
                yield before + once * (LONG // len(once))
                if before[-1:].isspace() or once.isspace():
                    yield before + " " * LONG
            yield from pumped(of[2], before)
        elif op is c.SUBPATTERN:
            yield from pumped(of[3], before)
        elif op is c.BRANCH:
            for branch in of[1]:
                yield from pumped(branch, before)
        before += piece(op, of)


def seconds(pattern: re.Pattern[str], text: str, searched: bool) -> float:
    """Of the slower of a match of the whole and, where the module searches with it, a search; infinite where they do not end."""

    def stop(*_: object) -> None:
        raise TimeoutError

    earlier = signal.signal(signal.SIGVTALRM, stop)
    slowest = 0.0
    try:
        for run in (pattern.fullmatch, *([pattern.search] if searched else [])):
            signal.setitimer(signal.ITIMER_VIRTUAL, 1.1 * MOST_S)
            began = time.process_time()
            run(text)
            slowest = max(slowest, time.process_time() - began)
    except TimeoutError:
        return float("inf")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)
    return slowest


def slow(pattern: re.Pattern[str], searched: bool = True) -> Iterator[str]:
    texts = dict.fromkeys(text + end for text in pumped(parser.parse(pattern.pattern, pattern.flags)) for end in ("\0", ""))
    return (f"{text[:40]!r}… ({LONG} characters)" for text in texts if seconds(pattern, text, searched) > MOST_S)


def test_the_inputs_find_a_cubic_and_a_quadratic_expression() -> None:
    assert any(slow(re.compile(r"(?:\d+\.?\d*|\.\d+)x")))
    assert any(slow(re.compile(r"a*\s*\s*b")))
    assert not any(slow(re.compile(r"^\d+(?:\.\d*)?x")))


def test_every_expression_of_a_reader_takes_linear_time() -> None:
    found = {where: list(slow(pattern, searched)) for where, pattern, searched in expressions()}
    assert len(found) > 80, "the expressions are found"
    assert not (wrong := {where: texts for where, texts in found.items() if texts}), wrong
