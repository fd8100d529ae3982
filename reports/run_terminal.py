"""The report of a run on the terminal: short, and in plain lines where the output is not a terminal."""

from __future__ import annotations

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from assay.harness.judge.report import LayersResult, Report, ServerSummary
from assay.harness.text import one_line, visible
from assay.reports.document import CHECK_SIGNS
from assay.reports.summary import (
    NOTHING,
    VERDICTS,
    SuiteLine,
    envelope_lines,
    error_percent,
    failure_lines,
    latency_lines,
    layer_diff_lines,
    layer_rows,
    suite_line,
    unmet,
)
from assay.reports.terminal import STYLES, explained_by, observed, picture_lines, say

_PLAIN = str.maketrans({"≥": ">=", "≤": "<=", "→": "->", "–": "-", "−": "-", "✓": "+", "✕": "x", "…": "...", "±": "+-"})
_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("Suite", "left"), ("Verdict", "left"), ("Reference", "right"), ("Candidate", "right"), ("Differences", "left"),
    ("Measured (interval)", "left"), ("Bound", "left"),
)  # fmt: skip
MAX_EVIDENCE = 4
MAX_LAYERS = 12
MAX_LOG_LINES = 12
"""Of the log of a server that failed; a screen has 24 lines."""


def render(report: Report, console: Console) -> None:
    """Print verdict, reasons, suites, counted calls, unmet checks, findings, layer diff and latency to `console`.

    On a terminal that is wide enough, the suites are a table. Elsewhere each fact is one line, never wrapped.
    """
    page = _Page(console)
    mark = VERDICTS[report.verdict]
    page.line()
    style = STYLES[report.verdict]
    badge = Text(f" {mark.sign} {mark.word.upper()} ", style=f"bold white on {style}")
    page.line(badge, f"  exit code {report.exit_code}")
    page.line(Text(one_line(report.headline, 400), style="bold"))
    for reason in report.reasons:
        page.line(f"- {one_line(reason, 400)}", indent=2)
    if block := failure_lines(report, MAX_LOG_LINES):
        page.line()
    for line in block:
        page.row(Text(f"  {one_line(line, 300) if not line.startswith(' ') else line[:300]}", style="dim"))
    if report.suites:
        page.heading("Suites")
        _suites(page, [suite_line(suite) for suite in report.suites])
    servers = (("reference", report.reference), ("candidate", report.candidate))
    if report.failure is None or any(server.calls for _, server in servers):
        page.heading("Attention calls counted")
        for role, server in servers:
            _calls(page, role, server)
    if report.kernels:
        page.heading("Kernels that ran in one traced pass of each kind")
    for one in report.kernels:
        page.line(one_line(one.sentence, 300), indent=2)
    checks = unmet(report)
    if checks:
        page.heading("Checks that are not ok")
    for check in checks:
        status = Text(f"{CHECK_SIGNS[check.status]} {check.status}", style=STYLES[check.status])
        page.line(status, f": {one_line(check.title)}: {one_line(check.found, 400)}", indent=2)
        if check.settles:
            page.line(f"to resolve: {one_line(check.settles, 400)}", indent=6)
    if report.findings:
        page.heading("Findings")
    for finding in report.findings:
        page.line(
            Text(finding.severity, style=STYLES[finding.severity]), f": {one_line(finding.sentence, 600)}", indent=2
        )
        if finding.observed:
            page.line(f"observed: {observed(finding)}", indent=6)
        for row in picture_lines(finding, console.width, indent=6):
            page.row(row)
        for line in finding.evidence[:MAX_EVIDENCE]:
            page.line(f"- {one_line(line, 300)}", indent=6)
        for line in explained_by(finding):
            page.line(line, indent=6)
        if finding.reproduce:
            page.command(finding.reproduce, indent=6)
    if report.layers:
        page.heading("Layer diff")
        for line in layer_diff_lines(report.layers):
            page.line(f"- {one_line(line, 400)}", indent=2)
        _layers(page, report.layers)
    if report.envelope:
        page.heading("Envelope")
    for line in envelope_lines(report):
        page.line(f"- {one_line(line, 800)}", indent=2)
    if report.latency:
        page.heading("Latency")
        for line in latency_lines(report.latency):
            page.line(f"- {one_line(line, 400)}", indent=2)
    page.line()


class _Page:
    """A console that prints text literally: no markup, no emoji codes, only characters that it can encode."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rich = console.is_terminal

    def line(self, *parts: str | Text, indent: int = 0) -> None:
        say(self.console, Text(" " * indent) + self.fit(*parts))

    def row(self, text: Text) -> None:
        """A row of a picture: it is not wrapped, and each of its characters keeps its colour."""
        self.console.print(text if text.plain.isascii() else self.fit(text), soft_wrap=True)

    def heading(self, title: str) -> None:
        self.line()
        self.line(Text(title, style="bold"))

    def command(self, command: str, indent: int) -> None:
        # A command will be copied, so it is not wrapped.
        for row in visible(command).split("\n"):
            self.console.print(self.fit(Text(f"{' ' * indent}$ {row}", style="cyan")), soft_wrap=True)

    def fit(self, *parts: str | Text) -> Text:
        """The parts as one text without control characters, in characters that the stream can encode."""
        encoding = self.console.encoding
        text = Text()
        for part in parts:
            plain, style = (part.plain, part.style) if isinstance(part, Text) else (part, "")
            plain = visible(plain)
            if not encoding.startswith("utf"):
                plain = plain.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
            text.append(plain, style=style)
        return text


def _suites(page: _Page, lines: list[SuiteLine]) -> None:
    table = _table(page, lines)
    least = Measurement.get(page.console, page.console.options.update(width=1_000), table).minimum
    if page.rich and least <= page.console.width:
        page.console.print(table)
        for row in lines:
            if row.policy:
                page.line(f"bound of {row.suite} set by {row.policy}", indent=2)
        return
    for row in lines:
        verdict = Text(row.verdict, style=STYLES[row.verdict])
        accuracy = f"; reference {row.reference}, candidate {row.candidate}" if row.reference != NOTHING else ""
        limits = f"; {row.differences}" if row.differences != NOTHING else ""
        limits += f"; measured {row.measured}; bound {row.bound}"
        limits += f", set by {row.policy}" if row.policy else ""
        page.line(f"{row.suite}: ", verdict, accuracy + limits, indent=2)


def _layers(page: _Page, layers: LayersResult) -> None:
    """Own errors by layer and cached prefix, of the layers with the largest error relative to its bound."""
    rows = [row for row in layer_rows(layers) if row.cells]
    shown = {row.layer for row in sorted(rows, key=lambda row: -row.excess)[:MAX_LAYERS]}
    for row in rows:
        if row.layer not in shown:
            continue
        parts: list[str | Text] = [f"layer {one_line(row.layer):>3}  "]
        for condition, error, beyond in row.cells:
            words = error_percent(error) + (", out of bounds" if beyond else "")
            parts += [f"{one_line(condition)}: ", Text(words, style="red" if beyond else ""), "; "]
        page.line(*parts[:-1], indent=2)
    if len(rows) > len(shown):
        page.line(f"{len(rows) - len(shown)} more layers, none worse, in report.html", indent=2)


def _table(page: _Page, lines: list[SuiteLine]) -> Padding:
    """The suites as a table in which only the name of a suite may wrap."""
    # Text, not str: a str in a table is read as markup.
    rows = [
        [
            page.fit(cell)
            for cell in (
                row.suite, Text(row.verdict, style=STYLES[row.verdict]), row.reference, row.candidate, row.differences,
                row.measured, row.bound,
            )
        ]
        for row in lines
    ]  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, (title, justify) in enumerate(_COLUMNS):
        least = 16 if index == 0 else max(len(title), *(row[index].cell_len for row in rows))
        table.add_column(title, justify=justify, min_width=least, no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _calls(page: _Page, role: str, server: ServerSummary) -> None:
    calls = "; ".join(one_line(call.sentence, 300) for call in server.calls)
    page.line(f"{role} {one_line(server.backend)}: {calls or f'none counted ({one_line(server.engine)})'}", indent=2)
