"""Greedy texts of both roles -> the suite ``greedy``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from assay.harness.evidence.records import Answer
from assay.harness.judge.answers import Pair
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_texts import TextDivergence, compare_text, floor_between, is_finite
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.noise_limits import MAX_SWING, swing_limit
from assay.harness.judge.report import DivergenceRow, SuiteResult
from assay.harness.policy import Policy
from assay.harness.sides import Role
from assay.harness.statement import Statement, state
from assay.harness.stats.share import clopper_pearson, p_not_above
from assay.harness.verdict import Finding, Verdict

MIN_PROMPTS = 128
"""Fewer prompts cannot pass. With 128 and a margin of 10 %, up to 6 diverging texts pass: a candidate with 2 % of texts apart
passes in 98.5 % of runs, one with 10 % apart in 2.3 % (``python benchmarks/logit_verdicts.py``)."""
# The limit of "close" is at least this multiple of the reference's own floor, which is the largest over fewer prompts.
_FLOOR_FACTOR = 3.0
_APART, _OVER_ENVELOPE = "texts-apart", "envelope-texts-apart"


def claim(run: RunEvidence) -> Judged:
    """Judge if few enough texts differ by more than noise, by the policy's greedy margin. Ties and close texts do not count.

    The limit of "close" is the larger of the change that the declared noise explains and `_FLOOR_FACTOR` times the reference's
    floor, which erratic answers do not raise: they rule out a pass, and if their share exceeds the margin a regression too. Fewer
    than `MIN_PROMPTS` distinct prompts cannot pass; a regression is exact for any number. The answers to requests at required
    lengths are tested separately (`_with_envelope`), with the same limit; the p value combines both tests, by Bonferroni.
    """
    policy, margin = run.spec.policy, run.spec.policy.greedy_margin
    if not run.pairings["greedy"].pairs:
        return Judged()
    pairs, envelope = _comparable(run.pairings["greedy"].pairs), run.over_envelope
    limit = _limit_of(_floors(pairs, run.answers), [name for name in run.noise if name])
    differing = [(pair, parted) for pair in pairs if (parted := _divergence(pair, limit, run.urls))]
    apart = sum(divergence.kind == "apart" for _, divergence in differing)
    alone, decided = _verdict(apart, pairs, policy, run.urls)
    steady = len(limit.erratic) <= margin * len(limit.floors)
    why: Sequence[Statement] = [decided]
    if limit.erratic:
        why = [_state_erratic(limit), decided]
        alone = "inconclusive" if alone == "pass" or not steady else alone
    over, beyond = _compare_envelope(envelope, limit.floor, limit.nats)
    trusted = steady and all(is_finite(pair.reference.tokens) for pair in pairs)
    verdict, why = _with_envelope(alone, why, envelope, beyond, policy, trusted=trusted)
    tests = [p_not_above(bad, len(of), margin) for bad, of in ((apart, pairs), (len(beyond), envelope)) if of]
    suite = SuiteResult(
        id="greedy",
        synthetic=run.spec.workload.synthetic,
        verdict=verdict,
        why=(*why, state("policy", lines=[policy.line("greedy_margin")])),
        p_regression=min(1.0, len(tests) * min(tests)) if tests else None,
        metrics=tuple(_metrics(policy, apart, len(pairs), limit, len(beyond), len(envelope))),
        decided_by=_APART if verdict == alone else _OVER_ENVELOPE,
        divergences=tuple(_row(pair, divergence) for pair, divergence in (*differing, *over)),
    )
    return Judged(suite=suite, findings=_erratic_reference(limit, run.manifest.command))


def texts_apart(pairs: Sequence[Pair], answers: Sequence[Answer], noise: Sequence[str]) -> tuple[int, int]:
    """Count the texts that differ by more than noise, and all that were compared, as `claim` does.

    Args:
        pairs: both roles' answers.
        answers: with the reference's second ones, for its floor.
        noise: noise families that both roles declare.
    """
    compared = _comparable(pairs)
    limit = _limit_of(_floors(compared, answers), [name for name in noise if name])
    parted = [_divergence(pair, limit, ()) for pair in compared]
    return sum(each is not None and each.kind == "apart" for each in parted), len(compared)


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
        declared: the noise families that explain it.
        floors: the differences between the reference's two answers, in nats, for each prompt that it was asked twice.
        floor: the largest of them that may set a limit, or 0.
        erratic: those that may not.
    """

    nats: float
    declared: Sequence[str]
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
    erratic = [each for each in floors if each > most]
    return _Limit(max(explained, _FLOOR_FACTOR * floor), declared, floors, floor, erratic)


def _metrics(policy: Policy, apart: int, n: int, limit: _Limit, beyond: int, envelope: int) -> Iterator[Metric]:
    share = clopper_pearson(apart, n, 2 * policy.alpha)
    yield measure(
        _APART, 100 * apart / n if n else 0.0, low=100 * share.low, high=100 * share.high, bound=100 * policy.greedy_margin,
        policy=policy.line("greedy_margin"), apart=apart, texts=n,
    )  # fmt: skip
    by_floor = limit.nats > swing_limit(limit.declared)
    yield measure("close-limit", limit.nats, factor=_FLOOR_FACTOR if by_floor else None, declared=limit.declared)
    floor = limit.floor if limit.floors else None
    yield measure("reference-floor", floor, prompts=len(limit.floors), erratic=len(limit.erratic))
    if envelope:
        yield measure(_OVER_ENVELOPE, float(beyond), bound=0.0, answers=envelope)


def _comparable(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """List the first pair of each prompt, except those where neither role says anything, since nothing was compared."""
    asked = list({pair.item.prompt_hash: pair for pair in reversed(pairs)}.values())[::-1]
    return [pair for pair in asked if any(a.text or a.tokens for a in (pair.reference, pair.candidate))]


def _erratic_reference(limit: _Limit, reproduce: str) -> list[Finding]:
    """Make the finding that the reference, asked again, answers differently by more than noise."""
    if not limit.erratic:
        return []
    return [
        Finding(
            id="reference-erratic",
            title="erratic reference",
            severity="warning",
            where="the reference's greedy texts",
            claim=_state_erratic(limit),
            shown_by=(state("largest-changes", nats=sorted(limit.erratic)[:-6:-1]),),
            reproduce=reproduce,
        )
    ]


def _floors(pairs: Sequence[Pair], answers: Sequence[Answer]) -> list[float]:
    """Compute the differences between the reference's two answers, in nats, for each prompt that it was asked twice."""
    again = {a.item: a for a in answers if a.suite == "greedy" and a.role == "reference" and a.repeat > 0}
    return [floor_between(p.reference.tokens, again[p.item.id].tokens) for p in pairs if p.item.id in again]


def _state_erratic(limit: _Limit) -> Statement:
    return state(
        "reference-erratic", erratic=len(limit.erratic), answers=len(limit.floors), largest=max(limit.erratic), factor=_FLOOR_FACTOR
    )  # fmt: skip


def _has_tokens(answer: Answer, urls: Collection[Role]) -> bool:
    """Return True if an answer came with its log-probabilities."""
    return answer.text == "" or (bool(answer.tokens) and (answer.role not in urls or is_finite(answer.tokens)))


def _divergence(pair: Pair, limit: _Limit, urls: Collection[Role]) -> TextDivergence | None:
    """Classify the difference of two texts. The texts count more than their tokens, which an endpoint may fill with anything."""
    equal = pair.reference.text == pair.candidate.text
    if equal and not all(_has_tokens(answer, urls) for answer in (pair.reference, pair.candidate)):
        return None
    divergence = compare_text(pair.reference.tokens, pair.candidate.tokens, limit.floor, limit.nats)
    if divergence is None and not equal:
        return TextDivergence(kind="apart", position=0, gap=None)
    return divergence


def _verdict(apart: int, pairs: Sequence[Pair], policy: Policy, urls: Collection[Role]) -> tuple[Verdict, Statement]:
    """Decide on the share of texts apart, unless the reference is broken or too few prompts were asked."""
    n, margin = len(pairs), policy.greedy_margin
    if not n:
        return "inconclusive", state("no-texts-compared")
    if broken := sum(not is_finite(pair.reference.tokens) for pair in pairs):
        return "inconclusive", state("reference-texts-not-finite", broken=broken, texts=n)
    verdict, share = decide_share(apart, n, margin, policy.alpha), clopper_pearson(apart, n, 2 * policy.alpha)
    bare = sum(not _has_tokens(answer, urls) for pair in pairs for answer in (pair.reference, pair.candidate))
    if verdict == "pass" and bare:
        return "inconclusive", state("log-probabilities-lacking", bare=bare, answers=2 * n)
    if verdict == "pass" and n < MIN_PROMPTS:
        return "inconclusive", state("too-few-texts", prompts=n, least=MIN_PROMPTS)
    return verdict, state(
        "share-of-texts-apart", apart=apart, texts=n, low=share.low, high=share.high, level=share.level, margin=margin,
        verdict=verdict,
    )  # fmt: skip


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
    """List the pairs whose texts diverge, and those beyond the limit, also in log-probabilities of equal tokens."""
    compared = [(pair, compare_text(pair.reference.tokens, pair.candidate.tokens, floor, limit)) for pair in pairs]
    divergences = [(pair, divergence) for pair, divergence in compared if divergence is not None]
    apart = {pair.item.id for pair, divergence in divergences if divergence.kind == "apart"}
    return divergences, [
        pair
        for pair in pairs
        if pair.item.id in apart or floor_between(pair.reference.tokens, pair.candidate.tokens) > limit
    ]


# Each request at a required length represents other lengths, so a single one that differs by more than noise rules out a pass; a
# share that is shown to be above the policy's greedy margin is a regression.
def _with_envelope(
    verdict: Verdict, why: Sequence[Statement], pairs: Sequence[Pair], beyond: Sequence[Pair], policy: Policy, *, trusted: bool
) -> tuple[Verdict, Sequence[Statement]]:  # fmt: skip
    """Combine the verdict on texts with that on required lengths; `trusted`: the reference's own answers are steady and finite."""
    if not beyond:
        return verdict, why
    apart = state("envelope-answers-apart", apart=[pair.item.id for pair in beyond], answers=len(pairs))
    share = decide_share(len(beyond), len(pairs), policy.greedy_margin, policy.alpha)
    if share == "regression" and trusted and all(is_finite(pair.reference.tokens) for pair in pairs):
        return "regression", (apart, *why)
    return ("regression", (*why, apart)) if verdict == "regression" else ("inconclusive", (apart, *why))
