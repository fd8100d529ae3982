"""What an examination found, as findings in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.hypotheses import LEAK
from assay.harness.conditions import POSITION
from assay.harness.localize.causes import Cause, causes
from assay.harness.localize.examine import Examination, Observation
from assay.harness.verdict import Finding, Severity

NO_KNOWN_CAUSE = "no known cause fits"
NONDETERMINISM = "nondeterminism"
STATE = "state"
MUTATION = "input written to"
REFUSED = "call refused"


def diagnose(examination: Examination, reproduce: str = "") -> list[Finding]:
    """What is wrong with a kernel: named bugs first (a leak across requests before all else), then how it behaved.

    Args:
        examination: as `assay.harness.localize.examine.examine` gives it.
        reproduce: a command that shows it again.

    Returns:
        Findings; none if every cell is within its bound, the same call gave the same twice and late, no input was written to
        and nothing was refused.
    """
    layers = sorted({o.call.layer for o in examination.observations})
    named = [_named(cause, layers, reproduce) for cause in causes(examination)]
    return named + _behaviour(examination, layers, reproduce)


def _named(cause: Cause, layers: Sequence[int], reproduce: str) -> Finding:
    evidence = [_seen(cause), f"smallest failing call: {describe(cause.failing[0].call)}"]
    if len(cause.conditions) > 1:
        evidence.append(f"on these calls the same condition: {'; '.join(c.words for c in cause.conditions[1:6])}")
    worst = max(o.errors.nonfinite_share for o in cause.failing)
    if worst:
        evidence.append(f"not finite: {percent(worst)} of the worst call's output")
    best = cause.hypotheses[0] if cause.hypotheses else None
    if best is None:
        diagnosis = f"{NO_KNOWN_CAUSE}: off the truth by {percent(cause.disagreement)}"
    else:
        diagnosis = f'agrees with "{best.name}" to {percent(cause.agreement)} and with the truth to {percent(cause.disagreement)}'
        evidence.insert(0, f"{best.name}: {best.title}")
        others = [f'"{h.name}"' for h in cause.hypotheses[1:]]
        if others:
            diagnosis += f", and cannot be told from {' or '.join(others)} on these calls"
    return Finding(
        id=NO_KNOWN_CAUSE if best is None else best.name,
        title=NO_KNOWN_CAUSE if best is None else best.title,
        severity="serious" if best is None else best.severity,
        where=_where(cause, layers),
        diagnosis=diagnosis + _right(cause) + (f" ({LEAK})" if best is not None and best.kind == LEAK else ""),
        evidence=tuple(evidence),
        reproduce=reproduce,
    )


def _where(cause: Cause, layers: Sequence[int]) -> str:
    parts = [" and ".join(cause.phases)]
    if cause.conditions and not cause.conditions[0].words.endswith(" only"):
        parts.append(("only where " if cause.only_there else "") + cause.conditions[0].words)
    heads = range(max(o.call.q.shape[1] for o in cause.failing))
    parts += [some("layer", cause.layers, layers), some("head", cause.heads, heads)]
    if cause.positions and not cause.hypotheses:
        parts.append(f"query positions {', '.join(POSITION.labels[p] for p in cause.positions)}")
    return ", ".join(parts)


def _right(cause: Cause) -> str:
    if not cause.conditions:
        return ""
    return f"; right at {cause.conditions[0].otherwise}" if cause.conditions[0].otherwise else "; right elsewhere"


def _seen(cause: Cause) -> str:
    worst = max(cause.failing, key=lambda o: float(o.own.max()) / o.bound)
    text = (
        f"{len(cause.failing)} of {len(cause.failing) + cause.passing} calls of these layers are out of bounds; worst: own error "
        f"{percent(float(worst.own.max()))} where noise explains {percent(worst.bound)}, {describe(worst.call)}"
    )
    more = ", ..." if len(cause.prefixes) > 12 else ""
    return f"{text}; cached prefixes of what fails: {', '.join(map(str, cause.prefixes[:12]))}{more}"


def _behaviour(examination: Examination, layers: Sequence[int], reproduce: str) -> list[Finding]:
    def finding(
        kind: str, seen: Sequence[Observation], diagnosis: str, error: Callable[[Observation], float] | None
    ) -> Finding:
        first = seen[0] if error is None else max(seen, key=error)
        severity: Severity = "serious"
        if error is not None and not any(error(o) > o.bound for o in seen):
            severity = "info"
        where = f"{some('layer', sorted({o.call.layer for o in seen}), layers)}, {len(seen)} calls"
        return Finding(
            id=kind, title=kind, severity=severity, where=where, diagnosis=diagnosis,
            evidence=(f"for instance {describe(first.call)}",), reproduce=reproduce,
        )  # fmt: skip

    found = []
    observations = examination.observations
    if mutated := [o for o in observations if o.mutated]:
        names = ", ".join(sorted({name for o in mutated for name in o.mutated}))
        found.append(finding(MUTATION, mutated, f"the kernel writes to its input {names}", None))
    if twice := [o for o in observations if o.repeats_differ]:
        worst = percent(max(o.repeat for o in twice))
        text = f"the same call twice in a row gives different outputs, up to {worst} apart"
        found.append(finding(NONDETERMINISM, twice, text, lambda o: o.repeat))
    # A kernel that differs from run to run is only called stateful where late is off by more than noise and twice is not.
    if late := [o for o in observations if o.late_differs and (not o.repeats_differ or o.repeat <= o.bound < o.late)]:
        worst = percent(max(o.late for o in late))
        text = f"the same call gives another output after other calls than before them, up to {worst} apart"
        found.append(finding(STATE, late, text, lambda o: o.late))
    if examination.refused:
        call, why = examination.refused[0]
        found.append(
            Finding(
                id=REFUSED, title=REFUSED, severity="warning", where=f"{len(examination.refused)} calls", diagnosis=why,
                evidence=(f"for instance {describe(call)}",), reproduce=reproduce,
            )
        )  # fmt: skip
    return found


def describe(call: AttentionCall) -> str:
    """A call in words: "layer 2 extend, new+prefix 20+77 3+0, 4 heads on 2, head_dim 64, bfloat16"."""
    lens = " ".join(f"{new}+{prefix}" for new, prefix in zip(call.lens_q, call.prefixes, strict=True))
    return (
        f"layer {call.layer} {call.phase}, new+prefix {lens}, {call.q.shape[1]} heads on {call.k.shape[1]}, "
        f"head_dim {call.q.shape[2]}, {str(call.q.dtype).removeprefix('torch.')}"
    )


def percent(share: float) -> str:
    """A share in percent to two significant digits; "not finite" if it is none."""
    if not math.isfinite(share):
        return "not finite"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def some(what: str, chosen: Collection[int], of: Collection[int]) -> str:
    """Which of several, in words: "all 4 layers", "layer 2 of 4", "heads 0-2, 7 of 8"."""
    if len(chosen) == len(of):
        return f"all {len(of)} {what}s" if len(of) > 1 else f"{what} {next(iter(of))}"
    runs: list[list[int]] = []
    for n in sorted(chosen):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    words = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"{what}{'s' if len(chosen) > 1 else ''} {words} of {len(of)}"
