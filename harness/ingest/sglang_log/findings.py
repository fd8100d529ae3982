"""Findings from a log alone. Each cites the lines that it follows from, and states no more than they do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.harness.attention.published import published
from assay.harness.ingest.result import CitedFinding
from assay.harness.ingest.sglang_log import score_findings, serving_findings
from assay.harness.ingest.sglang_log.facts import Log

_SAFE = re.compile(r"\w[\w./:@+-]*")
_RULES = (
    score_findings.below_guessing,
    score_findings.below_bound,
    score_findings.unparsed,
    serving_findings.runaways,
    serving_findings.prefix_untested,
    serving_findings.decode_not_shown,
    serving_findings.refused,
    serving_findings.not_finite,
    serving_findings.hidden_by_retry,
    serving_findings.failed_otherwise,
    serving_findings.notices,
)


def findings(log: Log) -> list[CitedFinding]:
    """List all findings, the serious ones first."""
    order = ("serious", "warning", "info")
    return sorted((found for rule in _RULES for found in rule(log)), key=lambda found: order.index(found.severity))


def next_steps(log: Log, found: Iterable[CitedFinding]) -> tuple[str, ...]:
    """List the commands that would prove what the log only suggests; none if it suggests nothing.

    Names come from the log, so they are used only if a shell takes them as they are. Where assay publishes a kernel that calls a
    package as the backend does (``sage_attn_as_shipped``), that kernel stands for the backend; its ``sage_attn`` is corrected.
    """
    candidate, reference, server = serving_findings.roles(log)
    if server is None or not _SAFE.fullmatch(candidate) or all(one.severity == "info" for one in found):
        return ()
    stand_in = f"{candidate}_as_shipped"
    flags = [f"--candidate {stand_in if stand_in in published() else candidate}"]
    named = {
        "reference": reference,
        "device": _value(server.arguments, "device"),
        "model": _value(server.arguments, "model_path"),
    }
    flags += [f"--{flag} {value}" for flag, value in named.items() if _SAFE.fullmatch(value)]
    kernel = f"assay check {stand_in}" if stand_in in published() else f"assay check sglang:{candidate}"
    return (kernel, f"assay diff {' '.join(flags)}", f"assay run {' '.join(flags)}")


def _value(arguments: dict[str, str], name: str) -> str:
    return arguments.get(name, "").strip("'\"")
