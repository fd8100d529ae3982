"""The document of a commit bisection, and its progress: a live table, or plain lines without a terminal."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from assay.harness.bisect.commits.bisect_session import SEARCH_PURPOSES, count_outcomes, history_of
from assay.harness.bisect.commits.search import believe
from assay.harness.bisect.commits.state import BisectResult, BisectState, CommitProbe, Measurement, ProbeOutcome
from assay.harness.text import clip, one_line, some
from assay.harness.verdict import Verdict
from assay.reports import charts
from assay.reports.document import (
    Block,
    Cell,
    Code,
    Document,
    Drawing,
    Facts,
    Findings,
    Items,
    Line,
    Only,
    Section,
    Table,
)
from assay.reports.page import TEXT_SHOWN
from assay.reports.svg import (
    AXIS_HEIGHT,
    FORBIDDEN,
    LEGEND_HEIGHT,
    PALETTE,
    TITLE_HEIGHT,
    LegendKey,
    LinearScale,
    Shape,
    axis_below,
    image,
    legend,
    line,
    log_axis_beside,
    mark,
    text,
    ticks,
)
from assay.reports.terminal import in_columns, say

_MAX_ROWS = 12
_COLUMNS = ("probe", "for", "commit", "outcome", "error / limit", "where, or why skipped", "seconds")
_STATUS = {"good": "pass", "bad": "regression", "skip": "warning"}
_WORDS = {"found": "Found", "ambiguous": "Ambiguous", "flaky": "Too flaky"}
_VERDICTS: dict[str, Verdict] = {"found": "pass", "ambiguous": "inconclusive", "flaky": "inconclusive"}
_SUSPECTS = 100
_COLOURS = {"good": "chart-right", "bad": "chart-forbidden", "skip": "chart-muted"}
SHAPES: dict[str, Shape] = {"good": "circle", "bad": "diamond", "skip": "cross"}


class ProgressView(AbstractContextManager["ProgressView"]):
    """Shows the progress of a bisection in a folder: called with the state and the next action, as `session.Show`."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._console, self._folder = console, folder
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None
        self._printed = -1  # probes shown so far; -1 before the opening line
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, state: BisectState, doing: str) -> None:
        """Show a state; `doing` describes the next action, empty for none."""
        if self._printed < 0:
            self._printed = len(state.probes)
            begun = f"{len(state.history)} commits in {self._folder}; {len(state.probes)} probes are already done."
            say(self._console, f"Bisecting {begun}")
        if self._live:
            self._live.update(
                Group(
                    in_columns(self._console, _probes(state, _MAX_ROWS)),
                    Text(_progress(state)),
                    Text(doing, style="dim"),
                )
            )
        elif len(state.probes) > self._printed:
            self._print_last(state)
        self._printed = len(state.probes)

    def _print_last(self, state: BisectState) -> None:
        probe = state.probes[-1]
        text = " ".join(
            filter(
                None, [probe.purpose.replace("-", " "), probe.commit[:12], probe.outcome, _error(probe), probe.reason]
            )
        )
        begun = f"[{time.monotonic() - self._begun:5.1f} s]"
        say(self._console, f"{begun} {probe.number}: {text} ({probe.seconds:.1f} s)")


def bisection_document(state: BisectState) -> Document:
    """The commit, what changed in it, the error by commit and every probe; of a bisection that has not ended, its progress."""
    result = state.result
    if result is None:
        body: list[Block] = [_probes(state, _MAX_ROWS), Line(_progress(state))]
        return Document(
            command="bisect commits", title=state.spec.kernel, verdict=None, headline=_progress(state), body=body, result=state
        )  # fmt: skip
    profile: list[Block] = [Drawing(_error_chart(state, result))]
    probes = [Only("page", [_probes(state), Code(state.command, "Repeat this bisection, in a new folder")])]
    return Document(
        command="bisect commits",
        title=one_line(state.spec.kernel, 60),
        verdict=_VERDICTS[result.outcome],
        word=_WORDS[result.outcome],
        headline=_headline(state, result),
        meaning=result.commit.subject if result.commit else "",
        crumbs=[state.spec.repo],
        body=[
            _asked(state),
            _named(state, result),
            _changed(result),
            Section("profile", "Error by commit", [*profile, *(Line(f"Note: {note}.") for note in result.notes)]),
            Section("probes", "Probes", [Line(_effort(state, result), "quiet"), *probes]),
        ],
        foot=f"{state.schema_id}. Next to this file: report.json, the complete state, and probes/, the measurement of each.",
        result=state,
    )


def _asked(state: BisectState) -> Facts:
    spec = state.spec
    bound = "the bound of each call" if spec.against == "bound" else "the good revision's"
    by = "an assay run" if spec.measure_with == "accuracy" else f"layer error, compared with {bound}"
    named = [("kernel", spec.kernel), ("good", spec.good[:12]), ("bad", spec.bad[:12])]
    return Facts([*((name, Cell(value, code=True)) for name, value in named), ("classified by", by)])


def _named(state: BisectState, result: BisectResult) -> Section:
    """The commit; the suspects where none could be named."""
    if (note := result.commit) is None:
        subjects = {commit.commit: commit.subject for commit in state.history}
        suspects = [
            (Cell(commit[:12], code=True), f" {one_line(subjects[commit])}") for commit in result.suspects[:_SUSPECTS]
        ]
        return Section("suspects", "Suspects", [Items(suspects, ordered=True)], announced=True)
    blocks: list[Block] = [
        Line(note.subject, "deciding"),
        Line((Cell(note.commit, code=True), f" by {note.author}, {note.date}"), "quiet"),
        *([Code(clip(note.body, TEXT_SHOWN), "Message")] if note.body else []),
        Code(clip(note.diffstat, TEXT_SHOWN), "Changed"),
        Line(f"Checked: {result.checked}."),
    ]
    return Section("commit", "The commit", blocks, announced=True)


def _changed(result: BisectResult) -> Section:
    lines: list[Block] = [Line(line) for line in _newly(result)] or [Line("Not measured.", "empty")]
    named = [Findings(result.findings, commands=True)] if result.findings else []
    return Section("changed", "What changed in it", [*lines, *named], announced=True)


def _probes(state: BisectState, last: int = 0) -> Table:
    subjects = {commit.commit: commit.subject for commit in state.history}
    rows = [
        (
            str(probe.number),
            probe.purpose.replace("-", " "),
            (Cell(probe.commit[:12], code=True), f" {one_line(subjects.get(probe.commit, ''), 60)}"),
            Cell(probe.outcome, _STATUS[probe.outcome]),
            _error(probe) or "–",
            one_line(probe.where or probe.reason),
            f"{probe.seconds:.1f}",
        )
        for probe in state.probes[-last:]
    ]
    return Table(_COLUMNS, rows, numbers=(0, 4, 6))


def _progress(state: BisectState) -> str:
    """The progress of a bisection, in one line."""
    history = history_of(state)
    counted, good, skipped = count_outcomes(state)
    searched = sum(p.purpose in SEARCH_PURPOSES for p in state.probes)
    text = f"{searched} probes, {len(skipped)} commits skipped; "
    if state.spec.bad not in counted:
        return text + f"checking the ends of a range of {len(history)} commits"
    belief = believe(history, counted, good)
    left = int(belief.consistent.sum())
    best = int(belief.weights.argmax())
    suspects = f"{left} of {len(history)} commits left" if left else "outcomes contradict each other"
    return text + f"{suspects}; likeliest {history.commits[best][:12]} with probability {belief.weights[best]:.3f}"


def _headline(state: BisectState, result: BisectResult) -> str:
    """The result in one sentence."""
    many = len(state.history)
    if result.outcome == "found":
        return (
            f"{result.suspects[0][:12]} is the culprit among {many} commits, with probability {result.confidence:.4f}."
        )
    if result.outcome == "ambiguous":
        return (
            f"The culprit is one of {len(result.suspects)} commits, with probability {result.confidence:.4f}: the commits "
            "between them cannot be probed, so they are indistinguishable."
        )
    return f"No commit could be named: outcomes are too flaky. The likeliest of {many} has probability {result.confidence:.4f}."


def _newly(result: BisectResult) -> list[str]:
    """Return what fails at the commit but not before it; axes on which all values do share a line."""
    lines = []
    complete = []
    for change in result.changes:
        if not change.new:
            continue
        if change.axis in ("layer", "head"):
            chosen, of = [int(v) for v in change.new], [int(v) for v in change.values]
            lines.append(f"Newly out of bounds: {some(change.axis, chosen, of)}.")
        elif change.new == change.values:
            complete.append(change.axis)
        else:
            rest = [v for v in change.values if v not in change.failing]
            right = f"; never at {', '.join(rest)}" if rest else ""
            lines.append(f"Newly out of bounds at {change.axis} {', '.join(change.new)}{right}.")
    return [*lines, *([f"Newly out of bounds at every value of: {', '.join(complete)}."] if complete else [])]


def _effort(state: BisectState, result: BisectResult) -> str:
    """The cost of the result, and what its probability rests on."""
    counts = {
        kind: sum(p.purpose == kind for p in state.probes) for kind in dict.fromkeys(p.purpose for p in state.probes)
    }
    skips = sum(p.outcome == "skip" for p in state.probes)
    seconds = sorted(p.seconds for p in state.probes)
    kinds = ", ".join(f"{count} {kind.replace('-', ' ')}" for kind, count in counts.items())
    return (
        f"{len(state.probes)} probes ({kinds}; {skips} of them skipped), {seconds[len(seconds) // 2]:.2f} s each (median). "
        f"Repeated probes of a commit: {result.repeated}, {result.outvoted} of them outvoted; estimated misclassification: "
        f"{100 * result.misclassification[0]:.1f} % of good commits, {100 * result.misclassification[1]:.1f} % of bad ones."
    )


def probe_line(outcome: ProbeOutcome, measured: Measurement) -> str:
    """The outcome of a single probe, in one line."""
    says = outcome.reason
    if outcome.worst is not None:
        worst = _error(outcome) + (" times its bound" if math.isfinite(outcome.worst) else "")
        says = f"worst own error {worst}, {outcome.where}"
    return f"{outcome.outcome}: {says} ({measured.origin or 'not imported'})"


def _error(probe: ProbeOutcome) -> str:
    """A probe's worst error as a multiple of its limit; empty if it has none."""
    if probe.worst is None:
        return ""
    return "not finite" if not math.isfinite(probe.worst) else f"{probe.worst:.3g}"


def _error_chart(state: BisectState, result: BisectResult) -> str:
    """Worst own error by commit, as a multiple of its limit, on a log scale; a vertical line marks the named commit.

    A probe without a number (skipped, raised, or classified by accuracy) is drawn at the edge: bad at the top, good and skipped at
    the bottom. An error that is not finite is drawn at the top.

    Returns:
        An ``<svg>`` element; an empty string if nothing was probed.
    """
    place = {entry.commit: i for i, entry in enumerate(state.history, start=1)} | {state.spec.good: 0}
    if not state.probes:
        return ""
    known = [p.worst for p in state.probes if p.worst is not None and 0 < p.worst < math.inf]
    low, high = min([0.5, *known]) / 2, max([2.0, *known]) * 2

    def height(probe: CommitProbe) -> float:
        if probe.worst is None or not math.isfinite(probe.worst):
            return high if probe.outcome == "bad" else low
        return max(probe.worst, low)

    x = LinearScale(-0.5, len(state.history) + 0.5, 64, charts.WIDE - 6)
    bottom = LEGEND_HEIGHT + 228
    y = LinearScale(low, high, bottom, LEGEND_HEIGHT + 8, log=True)
    kinds = [kind for kind in _COLOURS if any(p.outcome == kind for p in state.probes)]
    parts = legend([LegendKey(kind, PALETTE[_COLOURS[kind]], SHAPES[kind]) for kind in kinds], x.start)
    parts += log_axis_beside(x, y)
    parts += [line(x.start, y(1.0), x.stop, y(1.0), FORBIDDEN, 1.5, stroke_dasharray="4 3")]
    parts += [text("error / limit", x.stop, y.stop - 14, "end")]
    if result.outcome != "flaky":
        spots = [x(place[commit]) for commit in result.suspects]
        parts += [line(at, y.start, at, y.stop, PALETTE["chart-candidate"], 2, stroke_opacity=0.6) for at in spots]
    parts += [
        mark(SHAPES[p.outcome], x(place[p.commit]), y(height(p)), 4.7, PALETTE[_COLOURS[p.outcome]], p.outcome)
        for p in state.probes
    ]
    at = ticks(0, len(state.history), 16, whole=True)
    parts += axis_below(x, bottom, at, "commit of the range, oldest first")
    counts = ", ".join(f"{len({p.commit for p in state.probes if p.outcome == kind})} {kind}" for kind in kinds)
    says = f"worst own error by commit, {len(state.history)} commits: {counts}"
    return image(charts.WIDE, bottom + AXIS_HEIGHT + TITLE_HEIGHT, says, parts)
