"""A bisection on the terminal: a live table, plain lines without a terminal, and the result as text."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from assay.harness.bisect.commits.search import believe
from assay.harness.bisect.commits.session import SEARCH_PURPOSES, count_outcomes, history_of
from assay.harness.bisect.commits.state import PURPOSES, BisectResult, BisectState, Measurement, ProbeOutcome
from assay.harness.text import some
from assay.reports.terminal import finding_lines, say

_MAX_ROWS = 12
_COLOURS = {"good": "green", "bad": "red", "skip": "yellow"}


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
            self._live.update(Group(table(state, _MAX_ROWS), Text(progress(state)), Text(doing, style="dim")))
        elif len(state.probes) > self._printed:
            self._print_last(state)
        self._printed = len(state.probes)

    def _print_last(self, state: BisectState) -> None:
        probe = state.probes[-1]
        text = " ".join(
            filter(None, [PURPOSES[probe.purpose], probe.commit[:12], probe.outcome, error_of(probe), probe.reason])
        )
        begun = f"[{time.monotonic() - self._begun:5.1f} s]"
        say(self._console, f"{begun} {probe.number}: {text} ({probe.seconds:.1f} s)")


def table(state: BisectState, most: int) -> Table:
    """The last probes of a bisection."""
    subjects = {one.commit: one.subject for one in state.history}
    made = Table("probe", "for", "commit", "subject", "outcome", "worst own error / limit", "seconds", expand=True)
    for probe in state.probes[-most:]:
        made.add_row(
            str(probe.number), PURPOSES[probe.purpose], probe.commit[:12], Text(subjects.get(probe.commit, "")[:60]),
            Text(probe.outcome, style=_COLOURS[probe.outcome]), Text(error_of(probe) or probe.reason[:60]),
            f"{probe.seconds:.1f}",
        )  # fmt: skip
    return made


def progress(state: BisectState) -> str:
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


def render(state: BisectState, console: Console) -> None:
    """Print the result of a bisection, or its progress."""
    if state.result is None:
        console.print(table(state, _MAX_ROWS))
        say(console, progress(state))
        return
    for line in to_lines(state, state.result):
        say(console, line)


def to_lines(state: BisectState, result: BisectResult) -> list[str]:
    """The result as text, line by line."""
    lines = [headline(state, result)]
    if result.commit is not None:
        note = result.commit
        lines += [
            "",
            f"commit {note.commit}",
            f"Author: {note.author}",
            f"Date:   {note.date}",
            "",
            f"    {note.subject}",
        ]
        lines += [f"    {line}" for line in note.body.splitlines()]
        lines += ["", note.diffstat, "", f"Checked: {result.checked}."]
    else:
        subjects = {one.commit: one.subject for one in state.history}
        lines += [f"  {commit[:12]} {subjects[commit]}" for commit in result.suspects]
    lines += newly(result)
    for finding in result.findings:
        lines += [*finding_lines(finding), f"  $ {finding.reproduce}"]
    lines += [f"Note: {note}." for note in result.notes]
    lines.append(effort(state, result))
    return lines


def headline(state: BisectState, result: BisectResult) -> str:
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


def newly(result: BisectResult) -> list[str]:
    """What fails at the commit but not before it; axes on which all values do share a line."""
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


def effort(state: BisectState, result: BisectResult) -> str:
    """The cost of the result, and what its probability rests on."""
    counts = {
        kind: sum(p.purpose == kind for p in state.probes) for kind in dict.fromkeys(p.purpose for p in state.probes)
    }
    skips = sum(p.outcome == "skip" for p in state.probes)
    seconds = sorted(p.seconds for p in state.probes)
    kinds = ", ".join(f"{count} {PURPOSES[kind]}" for kind, count in counts.items())
    return (
        f"{len(state.probes)} probes ({kinds}; {skips} of them skipped), {seconds[len(seconds) // 2]:.2f} s each (median). "
        f"Repeated probes of a commit: {result.repeated}, {result.outvoted} of them outvoted; estimated misclassification: "
        f"{100 * result.misclassification[0]:.1f} % of good commits, {100 * result.misclassification[1]:.1f} % of bad ones."
    )


def probe_line(outcome: ProbeOutcome, measured: Measurement) -> str:
    """The outcome of a single probe, in one line."""
    found = outcome.reason
    if outcome.worst is not None:
        worst = error_of(outcome) + (" times its bound" if math.isfinite(outcome.worst) else "")
        found = f"worst own error {worst}, {outcome.where}"
    return f"{outcome.outcome}: {found} ({measured.origin or 'not imported'})"


def error_of(probe: ProbeOutcome) -> str:
    """A probe's worst error as a multiple of its limit; empty if it has none."""
    if probe.worst is None:
        return ""
    return "not finite" if not math.isfinite(probe.worst) else f"{probe.worst:.3g}"
