"""A folder of runs: on the terminal, and the words and strips that its page shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from assay.harness.judge.history import RunLine, RunList, Worst
from assay.harness.judge.report import NOT_FINITE
from assay.harness.sides import differing
from assay.harness.text import one_line, two_digits
from assay.reports.summary import NOTHING, VERDICTS, when
from assay.reports.terminal import STYLES, say

STRIP = 40
"""Runs that a history strip shows: the last of them."""
_LEVELS = "▁▂▃▄▅▆▇█"
_LEVEL_OF = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
"""Multiples of the bound at which the next level begins: the first two are within bounds."""


def render_runs(listed: RunList, console: Console) -> None:
    """Print each treatment with its runs, newest first, and its history by suite, oldest first; then what has no report."""
    if not listed.runs:
        say(console, f"No run in {listed.folder}.")
        return
    for history in listed.histories:
        say(console, Text(treatment(history[0]), style="bold"))
        for one in reversed(history):
            _run(one, console)
        if len(history) > 1:
            for name, marks in strips(history):
                say(console, Text(f"  {name:<12} ") + marks)
            say(
                console,
                Text(f"  {'':<12} oldest to newest; own error: ▁▂ within its bound, █ 100x or more", style="dim"),
            )
        say(console, "")
    for one in listed.runs:
        if one.verdict is None:
            say(console, one_line(f"{one.folder}: {one.problem}", 300))


def treatment(one: RunLine) -> str:
    """What was compared: "sage_attn against torch_native, tiny on cpu"."""
    others = {name: values for name, values in one.treatment.items() if name != "backend"}
    settings = f" ({differing(others)})" if others else ""
    return one_line(f"{one.candidate} against {one.reference}{settings}, {one.model} on {one.device}", 120)


def worst_text(worst: Worst | None) -> str:
    """The worst own error as a multiple of its bound: "138x"; "not finite"; a dash where none was observed."""
    if worst is None:
        return NOTHING
    if worst.error == NOT_FINITE:
        return NOT_FINITE
    return NOTHING if worst.multiple is None else f"{two_digits(worst.multiple)}x"


def suites_of(history: Sequence[RunLine]) -> list[str]:
    """Ids of the suites of some runs, in the order of the newest."""
    return list(dict.fromkeys(name for one in reversed(history) for name in one.suites))


def strips(history: Sequence[RunLine]) -> list[tuple[str, Text]]:
    """A strip for the verdicts, one for each suite, and one for the worst own error: a character for each run, oldest first.

    A run without that suite is a dot.
    """
    last = history[-STRIP:]
    rows = [("verdict", Text().join(_sign(one.verdict) for one in last))]
    rows += [(name, Text().join(_sign(one.suites.get(name)) for one in last)) for name in suites_of(last)]
    if any(one.worst for one in last):
        rows.append(("own error", Text("".join(level(one.worst) for one in last))))
    return rows


def level(worst: Worst | None) -> str:
    """How far an own error is from its bound, as a bar of eight heights; a dot where none was observed."""
    if worst is None:
        return "·"
    multiple = math.inf if worst.error == NOT_FINITE else worst.multiple
    return "·" if multiple is None else _LEVELS[sum(multiple >= least for least in _LEVEL_OF)]


def _sign(verdict: str | None) -> Text:
    return Text("·") if verdict is None else Text(VERDICTS[verdict].sign, style=STYLES[verdict])  # type: ignore[index]


def _run(one: RunLine, console: Console) -> None:
    assert one.verdict is not None
    words = f"{when(one.created)}  "
    verdict = Text(f"{VERDICTS[one.verdict].sign} {one.verdict:<12} ", style=STYLES[one.verdict])
    rest = f"own error {worst_text(one.worst):<10} {one_line(one.folder, 200)}"
    say(console, Text("  " + words) + verdict + Text(rest))
    if one.cause:
        say(console, Text(f"{'':24}{one_line(one.cause, 58)}", style="dim"))
