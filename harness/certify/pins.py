"""Tests of findings: do they name a fault, and state where it sits, no more and no less than where it shows?"""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.attention.call import AttentionCall
from assay.harness.bugs.seeded import SeededFault
from assay.harness.certify.footprint import Footprint
from assay.harness.localize.call_conditions import condition_of, sequence_shapes
from assay.harness.localize.diagnose import NONDETERMINISM, STATE_KEPT
from assay.harness.text import some
from assay.harness.verdict import Finding

_CHANGING = (NONDETERMINISM, STATE_KEPT)


def is_named(fault: SeededFault, findings: Sequence[Finding]) -> bool | None:
    """Return True if a finding names a fault, or one that these calls cannot tell from it; None if the fault has no name.

    A fault that comes and goes is named as such: its calls, repeated, differ.
    """
    ids = {id for finding in findings for id in (finding.id, *finding.equivalent)}
    if fault.where.counts:
        return bool(ids & {*_CHANGING, fault.hypothesis})
    return fault.hypothesis in ids if fault.hypothesis else None


def is_pinned(
    fault: SeededFault, shown: Footprint, calls: Sequence[AttentionCall], findings: Sequence[Finding]
) -> bool:
    """Return True if every bug found lies in the layers, heads and phases in which the fault shows.

    If the fault is restricted to some sequences, the finding must state a condition that covers those that it changes and none that
    it is not restricted to. What is found where a fault shows nowhere is another's: it is not pinned.

    Args:
        fault: the fault.
        shown: where it shows on the calls.
        calls: the calls.
        findings: what was found on them.
    """
    if not shown.calls:
        return False
    bugs = [finding for finding in findings if finding.id not in _CHANGING]
    layers = some("layer", shown.layers, range(max(call.layer for call in calls) + 1))
    heads = some("head", shown.heads, range(shown.of_heads))
    phases = " and ".join(shown.phases)
    if fault.where.counts:  # which calls it hits is chance: it is pinned by what it is restricted to
        needed = [layers] * (fault.where.layers is not None) + [heads] * (fault.where.heads is not None)
        return all(words in bug.where for bug in bugs for words in needed)
    return bool(bugs) and all(
        bug.where.startswith(phases) and layers in bug.where and heads in bug.where and _condition_holds(fault, shown, calls, bug)
        for bug in bugs
    )  # fmt: skip


def _condition_holds(fault: SeededFault, shown: Footprint, calls: Sequence[AttentionCall], finding: Finding) -> bool:
    if not fault.where.chooses_sequences:
        return True
    condition = condition_of(finding.where)
    if condition is None:
        return False
    for number, call in enumerate(calls):
        if call.phase not in shown.phases:
            continue
        allowed = set(fault.where.sequences(call)) if fault.where.chooses(call) else set()
        for b, shape in enumerate(sequence_shapes(call)):
            if (number, b) in shown.sequences and not condition.holds(shape):
                return False
            if b not in allowed and condition.holds(shape):
                return False
    return True
