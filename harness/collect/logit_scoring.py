"""Both roles' log-probabilities over the reference's own tokens, teacher-forced.

A free-running answer says little once it differs from the reference's. Here both roles read the same tokens, the prompt and the
reference's greedy answer, and predict each of them. All of it is computed in the extend phase (SGLang scores a prompt in one
pass), so a decode kernel is not tested by it.

Sequences are scored one at a time, so that both roles form the same batches, and twice each: *cold*, on an emptied cache, and
*cached*, right after that, when all but the scored positions come from the prefix cache. The two conditions score the same
positions: the last `PROMPT_TAIL` tokens of the prompt and the answer, except the first `CACHED_PREFIX_TOKENS` + 1 tokens of a
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.engines.base import Scorer
from assay.harness.engines.score import Generation, Score, generate, score
from assay.harness.errors import EvidenceError
from assay.harness.evidence.logit_files import (
    CACHE_STATES,
    CacheState,
    Logits,
    LogitsHeader,
    Positions,
    ScoredSequence,
    logits_path,
    read_logits,
    write_logits,
)
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item, Role
from assay.harness.progress import ProgressDisplay

PROMPT_TAIL = 16
"""Tokens at the end of a prompt that are scored too, since answers may have only a few tokens."""
TOP_K = 20
"""Tokens of the reference's distribution that are distinguished: the most that OpenAI-compatible servers return."""
MAX_ANSWER_TOKENS = 48
"""Token limit of an answer that has to be generated."""


def score_role(
    server: Scorer,
    items: Sequence[Item],
    answers: Sequence[Answer],
    folder: Path,
    display: ProgressDisplay,
    role: Role | None = None,
    run: str = "",
) -> None:
    """Score the reference's tokens on a server, and write the result to the run's folder, unless it is there already.

    The reference comes first: the candidate is asked about its tokens and its most probable tokens. The reference is scored a
    second time, in the opposite order, for the floor.

    Args:
        server: a running server; its cache is flushed.
        items: the prompts.
        answers: recorded answers; the reference's greedy ones (repeat 0) are compared, token by token, with its answers now.
        folder: the run's folder.
        display: shows the progress.
        role: the role to score; None for the server's own. With substitution, one server can be both.
        run: nonce of the run.

    Raises:
        EngineError: the server failed.
        EvidenceError: the reference was not scored before the candidate, an answer was recorded to another prompt, or the folder
            cannot be written.
    """
    role = role or server.role
    if not items:
        raise EvidenceError("There is no prompt to score.", "at least one item", "set --greedy-prompts to at least 1")
    for repeat in (0, FLOOR_REPEAT) if role == "reference" else (0,):
        path = logits_path(folder, role, repeat)
        if path.exists():
            continue
        first = role == "reference" and repeat == 0
        reference = None if first else _scored_reference(folder, role)
        sequences = _generate_answers(server, items, answers) if reference is None else _recorded_sequences(reference)
        title = f"{role}: logits{' again' if repeat else ''}"
        scored = _score_all(server, sequences, reference, bool(repeat), display, title)
        header = LogitsHeader(
            run=run,
            role=role,
            repeat=repeat,
            backend=server.backend,
            engine=server.label,
            top_k=TOP_K,
            sequences=tuple(
                sequence.model_copy(update={"cached": {c: s.cached_tokens for c, s in by_condition.items()}})
                for (sequence, _), by_condition in zip(sequences, scored, strict=True)
            ),
        )
        ids = np.concatenate([np.array(ids, dtype=np.int32) for _, ids in sequences])
        positions = {c: _positions(c, [one[c] for one in scored], reference) for c in CACHE_STATES}
        write_logits(folder, Logits(header, ids, positions))


def _scored_reference(folder: Path, role: Role) -> Logits:
    path = logits_path(folder, "reference", 0)
    if not path.exists():
        raise EvidenceError(
            f"The {role} cannot be scored: {path} does not exist.",
            "the reference's own tokens, scored first",
            "score the reference before the candidate",
        )
    return read_logits(path)


_Sequence = tuple[ScoredSequence, tuple[int, ...]]


def _recorded_sequences(reference: Logits) -> list[_Sequence]:
    return [(sequence, reference.ids_of(index)) for index, sequence in enumerate(reference.header.sequences)]


def _generate_answers(server: Scorer, items: Sequence[Item], answers: Sequence[Answer]) -> list[_Sequence]:
    """The sequences: each prompt with the reference's greedy answer.

    A record has texts but no ids, so the answer is generated again. It is cut where it differs from the recorded one, as it may
    because rounding depends on the batch.
    """
    recorded = {a.item: a for a in answers if (a.suite, a.role, a.repeat) == ("greedy", "reference", 0)}
    sequences = []
    for item in items:
        answer = recorded.get(item.id)
        generated = generate(server, item.prompt, answer.completion_tokens if answer else MAX_ANSWER_TOKENS)
        prompt = len(generated.prompt_ids)
        if answer and answer.prompt_tokens != prompt:
            raise EvidenceError(
                f"The prompt of the recorded answer to {item.id} had {answer.prompt_tokens} tokens; it has {prompt} now.",
                "the same prompt, template and tokenizer",
                "choose a new folder with --out",
            )
        ids = (*generated.prompt_ids, *generated.ids[: _shared(answer, generated)])
        start = max(0, min(max(prompt - 1 - PROMPT_TAIL, CACHED_PREFIX_TOKENS), len(ids) - 2))
        sequence = ScoredSequence(item=item.id, prompt_tokens=prompt, length=len(ids), start=start, cached={})
        sequences.append((sequence, ids))
    return sequences


def _shared(answer: Answer | None, generated: Generation) -> int:
    """Number of leading tokens that equal the recorded ones."""
    if answer is None:
        return len(generated.ids)
    texts = [token.text for token in answer.tokens]
    parting = [i for i, (one, other) in enumerate(zip(texts, generated.texts, strict=False)) if one != other]
    return parting[0] if parting else min(len(texts), len(generated.texts))


def _score_all(
    server: Scorer,
    sequences: Sequence[_Sequence],
    reference: Logits | None,
    backwards: bool,
    display: ProgressDisplay,
    title: str,
) -> list[dict[CacheState, Score]]:
    order = range(len(sequences))
    scored: dict[int, dict[CacheState, Score]] = {}
    for done, index in enumerate(reversed(order) if backwards else order, 1):
        sequence, ids = sequences[index]
        server.flush_cache()
        scored[index] = {
            c: score(server, ids, sequence.start, TOP_K, _wanted(reference, c, index)) for c in CACHE_STATES
        }
        display.count(title, done, len(sequences))
    return [scored[index] for index in order]


def _wanted(reference: Logits | None, condition: CacheState, index: int) -> tuple[int, ...]:
    """Ids to ask for: SGLang takes one list per sequence, so they are the reference's top ids at any of its positions."""
    if reference is None:
        return ()
    top_ids = reference.by_condition[condition].top_ids[reference.rows_of(index)]
    return tuple(np.unique(top_ids).tolist())


def _positions(condition: CacheState, scores: Sequence[Score], reference: Logits | None) -> Positions:
    """Log-probabilities at the reference's most probable tokens, of all sequences."""
    own_ids = np.concatenate([one.top_ids for one in scores])
    token = np.concatenate([one.token for one in scores])
    if reference is None:
        return Positions(token, own_ids[:, 0], own_ids, np.concatenate([one.top for one in scores]))
    top_ids = reference.by_condition[condition].top_ids
    at = []
    for index, one in enumerate(scores):
        rows = top_ids[reference.rows_of(index)]
        # The ids were asked for in ascending order.
        at.append(np.take_along_axis(one.at, np.searchsorted(np.unique(rows), rows), axis=1))
    return Positions(token, own_ids[:, 0], top_ids, np.concatenate(at))
