"""The task of a layer bisect: what is right, when a set of layers does worse than the reference, and what is written down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field
from scipy.stats import binom

from assay.evals.questions import parse_answer
from assay.harness.bisect.layer_search import Restored, Search, SearchOutcome, spans
from assay.harness.config import Device
from assay.harness.errors import ExitCode
from assay.harness.evidence.records import Item
from assay.harness.schema import Record
from assay.harness.stats.decision import CHANCE, CLEARLY
from assay.harness.stats.paired import mcnemar_exact
from assay.harness.stats.share import clopper_pearson, p_not_above
from assay.harness.verdict import Finding

By = Literal["answers", "text"]
"""What must be right again: the answers to the questions, or the greedy texts (equal to the reference's own)."""
Outcome = Literal["right", "wrong"]
SCHEMA: Literal["assay.bisect-layers/1"] = "assay.bisect-layers/1"


@dataclass(frozen=True)
class Judged:
    """A set of layers against the reference alone, prompt by prompt.

    Attributes:
        right: prompts that are right.
        lost: right by the reference alone only.
        gained: right by the set only.
        p: exact one-sided McNemar p value of "no loss".
        outcome: "wrong" if p is below alpha.
    """

    right: int
    lost: int
    gained: int
    p: float
    outcome: Outcome


class ProbeRecord(Record):
    """One probe: the layers that ran the candidate, and how the prompts came out, as in `Judged`.

    Attributes:
        with_prefix: prompts of which at least 16 tokens were cached.
        seconds: time that it took.
    """

    candidate: tuple[int, ...]
    right: int
    lost: int
    gained: int
    p: float
    outcome: Outcome
    with_prefix: int
    seconds: float


class LayerBisect(Record):
    """``bisect.json``: a layer bisect and its outcome.

    Attributes:
        engine: engine, version and device.
        phases: phases in which the candidate computes; in the others the reference runs in every layer.
        layers: attention layers of the model.
        prompts: prompts of each probe.
        by: what had to be right; `by_why` says why this was chosen.
        reference_right: prompts that the reference alone got right.
        floor: prompts whose text differed when the reference alone was asked twice.
        candidate_floor: the same of the candidate in all layers.
        flips: prompts that were right once and not the other time, in both floors together.
        noise: probability with which one answer of a probe may be false, see `noise_of`; 0 where both floors are 0.
        alpha: level of the test, and probability with which any set's outcome may be false over the whole search.
        restored: layers that must run the reference; empty unless found.
        monotone: whether no answer contradicted that more layers of the candidate are never better.
        findings: one, if layers were found.
        seconds: from ready to the end, without the start of the server.
    """

    model_config = ConfigDict(serialize_by_alias=True, populate_by_name=True)

    schema_id: Literal["assay.bisect-layers/1"] = Field(SCHEMA, alias="schema")
    verdict: SearchOutcome
    why: str
    reference: str
    candidate: str
    model: str
    device: Device
    engine: str
    phases: tuple[str, ...]
    layers: tuple[int, ...]
    prompts: int
    by: By
    by_why: str
    reference_right: int
    floor: int
    candidate_floor: int
    flips: int
    noise: float
    alpha: float
    restored: tuple[Restored, ...]
    monotone: bool
    probes: tuple[ProbeRecord, ...]
    findings: tuple[Finding, ...]
    reproduce: str
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """1 if layers were found, 0 if no layer needs the reference, 3 if it could not be told."""
        codes = {"found": ExitCode.REGRESSION, "nothing": ExitCode.PASS, "inconclusive": ExitCode.NO_VERDICT}
        return codes[self.verdict]


def fewest_prompts(alpha: float) -> int:
    """The smallest number of prompts of which the loss of all is significant: 2^-n below alpha."""
    return math.floor(-math.log2(alpha)) + 1


def noise_of(flips: int, asked: int, prompts: int, alpha: float) -> float:
    """Probability with which one answer of a probe is false, from what flips when the same is asked twice.

    Let a prompt flip with a probability of at most f, the exact upper bound (one-sided, of level ``1 - alpha``) by `flips` of
    `asked`. For a set that does no harm to be called wrong, at least as many prompts as are significant must be lost by flipping:
    a binomial tail, and never more than alpha, the level of the test. The same is taken for a set that is wrong.

    Args:
        flips: prompts that were right once and not the other time.
        asked: prompts that were asked twice.
        prompts: prompts of a probe.
        alpha: level of the test.
    """
    rate = clopper_pearson(flips, asked, 2 * alpha).high
    return min(alpha, float(binom.sf(fewest_prompts(alpha) - 1, prompts, rate)))


def can_fail(by: By, right: int, prompts: int, alpha: float) -> bool:
    """Whether next to `right` of `prompts` a broken candidate would be seen.

    The loss of all that is right must be significant (McNemar's exact test); for answers the reference must also clearly do
    better than guessing, since guesses are right again and again.
    """
    sighted = by == "text" or p_not_above(right, prompts, CHANCE) < CLEARLY
    return sighted and mcnemar_exact(right, 0).loss < alpha


def choose(items: Sequence[Item], own: Sequence[str], alpha: float) -> tuple[By, str]:
    """What to go by if nobody said: answers, if the reference knows enough of them to be able to lose some; else text.

    Returns:
        The choice, and why.
    """
    right = sum(marks("answers", items, own, own))
    known = f"the reference is right on {right} of {len(items)} questions"
    if can_fail("answers", right, len(items), alpha):
        return "answers", known
    return "text", f"{known}, too few to see a loss of answers"


def marks(by: By, items: Sequence[Item], own: Sequence[str], texts: Sequence[str]) -> list[bool]:
    """Which texts are right: give the expected letter, or are the reference's own text, token for token as far as texts tell."""
    if by == "text":
        return [text == first for text, first in zip(texts, own, strict=True)]
    letters = [parse_answer(text) for text in texts]
    return [letter is not None and letter == item.expected for item, letter in zip(items, letters, strict=True)]


def judge(reference: Sequence[bool], these: Sequence[bool], alpha: float) -> Judged:
    """Hold a set of layers against the reference alone on the same prompts.

    It is "wrong" if it lost significantly more than it gained: McNemar's exact test, one-sided, at level alpha. So what flips by
    chance alone, in both directions alike, makes it wrong with a probability of at most alpha.

    Args:
        reference: by prompt, whether the reference alone is right.
        these: by prompt, whether the set is.
        alpha: level of the test.
    """
    lost = sum(before and not now for before, now in zip(reference, these, strict=True))
    gained = sum(now and not before for before, now in zip(reference, these, strict=True))
    p = mcnemar_exact(lost, gained).loss
    return Judged(sum(these), lost, gained, p, "wrong" if p < alpha else "right")


def finding(search: Search, probes: Sequence[ProbeRecord], by: By, roles: tuple[str, str], reproduce: str) -> Finding:
    """What was found, in words.

    Args:
        search: with the verdict "found".
        probes: its probes, in order; the first is of no layer.
        by: what had to be right.
        roles: names of the reference and of the candidate.
        reproduce: the command that shows it again.
    """
    reference, candidate = roles
    layers = [one.layer for one in search.restored]
    every = max(search.asked, key=lambda one: len(one.candidate)).candidate
    kept = every - set(layers)
    where = f"layer{'s' * (len(layers) > 1)} {spans(layers)} of {spans(every)}"
    evidence = [_score(f"{candidate} in {name}", some, search, probes, by) for name, some in (
        ("no layer", frozenset()), ("all layers", every), (f"all layers but {spans(layers)}", kept),
    )]  # fmt: skip
    evidence += [f"layer {one.layer}: {_alone(one)}" for one in search.restored if one.alone is not None]
    if len(layers) > 1:
        evidence.append("each of these is needed: put back alone, it makes the task wrong again")
    if not search.monotone:
        evidence.append(
            "more layers of the candidate were better than fewer at least once, so errors cancel, or there is noise: another "
            "choice of layers may do as well"
        )
    return Finding(
        id="layers",
        title="layers that must run the reference",
        severity="serious",
        where=where,
        diagnosis=f"must run {reference} for the task to be right again; "
        f"with {candidate} in all the others these prompts show no harm.",
        evidence=tuple(evidence),
        reproduce=reproduce,
    )


def _score(what: str, some: frozenset[int], search: Search, probes: Sequence[ProbeRecord], by: By) -> str:
    asked = next(one for one in search.asked if one.candidate == some)
    outcome = "right" if asked.right > asked.wrong else "wrong"  # an answer that was outvoted is no evidence
    probe = next(probe for probe in probes if frozenset(probe.candidate) == some and probe.outcome == outcome)
    total = probe.right + probe.lost - probe.gained
    right = "answers right" if by == "answers" else "texts as the reference's"
    flips = f"{probe.lost} lost, {probe.gained} gained, p = {probe.p:.2g}"
    return f"{what}: {probe.right} {right}, the reference alone {total} ({flips})"


def _alone(one: Restored) -> str:
    if one.alone:
        return "wrong alone"
    if one.partners:
        return f"right alone, wrong together with {spans(one.partners)}: one of these in the reference is enough"
    return "right alone, wrong only together with several others: small errors add up"
