"""Names for what was read: the hypothesis that an operator equals, and the finding that says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import BY_ID, FAMILY, public_reports
from assay.harness.attention.oracle import oracle
from assay.harness.localize.causes import GAINS, OUTPUT_NOT_WRITTEN
from assay.harness.localize.diagnose import TITLES, does
from assay.harness.localize.picturing import hides, picture_of
from assay.harness.localize.reading import Flags, Numbers
from assay.harness.picture import Picture
from assay.harness.readout.effects import known_bug
from assay.harness.readout.operators import Operator
from assay.harness.readout.readout import ReadOut
from assay.harness.readout.samples import Sample
from assay.harness.readout.sentences import where
from assay.harness.readout.words import legend
from assay.harness.text import one_line
from assay.harness.verdict import OPERATOR, OPERATOR_SHOWN, UNEXPLAINED, Finding, serious, with_evidence

# Wrong outputs of calls in which an operator was not sought that it must give: a coincidence explains one.
_CONFIRMED = 2
# Share of the wrong outputs that a name must fail to give before it is taken back: other faults may lie beside it.
_REFUTED = 0.1
# Wrong calls on which an operator must equal a hypothesis to have its name.
_NAMED_ON = 8
# Relative error of a single weight that a picture does not show, as a multiple of that of an output, where a quantisation is
# declared: an output is a sum of weights, whose errors partly cancel.
_NOISY_WEIGHTS = 10.0
# Most public reports that a finding lists.
_LINKS = 3
# Names whose formula has a factor of its own for each kernel; `_outputs` fits it to each answer.
_GAINS = {id: Bug(id, TITLES[id], TITLES[id], act, "gain", oracle) for id, act in GAINS.items()}
# The names that a read-out can contradict. Others say how the kernel behaves, such as state that it keeps.
_NAMES = BY_ID | _GAINS


def _name_of(operator: Operator, samples: Sequence[Sample]) -> Bug | None:
    """The hypothesis that gives the same outputs as an operator wherever the kernel was wrong; None if there is none."""
    if operator.effect is None or operator.effect.id:
        return BY_ID.get(operator.effect.id) if operator.effect else None
    wrong = sorted(_wrong(samples), key=lambda s: s.size)
    few = wrong[:: max(1, len(wrong) // _NAMED_ON)][:_NAMED_ON]
    if not few:
        return None
    fits = (bug for bug in FAMILY if all(_gives(bug, s)[s.bad].all() for s in few))
    return next((bug for bug in fits if any(_defined(bug, s).any() for s in few)), None)


def said(read: ReadOut) -> str:
    """Return what a read-out says; empty unless it gives every output that was seen, some of calls that it was not sought in."""
    return read.sentence if read.exact and read.fresh.explained >= _CONFIRMED else ""


def with_operator(findings: Sequence[Finding], read: ReadOut) -> list[Finding]:
    """The findings of a check or a replay; the first serious one says what was read.

    It gets the name of what was read where it had none, or where what was read contradicts its own: the hypothesis changes
    outputs that are wrong, and not to what the kernel answers. Where no hypothesis is the same, what was read is the title. Its
    severity stays, so no verdict depends on a read-out.
    """
    first = next(iter(serious(findings)), None)
    if first is None:
        return list(findings)
    changed: dict[str, object] = {}
    evidence = [*first.evidence, *_evidence(read)]
    text = said(read)
    if not text and first.id in BY_ID and serious(findings) == [first]:
        changed = _refuted(first, read)
    elif text:
        others = {finding.id for finding in serious(findings)[1:]}
        changed = {"operator": text, "picture": _picture(read)} | _name(first, others, read)
        if changed.pop("place", False):
            evidence.insert(len(first.evidence), f"on the calls that were compared: {first.diagnosis}")
        if reports := public_reports(str(changed.get("id", first.id))):
            evidence.append(f"public reports of such a bug: {', '.join(reports[:_LINKS])}")
    return with_evidence(findings, **changed | {"evidence": tuple(evidence)})


def _evidence(read: ReadOut) -> list[str]:
    """Return what a read-out rests on, or why it says nothing."""
    text, wrong = said(read), f"{read.all.wrong:,} wrong outputs"
    effort = f"{read.calls:,} calls and {read.seconds:.1f} s{'' if read.complete else ', which was all of its budget'}"
    if text:
        how = "read from recorded calls, without asking the kernel," if read.passive else "read off the kernel"
        summary = (
            f"{how} in {effort}: gives {read.all.explained:,} of {wrong} (queries x heads), {read.fresh.explained:,} of "
            f"{read.fresh.wrong:,} on calls in which it was not sought"
        )
    elif read.all.wrong:
        how = "the recorded calls were searched" if read.passive else "the kernel was read"
        summary = f"{how} in {effort}: no rule was found that gives its {wrong}"
    else:
        summary = (
            f"the kernel could not be read in {effort}: no single output of a call that can be read is clearly wrong"
        )
    return [summary, *filter(None, (legend(text),)), *read.notes]


def _name(first: Finding, others: Collection[str], read: ReadOut) -> dict[str, object]:
    """Id, title, words for the headline, and diagnosis of a finding, so that they and what was read say one thing.

    What other serious findings give is not held against this one.
    """
    if first.id == UNEXPLAINED:
        return _read_name(read) | {"diagnosis": read.sentence}
    if first.id not in _NAMES:
        return {}
    against = {id: _against(_NAMES[id], others, read) for id in (first.id, *first.equivalent)}
    fits = [id for id in against if not against[id]]
    if first.id in fits:
        return {"equivalent": tuple(fits[1:])} | _confined(first, read)
    wrong = f'"{first.title}" fits the failing calls, but not {against[first.id]:,} wrong outputs that were read'
    named = _named(fits[0], read) if fits else _read_name(read)
    return named | {"diagnosis": f"{read.sentence}; {wrong}", "equivalent": tuple(fits[1:])}


def _refuted(first: Finding, read: ReadOut) -> dict[str, object]:
    """Changes of a finding whose name does not give what was seen, where nothing was read that does."""
    bug, seen = BY_ID[first.id], _wrong(read.samples)
    off = sum(int((s.bad & s.differs(_outputs(bug, s)) & ~_gives(bug, s)).sum()) for s in seen)
    if off <= _REFUTED * read.all.wrong:
        return {}
    wrong = f'"{first.title}" fits failing calls, but not {off:,} of {read.all.wrong:,} wrong outputs that were seen'
    return {
        "id": UNEXPLAINED,
        "title": TITLES[UNEXPLAINED],
        "does": does(None, ""),
        "diagnosis": wrong,
        "equivalent": (),
    }


def _confined(first: Finding, read: ReadOut) -> dict[str, object]:
    """Changes of a finding whose name was read: a read-out that names a condition says where it shows."""
    if not where(read.operator):
        return {}
    return {"does": str(_named(first.id, read)["does"]), "diagnosis": read.sentence, "place": True}


def _read_name(read: ReadOut) -> dict[str, object]:
    known = _name_of(read.operator, read.samples)
    if known:
        return _named(known.id, read)
    return {"id": OPERATOR, "title": one_line(read.sentence, OPERATOR_SHOWN), "does": does(None, "")}


def _named(id_: str, read: ReadOut) -> dict[str, object]:
    """Id, title and words for the headline of a hypothesis; the operator says under which condition."""
    act, place = does(_NAMES[id_], ""), where(read.operator)
    return {"id": id_, "title": _NAMES[id_].title, "does": f"{act}, {place}" if place else act}


def _against(bug: Bug, others: Collection[str], read: ReadOut) -> int:
    """Count wrong outputs that a hypothesis changes, not to the kernel's answer, and that no other finding gives."""
    if not any(_defined(bug, sample).any() for sample in _wrong(read.samples)):
        return sum(int(sample.bad.sum()) for sample in read.samples)
    count = 0
    for sample in _wrong(read.samples):
        rows = sample.bad & ~_gives(bug, sample)
        if bug.id not in _GAINS:
            rows &= sample.differs(_outputs(bug, sample))
        for id in others:
            if rows.any() and id in _NAMES:
                rows &= ~_gives(_NAMES[id], sample)
        count += int(rows.sum())
    return count


def _defined(bug: Bug, sample: Sample) -> Flags:
    """Where a hypothesis says what a wrong answer is: that it leaves an output undefined fits whatever is not finite."""
    out = _outputs(bug, sample)
    return sample.bad & ~np.isnan(out).any(-1).ravel()


def _wrong(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.bad.any()]


def _outputs(bug: Bug, sample: Sample) -> Numbers:
    """Return what a kernel with this bug gives, float64 [rows, heads, head_dim_v]; of a scaled one, the nearest multiple."""
    right = sample.queries.right
    if bug.id not in _GAINS:
        return known_bug(bug).outputs(sample.queries)
    if bug.id == OUTPUT_NOT_WRITTEN:
        return np.zeros_like(right)
    answers = np.nan_to_num(sample.actual, posinf=0.0, neginf=0.0)
    return np.asarray(right * ((answers * right).sum(-1) / np.maximum((right * right).sum(-1), 1e-30))[..., None])


def _gives(bug: Bug, sample: Sample) -> Flags:
    """Return which of a sample's answers a hypothesis gives, bool [rows * heads]; what it leaves undefined may be zero."""
    out = _outputs(bug, sample)
    return sample.agrees(out) | sample.agrees(np.where(np.isnan(out), 0.0, out))


def _picture(read: ReadOut) -> Picture | None:
    """The picture of the smallest wrong call that was read and shows the edge of a mask; None if none was read."""
    seen = [(sample, sample.reading) for sample in read.samples if sample.reading is not None and sample.bad.any()]
    if not seen:
        return None
    best, reading = min(seen, key=lambda pair: hides(len(pair[1].rows), pair[0].keys))
    return picture_of(reading, relative=_NOISY_WEIGHTS * best.error if read.quantised else None)
