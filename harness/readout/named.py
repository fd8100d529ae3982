"""Names for what was read: the hypothesis that an operator equals, and the finding that says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.harness.attention.hypotheses import BY_ID, FAMILY, Hypothesis
from assay.harness.localize.diagnose import UNEXPLAINED
from assay.harness.readout.finding import Sample
from assay.harness.readout.known_effects import Known
from assay.harness.readout.operators import Operator
from assay.harness.readout.picture import picture_of
from assay.harness.readout.readout import ReadOut
from assay.harness.text import percent
from assay.harness.verdict import Finding, serious

OPERATOR = "operator"
"""Id of a finding whose operator was read and has no name."""
SAID = 0.5
"""Share of the wrong outputs that an operator must give for its sentence to be said at all."""
_NAMED_ON = 8
"""Wrong calls on which an operator must equal a hypothesis to have its name."""


def name_of(operator: Operator, samples: Sequence[Sample]) -> Hypothesis | None:
    """The hypothesis that gives the same outputs as an operator wherever the kernel was wrong; None if there is none."""
    if len(operator.clauses) == 1 and isinstance(effect := operator.clauses[0].effect, Known):
        return BY_ID.get(effect.id)
    wrong = sorted((s for s in samples if s.bad.any()), key=lambda s: s.plan.size)
    few = wrong[:: max(1, len(wrong) // _NAMED_ON)][:_NAMED_ON]
    if not operator.clauses or not few:
        return None
    for one in FAMILY:
        effect = Known(one.id, one.about, one.compute)
        if all(_gives(effect, sample) for sample in few):
            return one
    return None


def _gives(effect: Known, sample: Sample) -> bool:
    """Whether an effect gives every wrong output of a sample."""
    out = np.nan_to_num(effect.outputs(sample.queries), nan=0.0, posinf=np.inf)
    return bool(sample.agrees(out)[sample.bad].all())


def said(read: ReadOut) -> str:
    """What a read-out says, with the share of the wrong outputs if it does not give them all; empty if it says nothing."""
    if not read.sentence or read.share < SAID:
        return ""
    if read.exact:
        return read.sentence
    gives = f"this gives {percent(read.share)} of the wrong outputs that were seen"
    also = f", and is wrong on {read.all.false} that are right" if read.all.false else ""
    return f"{read.sentence}; {gives}{also}"


def with_operator(findings: Sequence[Finding], read: ReadOut) -> list[Finding]:
    """The findings; the first serious one says what was read, and has its name where it had none.

    Args:
        findings: of a check or a replay.
        read: of the same kernel.
    """
    first = next(iter(serious(findings)), None)
    text = said(read)
    if first is None or not text:
        return list(findings)
    wrong = read.all.wrong
    evidence = (
        f"read off the kernel in {read.calls} calls: gives {read.all.explained:,} of {wrong:,} wrong outputs (queries x heads), "
        f"{read.fresh.explained:,} of {read.fresh.wrong:,} on calls that it was not mined from"
    )
    changed: dict[str, object] = {
        "operator": text, "picture": _picture(read), "evidence": (*first.evidence, evidence, *read.notes)
    }  # fmt: skip
    if first.id == UNEXPLAINED and read.exact:
        known = name_of(read.operator, read.samples)
        changed["id"], changed["title"] = (known.id, known.title) if known else (OPERATOR, "another operator")
        changed["diagnosis"] = text
    return [finding.model_copy(update=changed) if finding is first else finding for finding in findings]


def _picture(read: ReadOut) -> object:
    """The picture of the smallest wrong call that was read and shows more than a few keys; None if none was."""
    seen = [sample for sample in read.samples if sample.reading is not None and sample.bad.any()]
    if not seen:
        return None
    telling = [sample for sample in seen if sample.plan.keys >= 8] or seen
    best = min(telling, key=lambda sample: sample.plan.keys)
    assert best.reading is not None
    return picture_of(best.reading)
