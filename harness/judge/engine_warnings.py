"""The engines' own warnings about accuracy, in the servers' logs: findings of a run, however the comparison ends.

Both sides may have the same defect, such as an FP8 KV cache without scales, and then no comparison of the two shows it.
"""

from __future__ import annotations

from assay.harness.evidence.accuracy_lines import warned
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.sides import ROLES
from assay.harness.statement import state
from assay.harness.verdict import Finding

# Characters of a log that are read, from its beginning: engines warn while they start.
_READ = 1 << 20
_MOST = 5


def claim(run: RunEvidence) -> Judged:
    """List what each started server warned about, once for both where both warn of the same."""
    said: dict[tuple[str, ...], list[str]] = {}
    for role in ROLES:
        log = run.folder.log(role)
        if role in run.measured and role not in run.urls and log.exists():
            with log.open(errors="replace") as stream:
                lines = tuple(warned(stream.read(_READ)))
            if lines:
                said.setdefault(lines, []).append(role)
    return Judged(findings=[_finding(run, lines, roles) for lines, roles in said.items()])


def _finding(run: RunEvidence, lines: tuple[str, ...], roles: list[str]) -> Finding:
    return Finding(
        id="accuracy-warned",
        title="engine warns about its accuracy",
        severity="warning",
        where=f"the log of the {' and the '.join(roles)}",
        claim=state("accuracy-warned", line=lines[0], more=len(lines) - 1),
        evidence=lines[1:_MOST],
        reproduce=run.manifest.command,
    )
