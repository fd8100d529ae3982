"""Recorded calls on the terminal: the contents of a pack, and the result of a replay."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from assay.harness.conditions import has_cached_prefix
from assay.harness.evidence.cause import ReplayResult
from assay.harness.evidence.pack import PackManifest, replay_command
from assay.harness.text import one_line, two_digits
from assay.harness.verdict import cause_of
from assay.reports.check import MAX_TEST, TEST_OF_NUMBERS
from assay.reports.terminal import copy, finding_text, say, verdict_line


def render_replay(replay: ReplayResult, console: Console) -> None:
    """Print the result of a replay, and why there is no verdict if there is none."""
    cause = cause_of(replay.findings)
    does = f"{replay.candidate} {cause.does}" if cause and cause.does else ""
    if does:
        say(console, f"{one_line(does, 300)}.")
    worst = f"Worst own error: {two_digits(replay.worst)} times its bound"
    say(
        console,
        f"Replayed {replay.calls} of {replay.recorded} recorded calls, {replay.with_prefix} with a cached prefix, in "
        f"{replay.seconds:.1f} s. {worst if math.isfinite(replay.worst) else 'An output is not finite'}."
        if replay.calls
        else f"None of {replay.recorded} recorded calls was computed.",
    )
    for phase, text in replay.envelope.items():
        say(console, f"The pack's {phase} calls: {text or 'none'}.")
    for finding in replay.findings:
        say(console, finding_text(finding, console.width))
        say(console, f"  $ {finding.reproduce}")
    for sentence in replay.not_tested:
        say(console, f"{sentence[0].upper()}{sentence[1:]}.")
    if replay.smallest:
        say(console, f"Smallest failing call: {replay.smallest}")
    if replay.test:
        if len(replay.test) <= MAX_TEST:
            say(console, "A test that reproduces it:\n")
            copy(console, replay.test)
        else:
            say(console, TEST_OF_NUMBERS)
        say(console, verdict_line(replay.verdict, f"{does or replay.candidate + ' is wrong on recorded calls'}."))
    if not replay.findings:
        say(console, "No findings: every own error is within its bound.")
    if replay.verdict == "inconclusive":
        say(console, f"No verdict: {'; '.join(replay.missing)}.")


def render_pack(manifest: PackManifest, pack: Path, console: Console) -> None:
    """Print the contents of a pack by phase and cached prefix, and the command that replays it."""
    table = Table("phase", "cached prefix", "calls", "layers", "MiB")
    strata = Counter((call.spec.phase, "yes" if has_cached_prefix(call.prefix) else "no") for call in manifest.calls)
    for (phase, cached), calls in sorted(strata.items(), reverse=True):
        here = [
            c
            for c in manifest.calls
            if (c.spec.phase, "yes" if has_cached_prefix(c.prefix) else "no") == (phase, cached)
        ]
        layers, size = len({c.spec.layer for c in here}), sum(c.bytes for c in here) / 2**20
        table.add_row(phase, cached, str(calls), str(layers), f"{size:.1f}")
    console.print(table)
    too_large = f"; {manifest.too_large} were too large" if manifest.too_large else ""
    for line in (
        f"Recorded {len(manifest.calls)} of {manifest.seen:,} calls{too_large}: {pack}",
        f"Replay: {replay_command(pack)}",
    ):
        say(console, line)
