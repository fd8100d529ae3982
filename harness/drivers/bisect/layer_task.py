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
from assay.harness.statement import Statement, state
from assay.harness.stats.share import mcnemar_of_loss, p_not_above
from assay.harness.text import ranges
from assay.harness.verdict import Finding

_Criterion = Literal["answers", "text"]
"""The criterion that must hold again: right answers to the questions, or greedy texts identical to the reference's own."""
_Outcome = Literal["right", "wrong"]
# The reference is better than guessing if the p value of "it guesses" is below this.
_GUESSING_ALPHA = 0.01


class ProbeRecord(Record):
    """One probe: the layers that ran the candidate, compared with the reference alone, prompt by prompt."""

    candidate: tuple[int, ...]
    right: int = Field(description="right prompts")
    lost: int = Field(description="prompts that are right only with the reference alone")
    gained: int = Field(description="prompts that are right only with the set")
    p: float = Field(description='exact one-sided McNemar p value of "no loss"')
    outcome: _Outcome = Field(description='"wrong" if p is below alpha')
    with_prefix: int = Field(description="prompts with at least 16 cached tokens")
    seconds: float


class LayerBisection(SearchResult):
    """``bisect.json``: a layer bisection and its result. Files of another schema are not read: bisections are simply repeated."""

    schema_id: Literal["assay.bisect/7"] = Field(SCHEMA, alias="schema")
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
    by: _Criterion = Field(description="what had to be right: the answers, or the text")
    known: int = Field(
        description="questions that the reference alone answers right; if too few, the text had to be right"
    )
    reference_right: int = Field(description="prompts that were right with the reference alone")
    floor: int = Field(description="prompts whose text differed when the reference alone was asked twice")
    candidate_floor: int = Field(description="the same for the candidate in all layers")
    probes: tuple[ProbeRecord, ...]
    findings: tuple[Finding, ...] = ()
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

    Losing all right prompts must be significant (McNemar's exact test). For answers, the reference must also be clearly better
    than guessing, because guesses are sometimes right.
    """
    detectable = by == "text" or p_not_above(right, prompts, CHANCE) < _GUESSING_ALPHA
    return detectable and mcnemar_of_loss(right, 0) < alpha


def choose_criterion(items: Sequence[Item], own: Sequence[str], alpha: float) -> tuple[_Criterion, int]:
    """Choose answers if the reference knows enough of them to lose some, or else text; also return the number that it knows."""
    known = sum(right_prompts("answers", items, own, own))
    return "answers" if can_fail("answers", known, len(items), alpha) else "text", known


def right_prompts(by: _Criterion, items: Sequence[Item], own: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Mark the right texts: those that give the expected letter, or those identical to the reference's own."""
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
    """Compare the candidate in a set of layers with the reference alone: which prompts each gets right.

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


def conclude(result: LayerBisection) -> LayerBisection:
    """Add the finding to a bisection.

    Finding nothing is inconclusive if too few prompts had a cached prefix: extend over a cached prefix was then not tested.
    """
    cached = min((probe.with_prefix for probe in result.probes if probe.candidate == result.layers), default=0)
    if result.outcome == "nothing" and cached < MIN_CACHED_SHARE * result.prompts:
        numbers = {"cached": cached, "prompts": result.prompts, "tokens": CACHED_PREFIX_TOKENS}
        why = state("right-without-cached-prefix", layers=len(result.layers), **numbers)
        return result.model_copy(update={"outcome": "inconclusive", "why": why})
    return result.model_copy(update={"findings": (_finding(result),)}) if result.restored else result


def _finding(result: LayerBisection) -> Finding:
    layers = [layer.layer for layer in result.restored]
    kept = tuple(layer for layer in result.layers if layer not in layers)
    shown = [_score((), [], result), _score(result.layers, [], result), _score(kept, layers, result)]
    asked = [layer for layer in result.restored if layer.alone is not None]
    shown += [state("layer-alone", layer=layer.layer, wrong=layer.alone) for layer in asked]
    if len(layers) > 1:
        shown.append(state("each-layer-needed"))
    if not result.monotone:
        shown.append(state("errors-may-cancel"))
    return Finding(
        id="layers-need-reference",
        title="layers that must run the reference",
        severity="serious",
        where=f"layer{'s' * (len(layers) > 1)} {ranges(layers)} of {ranges(result.layers)}",
        claim=state("layers-need-reference", reference=result.reference, candidate=result.candidate, by=result.by),
        shown_by=tuple(shown),
        reproduce=result.reproduce,
    )


def _score(some: tuple[int, ...], but: Sequence[int], result: LayerBisection) -> Statement:
    probes = [probe for probe in result.probes if probe.candidate == some]
    wrong = sum(probe.outcome == "wrong" for probe in probes) > len(probes) / 2
    probe = next(probe for probe in probes if (probe.outcome == "wrong") == wrong)  # outvoted answers are not evidence
    numbers = {name: getattr(probe, name) for name in ("right", "lost", "gained", "p")}
    return state(
        "right-with-candidate", candidate=result.candidate, layers=len(some), but=but, by=result.by, alone=result.reference_right,
        **numbers,
    )  # fmt: skip
