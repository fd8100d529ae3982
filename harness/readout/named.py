"""Names for operators: the hypothesis that an operator equals, and the finding that reports it."""

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

# An operator must explain this many wrong outputs of held-out calls: a coincidence explains one.
_CONFIRMED = 2
# A name is withdrawn if it fails to explain more than this share of the wrong outputs: the kernel may have other faults too.
_REFUTED = 0.1
# With a declared quantisation, a picture hides errors of single weights up to this multiple of an output's error: an output is a
# sum of weights, whose errors partly cancel.
_NOISY_WEIGHTS = 10.0
# Most public reports to list in a finding.
_LINKS = 3
# Names whose formula has a separate factor for each kernel; `_outputs` fits it to each answer.
_GAINS = {id: Bug(id, TITLES[id], TITLES[id], act, "gain", oracle) for id, act in GAINS.items()}
# The names that a read-out can contradict. Others describe the kernel's behaviour, such as keeping state.
_NAMES = BY_ID | _GAINS


def _name_of(operator: Operator, samples: Sequence[Sample]) -> Bug | None:
    """Return the hypothesis that gives the operator's outputs wherever the kernel was wrong, on every call, or None."""
    if operator.effect is None or operator.effect.id:
        return BY_ID.get(operator.effect.id) if operator.effect else None
    wrong = sorted(_wrong(samples), key=lambda s: s.size)
    fits = (bug for bug in FAMILY if wrong and all(_gives(bug, s)[s.bad].all() for s in wrong))
    return next((bug for bug in fits if any(_defined(bug, s).any() for s in wrong)), None)


def said(read: ReadOut) -> str:
    """Return the sentence of a read-out, or "" unless it explains every output, including some of held-out calls."""
    return read.sentence if read.exact and read.predicts and read.fresh.explained >= _CONFIRMED else ""


def with_operator(findings: Sequence[Finding], read: ReadOut) -> list[Finding]:
    """Add a read-out to the first serious finding of a check or a replay; return all findings.

    The finding takes the operator's name if it had none, or if the read-out contradicts its own: its hypothesis then changes
    wrong outputs, but not to the kernel's answers. If no hypothesis equals the operator, the operator becomes the title. The
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
            evidence.insert(len(first.evidence), f"on the compared calls: {first.diagnosis}")
        if reports := public_reports(str(changed.get("id", first.id))):
            evidence.append(f"public reports of such a bug: {', '.join(reports[:_LINKS])}")
    return with_evidence(findings, **changed | {"evidence": tuple(evidence)})


def _evidence(read: ReadOut) -> list[str]:
    """Return the evidence of a read-out, or the reason why it says nothing."""
    text, wrong = said(read), f"{read.all.wrong:,} wrong outputs"
    effort = f"{read.calls:,} calls and {read.seconds:.1f} s{'' if read.complete else ', the whole budget'}"
    if text:
        summary = (
            f"inferred from the kernel in {effort}: gives {read.all.explained:,} of {wrong} (queries x heads), "
            f"{read.fresh.explained:,} of {read.fresh.wrong:,} on held-out calls"
        )
    elif read.all.wrong:
        summary = f"the kernel was probed in {effort}: no rule explains its {wrong}"
    else:
        summary = (
            f"no rule could be inferred in {effort}: no single output of a call that can be probed is clearly wrong"
        )
    return [summary, *filter(None, (legend(text),)), *read.notes]


def _name(first: Finding, others: Collection[str], read: ReadOut) -> dict[str, object]:
    """Return the id, title, headline and diagnosis of a finding so that they agree with the read-out.

    Outputs that other serious findings explain do not count against this one.
    """
    if first.id == UNEXPLAINED:
        return _read_name(read) | {"diagnosis": read.sentence}
    if first.id not in _NAMES:
        return {}
    against = {id: _against(_NAMES[id], others, read) for id in (first.id, *first.equivalent)}
    fits = [id for id in against if not against[id]]
    if first.id in fits:
        return {"equivalent": tuple(fits[1:])} | _confined(first, read)
    wrong = (
        f'"{first.title}" fits the failing calls, but not {against[first.id]:,} of the wrong outputs of the read-out'
    )
    named = _named(fits[0], read) if fits else _read_name(read)
    return named | {"diagnosis": f"{read.sentence}; {wrong}", "equivalent": tuple(fits[1:])}


def _refuted(first: Finding, read: ReadOut) -> dict[str, object]:
    """Return changes that withdraw a finding's name if it does not explain the outputs and the read-out has no better one."""
    bug, seen = BY_ID[first.id], _wrong(read.samples)
    off = sum(int((s.bad & s.differs(_outputs(bug, s)) & ~_gives(bug, s)).sum()) for s in seen)
    if off <= _REFUTED * read.all.wrong:
        return {}
    wrong = f'"{first.title}" fits failing calls, but not {off:,} of {read.all.wrong:,} observed wrong outputs'
    return {
        "id": UNEXPLAINED,
        "title": TITLES[UNEXPLAINED],
        "does": does(None, ""),
        "diagnosis": wrong,
        "equivalent": (),
    }


def _confined(first: Finding, read: ReadOut) -> dict[str, object]:
    """Return changes of a finding whose name the read-out confirms: its condition says where the bug shows."""
    if not where(read.operator):
        return {}
    return {"does": str(_named(first.id, read)["does"]), "diagnosis": read.sentence, "place": True}


def _read_name(read: ReadOut) -> dict[str, object]:
    known = _name_of(read.operator, read.samples)
    if known:
        return _named(known.id, read)
    return {"id": OPERATOR, "title": one_line(read.sentence, OPERATOR_SHOWN), "does": does(None, "")}


def _named(id_: str, read: ReadOut) -> dict[str, object]:
    """Return the id, title and headline of a hypothesis; the operator supplies the condition."""
    act, place = does(_NAMES[id_], ""), where(read.operator)
    return {"id": id_, "title": _NAMES[id_].title, "does": f"{act}, {place}" if place else act}


def _against(bug: Bug, others: Collection[str], read: ReadOut) -> int:
    """Count wrong outputs that a hypothesis changes (but not to the kernel's answer) and that no other finding explains."""
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
    """Return flags of the outputs that a hypothesis defines; an undefined output fits any answer that is not finite."""
    out = _outputs(bug, sample)
    return sample.bad & ~np.isnan(out).any(-1).ravel()


def _wrong(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.bad.any()]


def _outputs(bug: Bug, sample: Sample) -> Numbers:
    """Return the outputs of a kernel with this bug, float64 [rows, heads, head_dim_v]; if scaled, the nearest multiple."""
    right = sample.queries.right
    if bug.id not in _GAINS:
        return known_bug(bug).outputs(sample.queries)
    if bug.id == OUTPUT_NOT_WRITTEN:
        return np.zeros_like(right)
    answers = np.nan_to_num(sample.actual, posinf=0.0, neginf=0.0)
    return np.asarray(right * ((answers * right).sum(-1) / np.maximum((right * right).sum(-1), 1e-30))[..., None])


def _gives(bug: Bug, sample: Sample) -> Flags:
    """Return flags of the answers that a hypothesis gives, bool [rows * heads]; where it is undefined, zero fits too."""
    out = _outputs(bug, sample)
    return sample.agrees(out) | sample.agrees(np.where(np.isnan(out), 0.0, out))


def _picture(read: ReadOut) -> Picture | None:
    """Return the picture of the smallest wrong call that was read and shows the edge of a mask, or None if none was read."""
    seen = [(sample, sample.reading) for sample in read.samples if sample.reading is not None and sample.bad.any()]
    if not seen:
        return None
    best, reading = min(seen, key=lambda pair: hides(len(pair[1].rows), pair[0].keys))
    return picture_of(reading, relative=_NOISY_WEIGHTS * best.error if read.quantised else None)
