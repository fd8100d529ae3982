"""Names and units of times and rates in benchmarks: a claim of one spelling finds the number of another."""

from __future__ import annotations

import re
from typing import NamedTuple

_SECOND = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}
_RATE = re.compile(
    r"(?P<what>tok|toks|token|tokens|t|req|reqs|request|requests)\s{0,3}(?:/\s{0,3}|per\s{1,3})(?P<time>s|sec|second|min)"
)
UNIT = rf"(?:{_RATE.pattern.replace('?P<what>', '?:').replace('?P<time>', '?:')}|ms|us|µs|seconds?|secs?|min|s)"
"""Pattern of a unit that `unit_of` knows."""
_IN_PARENTHESES = re.compile(r"\((?P<unit>[^()]{1,20})\)\s{0,3}:?\s{0,3}$")
_STATISTICS = ("mean", "average", "avg", "median", "p50", "p90", "p95", "p99", "std", "max", "min", "last", "peak")
_TYPICAL = ("mean", "average", "avg", "median", "p50")
_SPELLINGS = (
    ("time-to-first-token", "ttft"), ("time-per-output-token", "tpot"), ("time to first token", "ttft"),
    ("time to the first token", "ttft"), ("inter-token latency", "itl"),
    ("prompt eval time, rate", "input throughput"), ("eval time, rate", "output throughput"),
    ("inter token latency", "itl"), ("time per output token", "tpot"), ("end-to-end", "e2e"), ("end to end", "e2e"),
    ("output token throughput", "output throughput"), ("total token throughput", "total throughput"),
    ("input token throughput", "input throughput"), ("generation throughput", "output throughput"),
    ("gen throughput", "output throughput"), ("decode throughput", "output throughput"),
    ("prompt throughput", "input throughput"), ("e2el", "e2e latency"),
)  # fmt: skip
_SHORT = {"output throughput": "throughput", "e2e latency": "latency"}


class Unit(NamedTuple):
    """A unit: `kind` is "time" (base: seconds), "tokens" or "requests" (base: per second), and `size` of it in the base."""

    kind: str
    size: float


def unit_of(text: str) -> Unit | None:
    """Parse a unit: "ms", "tok/s", "requests per second"; None if it is none of a time or a rate."""
    text = text.strip().lower()
    if text in _SECOND:
        return Unit("time", _SECOND[text])
    rate = _RATE.fullmatch(text)
    if rate is None:
        return None
    return Unit("requests" if rate["what"].startswith("req") else "tokens", 1 / _SECOND[rate["time"]])


def quantity(name: str) -> tuple[tuple[str, ...], Unit | None]:
    """Interpret a benchmark's name of a figure: "Median TTFT (ms)", "median_ttft_ms", "output_throughput".

    Returns what it may be called, the full name first, and its unit.

    A mean or a median has the name without the statistic too: "TTFT" alone means a typical one. The throughput is that of output
    tokens, the latency that of a whole request.
    """
    words, unit = name.strip(), None
    given = _IN_PARENTHESES.search(words)
    if given:
        words, unit = words[: given.start()], unit_of(given["unit"])
    elif name.endswith(("_ms", "_s")):
        words, _, last = name.rpartition("_")
        unit = unit_of(last)
    words = spelled(words)
    if unit is None and words.endswith("throughput"):
        unit = Unit("requests" if "request" in words else "tokens", 1.0)
    first, _, rest = words.partition(" ")
    names = [name, words]
    if first in _STATISTICS and rest:
        names += [f"{first} {_SHORT[rest]}"] if rest in _SHORT else []
        names += [rest, *filter(None, [_SHORT.get(rest)])] if first in _TYPICAL else []
    elif words in _SHORT:
        names.append(_SHORT[words])
    return tuple(dict.fromkeys(names)), unit


def spelled(words: str) -> str:
    """Spell a name as `quantity` does."""
    words = " ".join(words.lower().replace("_", " ").split())
    for spelling, usual in _SPELLINGS:
        words = words.replace(spelling, usual)
    return words
