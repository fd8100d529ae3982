"""A run in a terminal, and what every renderer for one shares: lines that are too long for it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from types import ModuleType

import pytest
from rich.console import Console
from rich.text import Text

from assay.harness.judge.report import Report
from assay.reports.document import Document
from assay.reports.run_report import run_document
from assay.reports.terminal import _copy, render, say


def _printed(report: Report, terminal: bool, width: int = 80, encoding: str = "utf-8", everything: bool = True) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    render(run_document(report), Console(file=stream, force_terminal=terminal, width=width, legacy_windows=False), everything)
    stream.flush()
    return raw.getvalue().decode(encoding)


def _uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("name", ["pass", "regression", "inconclusive", "error", "failed-server", "latency", "layers"])
def test_a_report_is_what_it_was(
    golden: Callable[[str, Document], None], examples: ModuleType, layer_diffs: ModuleType, name: str
) -> None:
    """Verdict, reasons, suites, calls, findings, checks that are not met, latency and the layer diff, in three media."""
    update = {"latency": {"latency": examples.latency()}, "layers": {"layers": layer_diffs.seed_case()}}
    more = {"failed-server": examples.failed_server, "latency": examples.passing, "layers": examples.regression}
    golden(f"run-{name}", run_document((examples.BY_VERDICT | more)[name]().model_copy(update=update.get(name))))


@pytest.mark.parametrize(
    ("name", "most"), [("passing", 5), ("regression", 12), ("inconclusive", 12), ("error", 12), ("failed_server", 12)]
)
def test_the_first_screen_is_short_and_begins_with_the_answer(examples: ModuleType, name: str, most: int) -> None:
    report = getattr(examples, name)()
    document = run_document(report, "runs/a/report.html")
    lines = _printed(report, terminal=True, width=120, everything=False).splitlines()
    assert _uncoloured(lines[0]).endswith(document.answer)
    assert len(lines) + 1 <= most, "the last names the page"
    pipe = _printed(report, terminal=False, everything=False).splitlines()
    assert pipe[0] == document.answer


@pytest.mark.parametrize("width", [60, 110, 160])
def test_a_terminal_line_is_never_wider_than_the_terminal_but_a_command(examples: ModuleType, width: int) -> None:
    lines = _uncoloured(_printed(examples.regression(), terminal=True, width=width)).splitlines()
    assert [line for line in lines if len(line) > width and "assay" not in line and "nox" not in line] == []


@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_text_cannot_steer_the_terminal(examples: ModuleType, terminal: bool) -> None:
    text = _uncoloured(_printed(examples.hostile(), terminal, width=120))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b\ud800-\udfff]", text)
    joined = "".join(text.split())
    assert "[boldred]markup[/boldred][/]:smile:" in joined
    assert len(text) < 60_000


def test_a_stream_that_cannot_encode_signs_gets_plain_ones(examples: ModuleType) -> None:
    text = _printed(examples.regression(), terminal=False, encoding="ascii")
    assert "Bound <= 5" in text
    _printed(examples.hostile(), terminal=True, encoding="ascii")


def test_of_many_layers_the_worst_are_shown(examples: ModuleType, layer_diffs: ModuleType) -> None:
    report = examples.regression().model_copy(update={"layers": layer_diffs.one_head()})
    lines = [line.strip() for line in _printed(report, terminal=False).splitlines()]
    rows = [line for line in lines if re.match(r"\d+: extend", line)]
    assert len(rows) == 12
    assert [row.split(":")[0] for row in rows if "out of bounds" in row] == [row.split(":")[0] for row in rows[:2]]
    assert "… and 20 more rows: see --json or --html" in lines


LONG = "  - " + "worst error 3613 %, 14 million times its bound of 0.00026 %; " * 3 + "the end"
COMMAND = "  $ assay replay " + "a-folder-with-a-long-name/" * 4 + " --candidate mine:forward"


def said(text: str | Text, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system="truecolor" if terminal else None)
    say(console, text)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_whole_words_below_their_beginning() -> None:
    lines = said(LONG, terminal=True).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    assert all(line.startswith("    ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(LONG.split()), "no word or number is broken"


@pytest.mark.parametrize("width", [40, 57, 80])
def test_a_number_stays_with_its_per_cent_and_its_name(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    say(console, LONG + " p = 0.01")
    assert isinstance(console.file, io.StringIO)
    assert not [line for line in console.file.getvalue().splitlines() if line.lstrip().startswith(("%", "=", "0.01"))]


def test_a_pipe_gets_one_line() -> None:
    assert said(LONG, terminal=False) == LONG + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_command_and_code_are_never_broken(terminal: bool) -> None:
    assert said(COMMAND, terminal=terminal) == COMMAND + "\n"
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    _copy(console, LONG)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == LONG + "\n"
