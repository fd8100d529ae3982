"""Greedy texts of both roles -> the suite ``greedy``."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.compare.answers import Pair
from assay.harness.compare.greedy_texts import TextDivergence, compare_text, floor_between
from assay.harness.config import RunSpec
from assay.harness.evidence.records import Answer
from assay.harness.judge.report import DivergenceRow, Metric, SuiteResult
from assay.harness.judge.suite_decisions import decide_share

_APART = "texts-apart"


def greedy_suite(spec: RunSpec, pairs: Sequence[Pair], answers: Sequence[Answer]) -> SuiteResult:
    """Whether few enough texts differ by more than noise, by the policy's greedy margin. Ties and near-equal tokens do not count.

    Args:
        spec: of the run.
        pairs: greedy answers of both roles.
        answers: all answers: the reference's second ones give its run-to-run floor.
    """
    again = {a.item: a for a in answers if a.suite == "greedy" and a.role == "reference" and a.repeat > 0}
    floors = [floor_between(p.reference.tokens, again[p.item.id].tokens) for p in pairs if p.item.id in again]
    floor = max(floors, default=0.0)
    differing = [(p, d) for p in pairs if (d := compare_text(p.reference.tokens, p.candidate.tokens, floor))]
    kinds = [divergence.kind for _, divergence in differing]
    apart = kinds.count("apart")
    decision = decide_share(
        apart, len(pairs), spec.greedy_margin, spec.alpha, items="greedy texts", bad_clause="differ by more than noise"
    )
    first = min((divergence.position for _, divergence in differing), default=None)
    return SuiteResult(
        id="greedy",
        title="Greedy texts",
        synthetic=spec.synthetic,
        verdict=decision.verdict,
        why=f"{decision.why} Policy: {spec.policy_line('greedy_margin')}.",
        metrics=(
            Metric(
                id=_APART,
                title="texts that differ by more than noise",
                value=100 * decision.share,
                text=f"{100 * decision.share:.1f} %",
                low=100 * decision.interval.low,
                high=100 * decision.interval.high,
                bound=100 * spec.greedy_margin,
                bound_is="most",
                policy=spec.policy_line("greedy_margin"),
                explain=f"{apart} of {len(pairs)} texts: at the first difference, a role's token is not among the other's best "
                "five",
            ),
            Metric(
                id="texts-equal",
                title="texts equal",
                value=float(len(pairs) - len(differing)),
                text=f"{len(pairs) - len(differing)} of {len(pairs)}",
                explain=f"{kinds.count('tie')} differ first at a tie, {kinds.count('close')} among near-equal tokens"
                + ("" if first is None else f"; earliest difference at token {first}"),
            ),
            Metric(
                id="reference-floor",
                title="reference's own floor",
                value=floor if floors else None,
                text=f"{floor:.2g} nats" if floors else "not measured",
                explain=f"Largest log-probability change of the reference asked twice, over {len(floors)} prompts",
            ),
        ),
        decided_by=_APART,
        divergences=tuple(_row(p, divergence) for p, divergence in differing),
    )


def _row(one: Pair, divergence: TextDivergence) -> DivergenceRow:
    return DivergenceRow(
        **dict(divergence),
        item=one.item.id,
        prompt=one.item.prompt,
        reference_text=one.reference.text,
        candidate_text=one.candidate.text,
        candidate_cached_tokens=one.candidate.cached_tokens,
    )
