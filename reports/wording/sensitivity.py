"""Sentences about a fault seeded in the running servers: whether each suite detected it."""

from __future__ import annotations

from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.statement import Statement
from assay.harness.text import counted
from assay.reports.wording.say import Found, Templates, say, says

_START_BOTH = "let assay start both servers, by the names of their backends"
_ATTENTIVE = (
    "use a workload that depends on attention: real weights (without --load-format=dummy), questions that share a header, and the "
    "prefix cache on"
)


@says
def _fault_changed_nothing(fault: str, changed: int, calls: int, why: str) -> Found:
    if changed:  # a damaged record
        return Found(f"{fault} is recorded to have changed {changed:,} of {counted(calls, 'call')}", RUN_AGAIN)
    because = f": {why}" if why else ", since none had a cached prefix"
    return Found(f"{fault} changed none of {counted(calls, 'call')}{because}", _ATTENTIVE)


@says
def _faults_seen(fault: str, parts: list[tuple[str, bool, Statement]], unmeasured: list[str], url: bool) -> Found:
    """Say what each suite saw, and which suites did not measure it."""
    seen = (f"{'seen' if seen else 'not seen'} by {suite} ({say(numbers)})" for suite, seen, numbers in parts)
    said = f"{fault}: {'; '.join(seen)}"
    if unmeasured:
        return Found(f"{said}; not measured by {' and '.join(unmeasured)}", _START_BOTH if url else RUN_AGAIN)
    return Found(said, _ATTENTIVE)


SENTENCES: Templates = {
    "no-suite-for-faults": Found(
        "no suite that could detect a fault was requested",
        "add accuracy, logits or layers to --suites",
    ),
    "fault-not-seedable": Found("a fault cannot be seeded in a server that assay did not start", _START_BOTH),
    "no-fault-seeded": Found("no fault was seeded", "repeat the command, which resumes"),
    "fault-in-answers": "{lost} lost and {gained} gained of {questions:counted question}, p = {p:.2g}",
    "fault-in-logits": "{above} of {prompts:counted prompt} above {limit:.3g} nats, {mean:.3g} on average",
    "fault-in-probes": "mean KL {mean:.2g} nats after a cached prefix, and up to {bound:.2g} is noise",
    "fault-in-layers": "{flagged:counted test} out of bounds in {cells:counted cell}, at worst {worst:.3g} times",
    "fault-without-divergences": "{not_finite:if {not_finite} positions not finite|no prompt was scored after a cached prefix}",
}
