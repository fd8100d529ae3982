"""Checked claims, as text for a terminal."""

from __future__ import annotations

from rich.console import Console

from assay.harness.ingest.claim import CheckedClaims
from assay.harness.text import one_line
from assay.reports.terminal import say

SIGNS = {"confirmed": "✓", "refuted": "✕", "undecided": "?"}


def render(checked: CheckedClaims, console: Console) -> None:
    """Print each claim with its outcome, and the lines that say so."""
    for one in checked.claims:
        say(console, f"{SIGNS[one.outcome]} {one.outcome}: {one_line(one.claim)}: {one_line(one.why, 400)}")
        for line in one.cites:
            say(console, f"    {one_line(line, 300)}")
