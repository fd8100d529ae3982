"""A layer bisection on the terminal: every probe, the layers that must run the reference, and the finding."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.harness.bisect.layer_task import LayerBisection
from assay.harness.text import one_line, ranges
from assay.reports.terminal import finding_text, say


def render_layers(result: LayerBisection, console: Console) -> None:
    """Print the probes as a table, then the outcome, and the finding with the command that reproduces it."""
    right = "answers right" if result.by == "answers" else "texts identical to the reference's"
    sets = len({probe.candidate for probe in result.probes})
    title = (
        f"Layer bisection by {result.by}: {len(result.probes)} probes of {sets} sets over {len(result.layers)} layers"
    )
    table = Table(title=title)
    headers = (
        f"{one_line(result.candidate)} in layers",
        f"{right} of {result.prompts}",
        "lost",
        "gained",
        "p (no loss)",
    )
    for header in ("probe", *headers, "outcome"):
        table.add_column(Text(header))  # not markup
    for number, probe in enumerate(result.probes, 1):
        style = "red" if probe.outcome == "wrong" else "green"
        table.add_row(
            str(number),
            ranges(probe.candidate),
            str(probe.right),
            str(probe.lost),
            str(probe.gained),
            f"{probe.p:.2g}",
            f"[{style}]{probe.outcome}[/]",
        )
    lines = [
        f"Compared by {result.by} ({result.by_why}); the reference alone: {result.reference_right} of {result.prompts}."
    ]
    if result.probes:
        console.print(table)
        repeats = (
            f"each set is probed until alpha = {result.alpha:g} is met" if result.noise else "each set is probed once"
        )
        lines.append(
            f"When asked twice, the reference changed {result.floor} texts and the candidate {result.candidate_floor}; "
            f"{result.unstable} of them changed between right and wrong: {repeats}."
        )
    lines.append(f"The candidate computes {' and '.join(result.phases)}.")
    heading = {"found": "Layers found", "nothing": "No layer needs the reference", "inconclusive": "No verdict"}
    lines.append(f"{heading[result.outcome]}: {result.why}")
    for line in lines:
        say(console, one_line(line, 600))
    for finding in result.findings:
        say(console, finding_text(finding, console.width))
    say(console, f"  $ {result.reproduce}")
