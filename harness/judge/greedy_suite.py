"""Greedy texts of both roles -> the suite ``greedy``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from assay.harness.evidence.records import Answer
from assay.harness.judge.answers import Pair
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_texts import TextDivergence, compare_text, floor_between, is_finite
from assay.harness.judge.judgement import Metric
from assay.harness.judge.noise_limits import MAX_SWING, explained_by, swing_limit
from assay.harness.judge.report import DivergenceRow, SuiteResult
from assay.harness.policy import Policy
from assay.harness.sides import Role
from assay.harness.stats.share import clopper_pearson, p_not_above
from assay.harness.text import few
from assay.harness.verdict import Finding, Verdict

MIN_PROMPTS = 128
"""Fewer prompts give no pass. With 128 and a margin of 10 %, up to 6 texts apart pass: a candidate of which 2 % are apart passes in
98.5 % of runs, and one of which 10 % are apart in 2.3 % (``python benchmarks/logit_verdicts.py``)."""
# The limit of "close" is at least this multiple of the reference's own floor, which is the largest over fewer prompts.
_FLOOR_FACTOR = 3.0
_MOST_NAMED = 4
_APART, _OVER_ENVELOPE = "texts-apart", "envelope-texts-apart"


def claim(run: RunEvidence) -> Judged:
    """Judge if few enough texts differ by more than noise, by the policy's greedy margin. Ties and close texts do not count.

    The limit of "close" is the larger of what the declared noise explains and `_FLOOR_FACTOR` times the reference's floor, which
    erratic answers do not raise: they rule out a pass, and where they are a larger share than the margin a regression too. Fewer
    than `MIN_PROMPTS` distinct prompts cannot pass; a regression is exact for any number. The answers to the envelope's requests
    are tested apart (`_with_envelope`), with the same limit; the p value is that of both tests, by Bonferroni.
    """
    policy, margin = run.spec.policy, run.spec.policy.greedy_margin
    if not run.pairings["greedy"].pairs:
        return Judged()
    pairs, envelope = _comparable(run.pairings["greedy"].pairs), run.over_envelope
    limit = _limit_of(_floors(pairs, run.answers), [name for name in run.noise if name])
    differing = [(pair, parted) for pair in pairs if (parted := _divergence(pair, limit, run.urls))]
    apart = sum(divergence.kind == "apart" for _, divergence in differing)
    alone, why = _verdict(apart, pairs, policy, run.urls)
    steady = len(limit.erratic) <= margin * len(limit.floors)
    if limit.erratic:
        why = f"{_erratic_words(limit)} {why}"
        alone = "inconclusive" if alone == "pass" or not steady else alone
    over, beyond = _compare_envelope(envelope, limit.floor, limit.nats)
    trusted = steady and all(is_finite(pair.reference.tokens) for pair in pairs)
    verdict, why = _with_envelope(alone, why, envelope, beyond, policy, trusted=trusted)
    tests = [p_not_above(bad, len(of), margin) for bad, of in ((apart, pairs), (len(beyond), envelope)) if of]
    suite = SuiteResult(
        id="greedy",
        synthetic=run.spec.workload.synthetic,
        verdict=verdict,
        why=f"{why} Policy: {policy.line('greedy_margin')}.",
        p_regression=min(1.0, len(tests) * min(tests)) if tests else None,
        metrics=tuple(_metrics(policy, apart, len(pairs), limit, len(beyond), len(envelope))),
        decided_by=_APART if verdict == alone else _OVER_ENVELOPE,
        divergences=tuple(_row(pair, divergence) for pair, divergence in (*differing, *over)),
    )
    return Judged(suite=suite, findings=_erratic_reference(limit, run.manifest.command))


def decide_share(bad: int, n: int, limit: float, alpha: float) -> Verdict:
    """Decide by the share of bad items, with one-sided Clopper-Pearson bounds of level ``1 - alpha``.

    The lower one above the limit is a regression, the upper one within it a pass, anything else inconclusive.
    """
    share = clopper_pearson(bad, n, 2 * alpha)
    return "pass" if share.high <= limit else "regression" if share.low > limit else "inconclusive"


@dataclass(frozen=True)
class _Limit:
    """The limit of "close", from the declared noise and the reference's own floor.

    Attributes:
        nats: the limit.
        source: where it comes from.
        floors: the differences between the reference's two answers, in nats, by prompt that it was asked twice.
        floor: the largest of them that may set a limit; 0 for none.
        erratic: those that may not.
    """

    nats: float
    source: str
    floors: Sequence[float]
    floor: float
    erratic: Sequence[float]


def _limit_of(floors: Sequence[float], declared: Sequence[str]) -> _Limit:
    """Set the limit. What exceeds both noise and `_FLOOR_FACTOR` times the median of the floors is erratic and raises nothing."""
    explained = swing_limit(declared)
    # A few erratic answers do not move the median, and no floor raises the limit beyond `MAX_SWING`.
    usual = min(_FLOOR_FACTOR * median(floors), MAX_SWING / _FLOOR_FACTOR) if floors else 0.0
    most = max(explained, usual)
    floor = max((each for each in floors if each <= most), default=0.0)
    source = (
        f"{_FLOOR_FACTOR:g} times the floor"
        if _FLOOR_FACTOR * floor > explained
        else f"What is explained by {explained_by(declared)}"
    )
    erratic = [each for each in floors if each > most]
    return _Limit(max(explained, _FLOOR_FACTOR * floor), source, floors, floor, erratic)


def _metrics(policy: Policy, apart: int, n: int, limit: _Limit, beyond: int, envelope: int) -> Iterator[Metric]:
    share = clopper_pearson(apart, n, 2 * policy.alpha)
    yield Metric(
        id=_APART,
        title="texts that differ by more than noise",
        value=100 * apart / n if n else 0.0,
        text=f"{100 * apart / n if n else 0.0:.1f} %",
        low=100 * share.low,
        high=100 * share.high,
        bound=100 * policy.greedy_margin,
        policy=policy.line("greedy_margin"),
        explain=f"{apart} of {n} texts: at the first difference, log-odds change by more than the limit, a token is not among "
        "the other's best five, or a log-probability is not finite",
    )
    yield Metric(
        id="close-limit",
        title="limit of the log-odds' change",
        value=limit.nats,
        text=f"{limit.nats:.2g} nats",
        explain=limit.source,
    )
    yield Metric(
        id="reference-floor",
        title="reference's own floor",
        value=limit.floor if limit.floors else None,
        text=f"{limit.floor:.2g} nats" if limit.floors else "not measured",
        explain=f"Largest change of log-odds of the reference asked twice, over {len(limit.floors)} prompts, "
        f"{len(limit.erratic)} of them erratic and left out",
    )
    if envelope:
        yield Metric(
            id=_OVER_ENVELOPE,
            title="answers over the envelope that differ by more than noise",
            value=float(beyond),
            text=f"{beyond} of {envelope}",
            bound=0.0,
            explain="Equal tokens are compared by their log-probabilities",
        )


def _comparable(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """List the first pair of each prompt. Where neither role says anything, nothing was compared."""
    asked = list({pair.item.prompt_hash: pair for pair in reversed(pairs)}.values())[::-1]
    return [pair for pair in asked if any(a.text or a.tokens for a in (pair.reference, pair.candidate))]


def _erratic_reference(limit: _Limit, reproduce: str) -> list[Finding]:
    """Make the finding that the reference, asked again, answers differently by more than noise."""
    if not limit.erratic:
        return []
    largest = ", ".join(f"{nats:.2g}" for nats in sorted(limit.erratic)[:-6:-1])
    return [
        Finding(
            id="reference-erratic",
            title="erratic reference",
            severity="warning",
            where="the reference's greedy texts",
            diagnosis=_erratic_words(limit),
            evidence=(f"changes in nats, the largest first: {largest}",),
            reproduce=reproduce,
        )
    ]


def _floors(pairs: Sequence[Pair], answers: Sequence[Answer]) -> list[float]:
    """Compute the differences between the reference's two answers, in nats, by prompt that it was asked twice."""
    again = {a.item: a for a in answers if a.suite == "greedy" and a.role == "reference" and a.repeat > 0}
    return [floor_between(p.reference.tokens, again[p.item.id].tokens) for p in pairs if p.item.id in again]


def _erratic_words(limit: _Limit) -> str:
    return (
        f"The reference is erratic: asked again, {len(limit.erratic)} of {len(limit.floors)} of its answers changed by up to "
        f"{max(limit.erratic):.2g} nats, beyond what noise and {_FLOOR_FACTOR:g} times their median explain."
    )


def _has_tokens(answer: Answer, urls: Collection[Role]) -> bool:
    """Return True if an answer came with its log-probabilities."""
    return answer.text == "" or (bool(answer.tokens) and (answer.role not in urls or is_finite(answer.tokens)))


def _divergence(pair: Pair, limit: _Limit, urls: Collection[Role]) -> TextDivergence | None:
    """Classify how two texts differ. The texts are believed over their tokens, which an endpoint may fill with anything."""
    equal = pair.reference.text == pair.candidate.text
    if equal and not all(_has_tokens(answer, urls) for answer in (pair.reference, pair.candidate)):
        return None
    divergence = compare_text(pair.reference.tokens, pair.candidate.tokens, limit.floor, limit.nats)
    if divergence is None and not equal:
        return TextDivergence(kind="apart", position=0, gap=None)
    return divergence


def _verdict(apart: int, pairs: Sequence[Pair], policy: Policy, urls: Collection[Role]) -> tuple[Verdict, str]:
    """Decide on the share of texts apart, unless the reference is broken or too few prompts were asked."""
    n, margin = len(pairs), policy.greedy_margin
    if not n:
        return "inconclusive", "Nothing was compared: there are no greedy texts."
    if broken := sum(not is_finite(pair.reference.tokens) for pair in pairs):
        why = f"The reference's own log-probabilities are not finite in {broken} of {n} texts, so nothing can be compared."
        return "inconclusive", why
    verdict, share = decide_share(apart, n, margin, policy.alpha), clopper_pearson(apart, n, 2 * policy.alpha)
    bare = sum(not _has_tokens(answer, urls) for pair in pairs for answer in (pair.reference, pair.candidate))
    if verdict == "pass" and bare:
        lack = f"{bare} of {2 * n} answers came without log-probabilities"
        return "inconclusive", f"{lack}, or without finite ones; use a server that gives them."
    if verdict == "pass" and n < MIN_PROMPTS:
        why = f"{n} distinct prompts were answered; at least {MIN_PROMPTS} are needed for a pass (--greedy-prompts)."
        return "inconclusive", why
    bound = {
        "pass": f", at most the limit of {margin:.1%}",
        "regression": f", above the limit of {margin:.1%}",
    }.get(
        verdict, f": neither shown to be at most the limit of {margin:.1%} nor above it; to resolve: more greedy texts"
    )
    ends = f"{share.low:.1%} to {share.high:.1%} with {share.level:.0%} confidence"
    return verdict, f"{apart} of {n} greedy texts differ by more than noise ({apart / n:.1%}; {ends}){bound}.".replace(
        "%", " %"
    )


def _row(pair: Pair, divergence: TextDivergence) -> DivergenceRow:
    return DivergenceRow(
        **dict(divergence),
        item=pair.item.id,
        prompt=pair.item.prompt,
        reference_text=pair.reference.text,
        candidate_text=pair.candidate.text,
        candidate_cached_tokens=pair.candidate.cached_tokens,
    )


def _compare_envelope(
    pairs: Sequence[Pair], floor: float, limit: float
) -> tuple[list[tuple[Pair, TextDivergence]], list[Pair]]:
    """List the pairs whose texts part, and those that differ by more than the limit, also in log-probabilities of equal tokens."""
    compared = [(pair, compare_text(pair.reference.tokens, pair.candidate.tokens, floor, limit)) for pair in pairs]
    divergences = [(pair, divergence) for pair, divergence in compared if divergence is not None]
    apart = {pair.item.id for pair, divergence in divergences if divergence.kind == "apart"}
    return divergences, [
        pair
        for pair in pairs
        if pair.item.id in apart or floor_between(pair.reference.tokens, pair.candidate.tokens) > limit
    ]


# Each request of the envelope stands for lengths of its own, so a single one that differs by more than noise rules out a pass; a
# share that is shown to be above the policy's greedy margin is a regression.
def _with_envelope(
    verdict: Verdict, why: str, pairs: Sequence[Pair], beyond: Sequence[Pair], policy: Policy, *, trusted: bool
) -> tuple[Verdict, str]:
    """Combine the verdict on texts with that on the envelope's; `trusted`: the reference's own answers are steady and finite."""
    if not beyond:
        return verdict, why
    named = few([pair.item.id for pair in beyond], _MOST_NAMED)
    said = f"{len(beyond)} of {len(pairs)} answers over the envelope differ by more than noise: {named}."
    share = decide_share(len(beyond), len(pairs), policy.greedy_margin, policy.alpha)
    if share == "regression" and trusted and all(is_finite(pair.reference.tokens) for pair in pairs):
        return "regression", f"{said} {why}"
    return ("regression", f"{why} {said}") if verdict == "regression" else ("inconclusive", f"{said} {why}")
