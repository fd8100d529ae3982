"""Greedy texts of both roles -> the suite ``greedy``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from assay.harness.backend import Backend
from assay.harness.compare.answers import Pair
from assay.harness.compare.greedy_texts import TextDivergence, compare_text, floor_between, is_finite
from assay.harness.compare.noise_limits import MAX_SWING, swing_limit
from assay.harness.config import RunSpec
from assay.harness.evidence.records import Answer
from assay.harness.judge.envelope_texts import METRIC, EnvelopeTexts
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.report import DivergenceRow, Metric, SuiteResult
from assay.harness.judge.suite_decisions import ShareDecision, decide_share
from assay.harness.sides import Role
from assay.harness.stats.share import p_not_above
from assay.harness.verdict import Finding, Verdict

MIN_PROMPTS = 128
"""Fewer prompts give no pass. With 128 and a margin of 10 %, up to 6 texts apart pass: a candidate of which 2 % are apart passes in
98.5 % of runs, and one of which 10 % are apart in 2.3 % (``python benchmarks/logit_verdicts.py``)."""
FLOOR_FACTOR = 3.0
"""The limit of "close" is at least this multiple of the reference's own floor, which is the largest over fewer prompts."""
_APART = "texts-apart"


def claim(run: RunEvidence) -> Judged:
    """Judge the greedy texts, and report a reference that does not repeat its own."""
    pairs = run.pairings["greedy"].pairs
    if not pairs:
        return Judged()
    erratic = erratic_reference(pairs, run.answers, run.noise, run.manifest.command)
    suite = greedy_suite(run.spec, pairs, run.answers, run.noise, run.over_envelope)
    return Judged(suite=suite, findings=[erratic] if erratic else [])


def greedy_suite(
    spec: RunSpec, pairs: Sequence[Pair], answers: Sequence[Answer], noise: Sequence[str], envelope: Sequence[Pair] = ()
) -> SuiteResult:
    """Judge if few enough texts differ by more than noise, by the policy's greedy margin. Ties and close texts do not count.

    The limit of "close" is the larger of what the declared noise explains and `FLOOR_FACTOR` times the reference's own floor, which
    erratic answers do not raise: they rule out a pass, and where they are a larger share than the margin a regression too. Fewer
    than `MIN_PROMPTS` distinct prompts cannot pass; a regression is exact for any number. The answers to the envelope's requests
    are tested apart (`assay.harness.judge.envelope_texts`), with the same limit; the p value is that of both tests, by Bonferroni.

    Args:
        spec: of the run.
        pairs: greedy answers of both roles. Equal prompts count once.
        answers: all answers: the reference's second ones give its run-to-run floor.
        noise: noise families that the roles declare.
        envelope: answers of both roles to the envelope's requests.
    """
    asked = list({pair.item.prompt_hash: pair for pair in reversed(pairs)}.values())[::-1]
    # Where neither role says anything, nothing was compared.
    pairs = [one for one in asked if any(a.text or a.tokens for a in (one.reference, one.candidate))]
    floors = _floors(pairs, answers)
    declared = [name for name in noise if name]
    steady, erratic = _steady(floors, swing_limit(declared))
    floor = max(steady, default=0.0)
    limit = max(swing_limit(declared), FLOOR_FACTOR * floor)
    started: dict[Role, bool] = {
        "reference": not Backend.parse(spec.reference.backend).is_url,
        "candidate": not Backend.parse(spec.candidate.backend).is_url,
    }
    compared = [(p, _divergence(p, floor, limit, started)) for p in pairs]
    differing = [(p, divergence) for p, divergence in compared if divergence]
    kinds = [divergence.kind for _, divergence in differing]
    apart = kinds.count("apart")
    decision = decide_share(
        apart,
        len(pairs),
        spec.policy.greedy_margin,
        spec.policy.alpha,
        items="greedy texts",
        bad_clause="differ by more than noise",
    )
    verdict, why = _verdict(decision, pairs, started)
    if erratic:
        why = f"The reference is erratic: {_erratic_words(floors, erratic)} {why}"
        verdict = (
            "inconclusive" if verdict == "pass" or len(erratic) > spec.policy.greedy_margin * len(floors) else verdict
        )
    over = EnvelopeTexts(envelope, floor, limit, spec)
    steadily = len(erratic) <= spec.policy.greedy_margin * len(floors) and all(
        is_finite(p.reference.tokens) for p in pairs
    )
    alone, (verdict, why) = verdict, over.combined(verdict, why, trusted=steadily)
    tests = [p_not_above(apart, len(pairs), spec.policy.greedy_margin)] * bool(pairs) + [over.p] * bool(envelope)
    first = min((divergence.position for _, divergence in differing), default=None)
    source = f"declared noise {' and '.join(declared)}" if declared else "rounding, since no other noise is declared"
    return SuiteResult(
        id="greedy",
        title="Greedy texts",
        synthetic=spec.workload.synthetic,
        verdict=verdict,
        why=f"{why} Policy: {spec.policy.line('greedy_margin')}.",
        p_regression=min(1.0, len(tests) * min(tests)) if tests else None,
        metrics=(
            Metric(
                id=_APART,
                title="texts that differ by more than noise",
                value=100 * decision.share,
                text=f"{100 * decision.share:.1f} %",
                low=100 * decision.interval.low,
                high=100 * decision.interval.high,
                bound=100 * spec.policy.greedy_margin,
                bound_is="most",
                policy=spec.policy.line("greedy_margin"),
                explain=f"{apart} of {len(pairs)} texts: at the first difference, log-odds change by more than the limit, a "
                "role's token is not among the other's best five, or a log-probability is not finite",
            ),
            Metric(
                id="close-limit",
                title="limit of the log-odds' change",
                value=limit,
                text=f"{limit:.2g} nats",
                explain=f"{FLOOR_FACTOR:g} times the floor"
                if limit > swing_limit(declared)
                else f"What is explained by {source}",
            ),
            Metric(
                id="texts-equal",
                title="texts equal",
                value=float(len(pairs) - len(differing)),
                text=f"{len(pairs) - len(differing)} of {len(pairs)}",
                explain=f"{kinds.count('tie')} differ first at a tie, {kinds.count('close')} within the limit"
                + ("" if first is None else f"; earliest difference at token {first}"),
            ),
            Metric(
                id="reference-floor",
                title="reference's own floor",
                value=floor if floors else None,
                text=f"{floor:.2g} nats" if floors else "not measured",
                explain=f"Largest change of log-odds of the reference asked twice, over {len(floors)} prompts, "
                f"{len(erratic)} of them erratic and left out",
            ),
            *over.metrics,
        ),
        decided_by=_APART if verdict == alone else METRIC,
        divergences=tuple(_row(p, divergence) for p, divergence in (*differing, *over.divergences)),
    )


def erratic_reference(
    pairs: Sequence[Pair], answers: Sequence[Answer], noise: Sequence[str], reproduce: str
) -> Finding | None:
    """Make the finding that the reference, asked again, answers differently by more than noise; None if it does not.

    Args:
        pairs: greedy answers of both roles.
        answers: all answers.
        noise: noise families that the roles declare.
        reproduce: the command that repeats the run.
    """
    floors = _floors(pairs, answers)
    _, erratic = _steady(floors, swing_limit([name for name in noise if name]))
    if not erratic:
        return None
    return Finding(
        id="reference-erratic",
        title="erratic reference",
        severity="warning",
        where="the reference's greedy texts",
        diagnosis=f"The reference is erratic: {_erratic_words(floors, erratic)}",
        evidence=(f"changes in nats, the largest first: {', '.join(f'{one:.2g}' for one in sorted(erratic)[:-6:-1])}",),
        reproduce=reproduce,
    )


def _floors(pairs: Sequence[Pair], answers: Sequence[Answer]) -> list[float]:
    """Compute the differences between the reference's two answers, in nats, by prompt that it was asked twice."""
    again = {a.item: a for a in answers if a.suite == "greedy" and a.role == "reference" and a.repeat > 0}
    return [floor_between(p.reference.tokens, again[p.item.id].tokens) for p in pairs if p.item.id in again]


def _erratic_words(floors: Sequence[float], erratic: Sequence[float]) -> str:
    return (
        f"asked again, {len(erratic)} of {len(floors)} of its answers changed by up to {max(erratic):.2g} nats, beyond what noise "
        f"and {FLOOR_FACTOR:g} times their median explain."
    )


def _steady(floors: Sequence[float], explained: float) -> tuple[list[float], list[float]]:
    """Split the floors, in nats, into those of prompts that may set a limit, and those of an erratic reference, which may not.

    Erratic is what exceeds `FLOOR_FACTOR` times the median, which a few answers do not move, and what noise explains; no floor
    raises the limit beyond `MAX_SWING`.
    """
    usual = min(FLOOR_FACTOR * median(floors), MAX_SWING / FLOOR_FACTOR) if floors else 0.0
    most = max(explained, usual)
    return [floor for floor in floors if floor <= most], [floor for floor in floors if floor > most]


def _told(answer: Answer, started: Mapping[Role, bool]) -> bool:
    """Return True if an answer came with its log-probabilities.

    From a server that assay started, one that is not finite is the candidate's doing; an endpoint may leave them out, or fill
    them with anything.
    """
    return answer.text == "" or (bool(answer.tokens) and (started[answer.role] or is_finite(answer.tokens)))


def _divergence(pair: Pair, floor: float, limit: float, started: Mapping[Role, bool]) -> TextDivergence | None:
    """Classify how two texts differ.

    The texts are believed over their tokens; equal ones differ only where both have log-probabilities.
    """
    equal = pair.reference.text == pair.candidate.text
    if equal and not all(_told(answer, started) for answer in (pair.reference, pair.candidate)):
        return None
    found = compare_text(pair.reference.tokens, pair.candidate.tokens, floor, limit)
    if found is None and not equal:
        return TextDivergence(kind="apart", position=0, gap=None)
    return found


def _verdict(decision: ShareDecision, pairs: Sequence[Pair], started: Mapping[Role, bool]) -> tuple[Verdict, str]:
    """Decide on the share of texts apart, unless the reference is broken or too few prompts were asked."""
    broken = sum(not is_finite(p.reference.tokens) for p in pairs)
    if broken:
        why = f"The reference's own log-probabilities are not finite in {broken} of {len(pairs)} texts, so nothing can be compared."
        return "inconclusive", why
    untold = sum(not _told(one, started) for pair in pairs for one in (pair.reference, pair.candidate))
    if decision.verdict == "pass" and untold:
        lack = f"{untold} of {2 * len(pairs)} answers came without log-probabilities"
        why = f"{lack}, or without finite ones; use a server that gives them."
        return "inconclusive", why
    if decision.verdict == "pass" and len(pairs) < MIN_PROMPTS:
        why = f"{len(pairs)} distinct prompts were answered; at least {MIN_PROMPTS} are needed for a pass (--greedy-prompts)."
        return "inconclusive", why
    return decision.verdict, decision.why


def _row(pair: Pair, divergence: TextDivergence) -> DivergenceRow:
    return DivergenceRow(
        **dict(divergence),
        item=pair.item.id,
        prompt=pair.item.prompt,
        reference_text=pair.reference.text,
        candidate_text=pair.candidate.text,
        candidate_cached_tokens=pair.candidate.cached_tokens,
    )
