"""The decisions of a layer bisection: right prompts, wrong sets of layers, and the result with its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from assay.evals.questions import parse_answer
from assay.harness.conditions import CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE
from assay.harness.drivers.bisect import SCHEMA
from assay.harness.drivers.bisect.layer_search import SearchResult
from assay.harness.errors import ExitCode
from assay.harness.evidence.records import Item
from assay.harness.judge.paired_accuracy import CHANCE
from assay.harness.schema import Record
from assay.harness.sides import Device
from assay.harness.stats.share import mcnemar_of_loss, p_not_above
from assay.harness.text import ranges
from assay.harness.verdict import Finding

_Criterion = Literal["answers", "text"]
"""What must be right again: the answers to the questions, or the greedy texts (identical to the reference's own)."""
_Outcome = Literal["right", "wrong"]
# The reference is better than guessing if the p value of "it guesses" is below this.
_GUESSING_ALPHA = 0.01


class ProbeRecord(Record):
    """One probe: the layers that ran the candidate, and their comparison with the reference alone, prompt by prompt."""

    candidate: tuple[int, ...]
    right: int = Field(description="right prompts")
    lost: int = Field(description="prompts that are right with the reference alone only")
    gained: int = Field(description="prompts that are right with the set only")
    p: float = Field(description='exact one-sided McNemar p value of "no loss"')
    outcome: _Outcome = Field(description='"wrong" if p is below alpha')
    with_prefix: int = Field(description="prompts of which at least 16 tokens were cached")
    seconds: float


class LayerSetup(Record):
    """The setup of a bisection by layers."""

    reference: str
    candidate: str
    model: str
    device: Device
    engine: str = Field(description="engine, version and device")
    phases: tuple[str, ...] = Field(description="phases that the candidate computes")
    layers: tuple[int, ...] = Field(description="attention layers of the model, in order")
    prompts: int = Field(description="prompts in each probe")
    alpha: float = Field(description="level of the test")
    reproduce: str = Field(description="the command that repeats the bisection")


class Floors(Record):
    """The floors: what had to be right, and how repeatable the answers are."""

    by: _Criterion = Field(description="what had to be right")
    by_why: str = Field(description="the reason for that choice")
    reference_right: int = Field(description="prompts that were right with the reference alone")
    floor: int = Field(description="prompts whose text differed when the reference alone was asked twice")
    candidate_floor: int = Field(0, description="the same for the candidate in all layers")

    @property
    def steady(self) -> bool:
        """True if both repeated their texts exactly."""
        return not self.floor and not self.candidate_floor


class LayerBisection(LayerSetup, Floors, SearchResult):
    """``bisect.json``: a layer bisection and its result. A file of another schema is not read: a bisection is repeated."""

    schema_id: Literal["assay.bisect/5"] = Field(SCHEMA, alias="schema")
    probes: tuple[ProbeRecord, ...]
    findings: tuple[Finding, ...]
    seconds: float = Field(description="without the start of the server")

    @property
    def exit_code(self) -> ExitCode:
        """1 if layers were found, 0 if no layer needs the reference, 3 if undecided."""
        codes = {"found": ExitCode.REGRESSION, "nothing": ExitCode.PASS, "inconclusive": ExitCode.NO_VERDICT}
        return codes[self.outcome]


def fewest_prompts(alpha: float) -> int:
    """Return the smallest number of prompts whose complete loss is significant: 2^-n below alpha."""
    return math.floor(-math.log2(alpha)) + 1


def can_fail(by: _Criterion, right: int, prompts: int, alpha: float) -> bool:
    """Return True if a broken candidate would be noticed, given that the reference gets `right` of `prompts` right.

    The loss of all right prompts must be significant (McNemar's exact test). For answers, the reference must also be clearly better
    than guessing, because guesses are right again and again.
    """
    detectable = by == "text" or p_not_above(right, prompts, CHANCE) < _GUESSING_ALPHA
    return detectable and mcnemar_of_loss(right, 0) < alpha


def choose_criterion(items: Sequence[Item], own: Sequence[str], alpha: float) -> tuple[_Criterion, str]:
    """Choose, with the reason, answers if the reference knows enough of them to lose some; else text."""
    right = sum(right_prompts("answers", items, own, own))
    known = f"the reference is right on {right} of {len(items)} questions"
    if can_fail("answers", right, len(items), alpha):
        return "answers", known
    return "text", f"{known}, too few to detect a loss of answers"


def right_prompts(by: _Criterion, items: Sequence[Item], own: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Mark the texts that are right: those that give the expected letter, or those identical to the reference's own."""
    if by == "text":
        return [text == first for text, first in zip(texts, own, strict=True)]
    return [item.is_right(parse_answer(text, item.expected)) for item, text in zip(items, texts, strict=True)]


def probe_record(
    candidate: frozenset[int],
    reference: Sequence[bool],
    these: Sequence[bool],
    alpha: float,
    with_prefix: int,
    seconds: float,
) -> ProbeRecord:
    """Compare the candidate in a set of layers with the reference alone, prompt by prompt: whether each is right.

    The set is "wrong" if it lost significantly more than it gained: McNemar's exact test, one-sided, at level alpha. Unstable
    prompts go both ways, so they make a set wrong with a probability of at most alpha.
    """
    lost = sum(before and not now for before, now in zip(reference, these, strict=True))
    gained = sum(now and not before for before, now in zip(reference, these, strict=True))
    p = mcnemar_of_loss(lost, gained)
    return ProbeRecord(
        candidate=tuple(sorted(candidate)), right=sum(these), lost=lost, gained=gained, p=p,
        outcome="wrong" if p < alpha else "right", with_prefix=with_prefix, seconds=seconds,
    )  # fmt: skip


def conclude(
    setup: LayerSetup, floors: Floors, search: SearchResult | None, probes: Sequence[ProbeRecord], seconds: float
) -> LayerBisection:
    """Summarise a bisection in its result; there was no search if a broken candidate would not be noticed, see `can_fail`.

    Finding nothing is inconclusive if too few prompts had a cached prefix: extend over a cached prefix was then not tested.
    """
    if search is None:
        why = (
            f"The reference alone gets {floors.reference_right} of {setup.prompts} right by {floors.by}: a broken candidate "
            "could not look worse."
        )
        search = SearchResult(outcome="inconclusive", why=why, restored=(), monotone=True)
    cached = min((probe.with_prefix for probe in probes if probe.candidate == setup.layers), default=0)
    if search.outcome == "nothing" and cached < MIN_CACHED_SHARE * setup.prompts:
        why = (
            f"The task is right with the candidate in all {len(setup.layers)} layers, but only {cached} of {setup.prompts} prompts "
            f"had a cached prefix of {CACHED_PREFIX_TOKENS} tokens or more: run with the prefix cache on."
        )
        search = search.model_copy(update={"outcome": "inconclusive", "why": why})
    return LayerBisection(
        **setup.model_dump(),
        **floors.model_dump(),
        **search.model_dump(),
        probes=tuple(probes),
        findings=(_finding(setup, floors.by, search, probes),) if search.restored else (),
        seconds=seconds,
    )


def _finding(setup: LayerSetup, by: _Criterion, search: SearchResult, probes: Sequence[ProbeRecord]) -> Finding:
    layers = [layer.layer for layer in search.restored]
    every = frozenset(setup.layers)
    where = f"layer{'s' * (len(layers) > 1)} {ranges(layers)} of {ranges(every)}"
    evidence = [_score(f"{setup.candidate} in {name}", some, search, probes, by) for name, some in (
        ("no layer", frozenset()), ("all layers", every), (f"all layers but {ranges(layers)}", every - set(layers)),
    )]  # fmt: skip
    told = {True: "wrong alone", False: "right alone, wrong only together with others"}
    evidence += [f"layer {layer.layer}: {told[layer.alone]}" for layer in search.restored if layer.alone is not None]
    if len(layers) > 1:
        evidence.append(
            "each of these layers is needed: with any one of them running the candidate, the task is wrong again"
        )
    if not search.monotone:
        evidence.append(
            "more layers of the candidate were better than fewer at least once, so errors cancel or there is noise: another "
            "choice of layers may also work"
        )
    return Finding(
        id="layers-need-reference",
        title="layers that must run the reference",
        severity="serious",
        where=where,
        diagnosis=f"must run {setup.reference} for the {'answers' if by == 'answers' else 'texts'} to be right again; "
        f"with {setup.candidate} in all other layers, these prompts show no loss.",
        evidence=tuple(evidence),
        reproduce=setup.reproduce,
    )


def _score(what: str, some: frozenset[int], search: SearchResult, probes: Sequence[ProbeRecord], by: _Criterion) -> str:
    times = next((right, wrong) for candidate, right, wrong in search.probed if candidate == some)
    outcome = "right" if times[0] > times[1] else "wrong"  # outvoted answers are no evidence
    probe = next(probe for probe in probes if frozenset(probe.candidate) == some and probe.outcome == outcome)
    total = probe.right + probe.lost - probe.gained
    right = "answers right" if by == "answers" else "texts identical to the reference's"
    change = f"{probe.lost} lost, {probe.gained} gained, p = {probe.p:.2g}"
    return f"{what}: {probe.right} {right}, the reference alone {total} ({change})"
