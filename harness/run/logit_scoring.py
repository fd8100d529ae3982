"""Both roles' log-probabilities of the reference's own tokens, teacher-forced.

A free-running answer says little once it differs from the reference's. Here both roles read the same tokens, the prompt and the
reference's greedy answer, and predict each of them. All of it is computed in the extend phase (engines score a prompt in one
pass), so this does not test a decode kernel.

A server scores its sequences one at a time, so that both roles form the same batches, and twice each: *cold*, on an emptied
cache, and *cached*, after the prompt's beginning, when all but the scored positions come from the prefix cache. The two
conditions score the same positions: the last `_PROMPT_TAIL` tokens of the prompt and the answer, except the first
`CACHED_PREFIX_TOKENS` + 1 tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.engines.base import Engine, Generation, Score
from assay.harness.engines.generation import generate
from assay.harness.errors import EvidenceError
from assay.harness.evidence.logit_files import (
    CACHE_STATES,
    CacheState,
    Floats,
    Ints,
    Logits,
    LogitsHeader,
    Positions,
    ScoredSequence,
    logits_path,
    read_logits,
    write_logits,
)
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item
from assay.harness.progress import ProgressDisplay
from assay.harness.sides import Role

# Tokens at the end of a prompt that are scored too, since answers may have only a few tokens.
_PROMPT_TAIL = 16
# Tokens of the reference's distribution to distinguish: the most that OpenAI-compatible servers return.
_TOP_K = 20
# Most tokens of an answer to score: with the prompt's, some 30 positions of each sequence.
_MAX_ANSWER_TOKENS = 16
# Answers generated at the same time; only scoring needs batches of one.
_GENERATED_AT_ONCE = 16
# The reference scores every second sequence again, instead of waiting for the candidate.
_FLOOR_EVERY = 2

_Sequence = tuple[ScoredSequence, tuple[int, ...]]


# The scorings, role and repeat, in this order: the candidate's and the floor's are at the reference's most probable tokens.
SCORINGS: tuple[tuple[Role, int], ...] = (("reference", 0), ("reference", FLOOR_REPEAT), ("candidate", 0))


def score(
    server: Engine, items: Sequence[Item], answers: Sequence[Answer], folder: Path, display: ProgressDisplay,
    role: Role, repeat: int = 0, run: str = "",
) -> None:  # fmt: skip
    """Score the reference's tokens on a server, and write the result to the run's folder.

    Args:
        server: a running server, which may be the other role's with substitution; its cache is flushed.
        answers: recorded answers; the reference's greedy ones (repeat 0) are compared, token by token, with its answers now.
        repeat: for the reference's floor, some sequences are scored again, in the opposite order.
        run: nonce of the run.

    Raises:
        EngineError: the server failed.
        EvidenceError: the reference was not scored before, an answer was recorded for another prompt, or the folder cannot be
            written.
    """
    title = f"{role}: logits{' again' if repeat else ''}"
    if (role, repeat) == SCORINGS[0]:
        scored = []
        sequences = _generate_answers(server, items, answers)
        for sequence, ids in sequences:
            scores = _score_one(server, sequence, ids, {})
            scored.append(_Scored(sequence, ids, scores, {c: own.top_ids for c, own in scores.items()}))
            display.count(title, len(scored), len(sequences))
    else:
        reference = _scored_reference(folder, role, run)
        if repeat:
            reference = reference.only(range(0, len(reference.header.sequences), _FLOOR_EVERY))
        scored = _score_again(server, reference, bool(repeat), display, title)
    write_logits(folder, _logits(server, scored, role, repeat, run))


@dataclass(frozen=True)
class _Scored:
    """A sequence, and its scores under each condition at the reference's most probable tokens, int32 [positions, k]."""

    sequence: ScoredSequence
    ids: tuple[int, ...]
    scores: Mapping[CacheState, Score]
    top_ids: Mapping[CacheState, Ints]


def _score_again(
    server: Engine, reference: Logits, backwards: bool, display: ProgressDisplay, title: str
) -> list[_Scored]:
    """Score the sequences of a reference, at its most probable tokens."""
    scored = []
    numbers = range(len(reference.header.sequences))
    for index in reversed(numbers) if backwards else numbers:
        sequence, ids, rows = reference.header.sequences[index], reference.ids_of(index), reference.rows_of(index)
        top_ids = {c: positions.top_ids[rows] for c, positions in reference.by_condition.items()}
        scored.append(_Scored(sequence, ids, _score_one(server, sequence, ids, top_ids), top_ids))
        display.count(title, len(scored), len(numbers))
    return scored[::-1] if backwards else scored


def _score_one(
    server: Engine, sequence: ScoredSequence, ids: tuple[int, ...], top_ids: Mapping[CacheState, Ints]
) -> dict[CacheState, Score]:
    """Score a sequence with an empty cache, and then with its start cached."""
    scores = {}
    for condition in CACHE_STATES:
        server.flush_cache()
        if condition == "cached" and sequence.start > 1:
            server.score(ids[: sequence.start], sequence.start - 2, 1)
        # An engine takes one list of ids for a sequence: the union of the reference's top ids over its positions, ascending.
        at = tuple(np.unique(top_ids[condition]).tolist()) if condition in top_ids else ()
        scores[condition] = server.score(ids, sequence.start, _TOP_K, at)
    return scores


def score_again(server: Engine, reference: Logits, run: str, display: ProgressDisplay, title: str) -> Logits:
    """Score the sequences of a reference on another server, at its most probable tokens. Nothing is written."""
    scored = _score_again(server, reference, False, display, title)
    return _logits(server, scored, "candidate", 0, run)


def _logits(server: Engine, scored: Sequence[_Scored], role: Role, repeat: int, run: str) -> Logits:
    header = LogitsHeader(
        run=run,
        role=role,
        repeat=repeat,
        backend=server.backend,
        engine=server.label,
        top_k=_TOP_K,
        sequences=tuple(
            each.sequence.model_copy(update={"cached": {c: score.cached_tokens for c, score in each.scores.items()}})
            for each in scored
        ),
    )
    ids = np.concatenate([np.array(each.ids, dtype=np.int32) for each in scored])
    return Logits(header, ids, {c: _positions(c, scored) for c in CACHE_STATES})


def _scored_reference(folder: Path, role: Role, run: str) -> Logits:
    path = logits_path(folder, "reference", 0)
    if not path.exists():
        raise EvidenceError(
            f"The {role} cannot be scored: {path} does not exist.",
            "the reference's own tokens, scored first",
            "score the reference before the candidate",
        )
    return read_logits(path, run)


def _generate_answers(server: Engine, items: Sequence[Item], answers: Sequence[Answer]) -> list[_Sequence]:
    """Generate the sequences: each prompt with the reference's greedy answer.

    A record has texts but no ids, so the answer is generated again, and cut where it differs from the recorded one.
    """
    if not items:
        raise EvidenceError(
            "The run has no prompt to score.", "at least one item", "set logits_prompts in assay.toml to at least 1"
        )
    recorded = {a.item: a for a in answers if (a.suite, a.role, a.repeat) == ("greedy", "reference", 0)}

    def begin(item: Item) -> Generation:
        answer = recorded.get(item.id)
        most = min(answer.completion_tokens, _MAX_ANSWER_TOKENS) if answer else _MAX_ANSWER_TOKENS
        return generate(server, item.prompt, most)

    with ThreadPoolExecutor(_GENERATED_AT_ONCE) as pool:
        return [
            _sequence(item, recorded.get(item.id), generated)
            for item, generated in zip(items, pool.map(begin, items), strict=True)
        ]


def _sequence(item: Item, answer: Answer | None, generated: Generation) -> _Sequence:
    """Join a prompt and its generated answer, as far as the answer equals the recorded one."""
    prompt = len(generated.prompt_ids)
    if answer and answer.prompt_tokens != prompt:
        raise EvidenceError(
            f"The prompt of the recorded answer to {item.id} had {answer.prompt_tokens} tokens; it has {prompt} now.",
            "the same prompt, template and tokenizer",
            "choose a new folder with --out",
        )
    ids = (*generated.prompt_ids, *generated.ids[: _shared(answer, generated)])
    start = max(0, min(max(prompt - 1 - _PROMPT_TAIL, CACHED_PREFIX_TOKENS), len(ids) - 2))
    return ScoredSequence(item=item.id, prompt_tokens=prompt, length=len(ids), start=start, cached={}), ids


def _shared(answer: Answer | None, generated: Generation) -> int:
    """Count the leading tokens that equal the recorded ones."""
    if answer is None:
        return len(generated.ids)
    texts = [token.text for token in answer.tokens]
    parting = [i for i, (own, other) in enumerate(zip(texts, generated.texts, strict=False)) if own != other]
    return parting[0] if parting else min(len(texts), len(generated.texts))


def _positions(condition: CacheState, scored: Sequence[_Scored]) -> Positions:
    """Return the log-probabilities of all sequences at the reference's most probable tokens."""
    scores = [each.scores[condition] for each in scored]
    return Positions(
        token=np.concatenate([score.token for score in scores]),
        best=np.concatenate([score.top_ids[:, 0] for score in scores]),
        top_ids=np.concatenate([each.top_ids[condition] for each in scored]),
        logprobs=np.concatenate([_at(each.scores[condition], each.top_ids[condition]) for each in scored]),
    )


def _at(score: Score, top_ids: Ints) -> Floats:
    """Return a sequence's log-probabilities at the reference's most probable tokens: its own top ones, or the requested ones."""
    if score.top_ids is top_ids:
        return score.top
    return np.take_along_axis(score.at, np.searchsorted(np.unique(top_ids), top_ids), axis=1)
