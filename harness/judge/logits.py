"""Distance between two roles' next-token distributions over the same tokens.

The divergence is Kullback and Leibler's, KL(reference || candidate), in nats, as llama.cpp's ``--kl-divergence`` reports it (its
PR 6936). For scale, an 8B model: Q8_0 weights 2.4e-4, Q5_K_M 4.7e-3, Q3_K_M 5.1e-2.

**The restriction.** A server gives the log-probabilities of chosen tokens, not of the entire vocabulary. Both roles are read at
the reference's k most probable tokens S; everything else is one bucket R with p(R) = 1 - p(S) and q(R) = 1 - q(S)::

    KL_k = sum over i in S of  p_i log(p_i / q_i)  +  p(R) log(p(R) / q(R))   <=   KL(p || q)

Merging outcomes never raises a divergence (log-sum inequality; Cover and Thomas, Elements of Information Theory, theorem 2.7.1),
so KL_k is a lower bound, and exact if p / q is constant outside S. The report also states the mean of p(S).

The change of the log-likelihood of the sequence's own tokens, which may be improbable ones, shows differences outside S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.errors import EvidenceError
from assay.harness.evidence.logit_files import (
    CACHE_STATES,
    MAX_COLD_TOKENS,
    CacheState,
    Logits,
    Positions,
    ScoredSequence,
)
from assay.harness.schema import Part
from assay.harness.statement import Statement, state

Array = npt.NDArray[np.float64]

# Probability below which the bucket of all other tokens is rounding error: it is one minus a sum of k float32 numbers.
_MIN_MASS = 2.0**-20


class LogitsRow(Part):
    """Both roles' next-token distributions under one condition, over the reference's own tokens.

    Mean, percentiles, maximum and shares are over the finite positions, or None without any.
    """

    condition: str = Field(description='"cold" or "cached"; the phase is always extend')
    positions: int = Field(description="scored tokens, including those that are not finite")
    sequences: int
    mean_kl: float | None = Field(description="KL_k(reference || candidate), in nats, as are the next four")
    median: float | None
    p99: float | None
    p999: float | None
    max: float | None
    max_at: str = Field("", description="item and token of the maximum")
    same_top: float | None = Field(
        description="share of positions at which both roles' most probable token is the same"
    )
    top_k: int = Field(description="the reference's most probable tokens that are compared; all others are one bucket")
    mass: float | None = Field(None, description="mean probability that the reference gives them")
    nonfinite: int = Field(0, description="positions with a log-probability that is not finite; in no other number")
    reference_nonfinite: int = Field(0, description="those of them at which the reference's is not")
    floor_mean_kl: float | None = Field(
        None, description="mean KL_k of the reference against itself, or null if it was scored once"
    )


@dataclass(frozen=True)
class PromptMeans:
    """Means over each prompt's positions under one condition, in nats. A prompt without a finite position is left out.

    Attributes:
        condition: "cold" or "cached".
        kl: mean KL_k(reference || candidate), [prompts].
        change: mean change of the log-likelihood of the sequence's own tokens, candidate minus reference, [prompts].
        floor: mean KL_k of the reference against itself, [prompts that were scored twice].
    """

    condition: CacheState
    kl: Array
    change: Array
    floor: Array


@dataclass(frozen=True)
class LogitsComparison:
    """The result of teacher forcing.

    Attributes:
        rows: one for each condition under which something was compared.
        prompts: the same by prompt, in the same order.
        not_observed: conditions, or sequences of a condition, that a server did not meet, with its cached tokens.
    """

    rows: tuple[LogitsRow, ...]
    prompts: tuple[PromptMeans, ...]
    not_observed: tuple[Statement, ...]


def merged_kl(reference: npt.ArrayLike, candidate: npt.ArrayLike) -> Array:
    """Compute KL_k at each position, in nats (see the module).

    Computed as the sum of p (e^d - 1 - d) with d = log q - log p, which is the same sum if both sides add up to 1; each term
    is at least 0, so nothing cancels. A bucket of less than `_MIN_MASS` counts as that much, which can only lower the result.

    Args:
        reference: log-probabilities of the reference's k most probable tokens, [..., k].
        candidate: the candidate's log-probabilities of the same tokens, [..., k].

    Returns:
        [...]; at least 0; infinite if the candidate excludes a token; NaN if either side is.
    """
    log_p, log_q = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        inside = _terms(log_p, log_q).sum(axis=-1)
        return np.asarray(inside + _terms(_log_rest(log_p), _log_rest(log_q)))


def _terms(log_p: Array, log_q: Array) -> Array:
    change = log_q - log_p
    return np.asarray(np.exp(log_p) * np.maximum(np.expm1(change) - change, 0.0))


def _log_rest(logprobs: Array) -> Array:
    return np.asarray(np.log(np.maximum(1.0 - np.exp(logprobs).sum(axis=-1), _MIN_MASS)))


def compare_roles(reference: Logits, candidate: Logits, again: Logits | None = None) -> LogitsComparison:
    """Compare the candidate's scoring with the reference's, condition by condition.

    Sequences for which a server did not cache the tokens that the condition requires are left out, and reported.

    Args:
        again: the reference's second scoring, of some of the sequences, for the floor, if any.

    Raises:
        EvidenceError: the scorings are not of the same tokens.
    """
    _check_same(reference, candidate)
    first = reference.only(_indices(reference, again)) if again else reference
    if again:
        _check_same(first, again)
    rows, prompts, missing = [], [], []
    for condition in CACHE_STATES:
        held = _held(condition, reference, candidate)
        if len(held) < len(reference.header.sequences):
            missing.append(_not_honoured(condition, reference, candidate, held))
        if held:
            both = _Compared.of(condition, reference, candidate, held)
            twice = _held(condition, first, again) if again else []
            floor = _Compared.of(condition, first, again, twice).by_prompt(0) if again and twice else np.zeros(0)
            rows.append(_row(condition, both, reference.header.top_k, float(floor.mean()) if len(floor) else None))
            prompts.append(PromptMeans(condition, both.by_prompt(0), both.by_prompt(1), floor))
    return LogitsComparison(tuple(rows), tuple(prompts), tuple(missing))


@dataclass(frozen=True)
class _Compared:
    """Two scorings of the same tokens under one condition.

    Attributes:
        p: log-probabilities of the reference, at the positions of all sequences.
        q: those of the other scoring, likewise.
        clusters: the index of each position's sequence, [n].
        kl: KL_k, in nats, [n]; NaN where a log-probability is not finite.
    """

    sequences: tuple[ScoredSequence, ...]
    p: Positions
    q: Positions
    clusters: npt.NDArray[np.int64]
    kl: Array

    @classmethod
    def of(cls, condition: CacheState, reference: Logits, other: Logits, indices: Sequence[int]) -> _Compared:
        """Compare some sequences."""
        sequences = tuple(reference.header.sequences[i] for i in indices)
        rows = np.concatenate(
            [np.arange(s.positions) + reference.rows_of(i).start for i, s in zip(indices, sequences, strict=True)]
        )
        p, q = (scoring.by_condition[condition].at(rows) for scoring in (reference, other))
        clusters = np.repeat(np.arange(len(sequences)), [sequence.positions for sequence in sequences])
        kl = merged_kl(p.logprobs, q.logprobs)
        finite = np.isfinite(p.token) & np.isfinite(q.token) & np.isfinite(kl)
        return cls(sequences, p, q, clusters, np.where(finite, kl, math.nan))

    def by_prompt(self, of: Literal[0, 1]) -> Array:
        """Compute the mean KL_k (0), or change of the log-likelihood (1), of each sequence that has a finite position."""
        finite = np.isfinite(self.kl)
        values = self.kl if of == 0 else self.q.token.astype(np.float64) - self.p.token
        places = self.clusters[finite]
        counts = np.bincount(places, minlength=len(self.sequences))
        sums = np.bincount(places, values[finite], len(self.sequences))
        return np.asarray(sums[counts > 0] / counts[counts > 0])


def _held(condition: CacheState, reference: Logits, other: Logits) -> list[int]:
    """List the sequences for which both servers cached the tokens that the condition requires."""
    sequences = zip(reference.header.sequences, other.header.sequences, strict=True)
    return [i for i, both in enumerate(sequences) if all(sequence.honoured(condition) for sequence in both)]


def _indices(reference: Logits, again: Logits) -> list[int]:
    """Return the indices of the second scoring's sequences in the first."""
    places = {sequence.item: index for index, sequence in enumerate(reference.header.sequences)}
    if unknown := [sequence.item for sequence in again.header.sequences if sequence.item not in places]:
        raise EvidenceError(
            f"The reference (repeat {again.header.repeat}) was scored on {unknown[0]}, which its first scoring lacks.",
            "some of the same sequences",
            "remove the logits folder of the run and repeat the command",
        )
    return [places[sequence.item] for sequence in again.header.sequences]


def _check_same(reference: Logits, other: Logits) -> None:
    ours, theirs = reference.header, other.header
    shapes = [[(s.item, s.length, s.start) for s in header.sequences] for header in (ours, theirs)]
    same = shapes[0] == shapes[1] and ours.top_k == theirs.top_k and np.array_equal(reference.ids, other.ids)
    followed = all(
        np.array_equal(reference.by_condition[c].top_ids, other.by_condition[c].top_ids) for c in CACHE_STATES
    )
    if not (same and followed):
        raise EvidenceError(
            f"The {theirs.role} (repeat {theirs.repeat}) was scored on other tokens than the reference.",
            "the same token ids for both roles",
            "remove the logits folder of the run and repeat the command",
        )


def _not_honoured(condition: CacheState, reference: Logits, candidate: Logits, held: Sequence[int]) -> Statement:
    everything = range(len(reference.header.sequences))
    out = [i for i in everything if i not in set(held)]
    cached = [
        (role.header.role, min(counts), max(counts))
        for role in (reference, candidate)
        for counts in [[role.header.sequences[i].cached[condition] for i in out]]
    ]
    required = MAX_COLD_TOKENS if condition == "cold" else CACHED_PREFIX_TOKENS
    return state(
        "not-cached-as-required",
        condition=condition,
        left_out=len(out),
        sequences=len(everything),
        required=required,
        cached=cached,
    )


def _row(condition: CacheState, both: _Compared, top_k: int, floor: float | None) -> LogitsRow:
    finite, p = np.isfinite(both.kl), both.p
    kl = both.kl[finite]
    numbers: dict[str, float | None] = dict.fromkeys(("mean_kl", "median", "p99", "p999", "max", "same_top", "mass"))
    max_at = ""
    if len(kl):
        at = int(np.nanargmax(both.kl))
        numbers = {
            name: float(np.quantile(kl, share)) for name, share in (("median", 0.5), ("p99", 0.99), ("p999", 0.999))
        }
        numbers |= {"mean_kl": float(kl.mean()), "max": float(kl.max())}
        numbers["same_top"] = float((p.best == both.q.best)[finite].mean())
        numbers["mass"] = float(np.exp(p.logprobs[finite], dtype=np.float64).sum(axis=-1).mean())
        sequence = both.sequences[both.clusters[at]]
        first = int(np.argmax(both.clusters == both.clusters[at]))
        max_at = _place(sequence, sequence.start + 1 + at - first)
    return LogitsRow(
        condition=condition,
        positions=len(both.kl),
        sequences=len(both.sequences),
        max_at=max_at,
        top_k=top_k,
        nonfinite=int((~finite).sum()),
        reference_nonfinite=int((~(np.isfinite(p.token) & np.isfinite(p.logprobs).all(axis=-1))).sum()),
        floor_mean_kl=floor,
        **numbers,
    )


def _place(sequence: ScoredSequence, token: int) -> str:
    """Describe a place, for example "greedy-003, answer token 4 of 9", counted from 1."""
    prompt, answer = sequence.prompt_tokens, sequence.length - sequence.prompt_tokens
    if token < prompt:
        return f"{sequence.item}, prompt token {token + 1} of {prompt}"
    return f"{sequence.item}, answer token {token - prompt + 1} of {answer}"
