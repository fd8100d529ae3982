"""Teacher forcing: a running SGLang server's log-probabilities of given tokens.

SGLang's ``/generate`` scores a prompt that is given as token ids. It uses the prefix cache no further than
``logprob_start_len``, so a start of 0 would switch prefix hits off (``_compute_max_prefix_len`` in
``srt/managers/schedule_batch.py``, the same in 0.5.17 and 0.5.23). The start is therefore also the longest prefix that can
come from the cache; ``meta_info.cached_tokens`` is the part that did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, AliasPath, BaseModel, Field, ValidationError

from assay.harness.engines.base import ChatRequest, Scorer
from assay.harness.engines.client import chat_body, number, problem
from assay.harness.engines.sglang.catalog import MIN_SGLANG
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.sides import Role

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


@dataclass(frozen=True)
class Generation:
    """A greedy answer as token ids.

    Attributes:
        prompt_ids: the prompt's tokens, chat template included.
        ids: the answer's tokens, including the end-of-text token if it was generated.
        texts: their texts.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """Log-probabilities, in nats, of the ``n`` tokens of a sequence after its first ``start + 1``; NaN where the server gave null.

    Attributes:
        cached_tokens: tokens whose keys and values came from the prefix cache, as the server reports.
        token: log-probability of the sequence's own token, float32 [n].
        top_ids: ids of the most probable tokens, best first, int32 [n, k].
        top: their log-probabilities, float32 [n, k].
        at: log-probabilities of the requested ids, in their order, float32 [n, m].
    """

    cached_tokens: int
    token: Floats
    top_ids: Ints
    top: Floats
    at: Floats


class _Text(BaseModel):
    token: str


class _TokenIds(BaseModel):
    prompt_token_ids: list[int] = Field(min_length=1)
    response_token_ids: list[int] = Field(validation_alias=AliasChoices("response_token_ids", "token_ids"))  # 0.5.17
    logprobs: list[_Text] = Field(validation_alias=AliasPath("logprobs", "content"))


class _Completion(BaseModel):
    choices: list[_TokenIds] = Field(min_length=1)


class _Meta(BaseModel):
    prompt_tokens: int
    cached_tokens: int = 0
    input_token_logprobs: list[_Entry] = Field(min_length=2)
    input_top_logprobs: list[list[_Entry] | None]
    input_token_ids_logprobs: list[list[_Entry] | None] | None = None


class _Written(BaseModel):
    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    output_token_logprobs: list[_Entry]
    output_top_logprobs: list[list[_Entry] | None]

    def answer(self, item: Item, role: Role, seconds: float) -> Answer:
        """Return what was generated in this time as the answer to an item, whose text is token ids."""
        written = zip(self.output_token_logprobs, self.output_top_logprobs, strict=True)
        tokens = tuple(
            Token(
                text=str(id_),
                logprob=number(logprob),
                top=tuple((str(other), number(p)) for p, other, _ in top or ()),
            )
            for (logprob, id_, _), top in written
        )
        return ChatRequest.of(item, self.completion_tokens).answered(
            role,
            " ".join(token.text for token in tokens),
            request_id=self.id,
            finish_reason="length",
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            latency_s=seconds,
            tokens=tokens,
        )


AnyMeta = TypeVar("AnyMeta", _Meta, _Written)


class _Answer(BaseModel, Generic[AnyMeta]):
    meta_info: AnyMeta


def generate(server: Scorer, prompt: str, max_tokens: int) -> Generation:
    """Generate one greedy answer with its exact token ids, as the server returns them (``return_token_ids``).

    Raises:
        EngineError: the server failed, or returns no token ids.
    """
    path = "/v1/chat/completions"
    body = {**chat_body(ChatRequest(prompt, max_tokens)), "logprobs": True, "return_token_ids": True}
    reply = server.send(path, body)
    try:
        choice = _Completion.model_validate(reply).choices[0]
    except ValidationError as error:
        raise _bad(server, path, problem(error), "a chat completion with token ids") from None
    texts = tuple(entry.token for entry in choice.logprobs)
    if len(texts) != len(choice.response_token_ids):
        received = f"{len(choice.response_token_ids)} token ids and {len(texts)} texts"
        raise _bad(server, path, received, "one text for each token id")
    return Generation(tuple(choice.prompt_token_ids), tuple(choice.response_token_ids), texts)


def generate_all(
    server: Scorer,
    items: Sequence[Item],
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    top_logprobs: int,
) -> list[Answer]:
    """Generate one greedy answer of a given length to each of several prompts, sent at once.

    Args:
        server: a running SGLang server.
        items: what is asked.
        prompts: the token ids of their prompts.
        tokens: tokens of each answer; an end-of-text token does not end it.
        top_logprobs: alternatives to return with the log-probability of each token.

    Returns:
        The answers, in order, with the seconds until all had come. Their texts are token ids.

    Raises:
        EngineError: the server failed, or did not answer each of them.
    """
    path = "/generate"
    sampling = [{"temperature": 0, "max_new_tokens": most, "ignore_eos": True} for most in tokens]
    body = {
        "input_ids": [list(ids) for ids in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": top_logprobs,
    }
    begun = time.monotonic()
    replies = server.send(path, body)
    seconds = time.monotonic() - begun
    try:
        written = [_Answer[_Written].model_validate(reply).meta_info for reply in replies]
    except (TypeError, ValidationError) as error:
        words = problem(error) if isinstance(error, ValidationError) else str(replies)[:300]
        raise _bad(server, path, words, "generated tokens with log-probabilities") from None
    if [answer.prompt_tokens for answer in written] != [len(ids) for ids in prompts]:
        raise _bad(server, path, f"{len(written)} answers", f"one to each of {len(prompts)} prompts")
    return [answer.answer(item, server.role, seconds) for item, answer in zip(items, written, strict=True)]


def score(server: Scorer, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
    """Score the tokens of a sequence after its first ``start + 1``.

    Args:
        server: a running SGLang server.
        ids: the sequence, prompt and answer.
        start: longest prefix that may come from the cache. The token after it is the first one that is computed, and the next
            one is the first with a log-probability.
        top_k: number of most probable tokens to return at each position.
        at: ids whose log-probabilities are returned at every position, whatever their rank.

    Raises:
        ValueError: no token is left to score.
        EngineError: the server failed, or scored other tokens than the given ones.
    """
    positions = len(ids) - start - 1
    if start < 0 or positions < 1:
        raise ValueError(f"{len(ids)} tokens leave nothing to score after a prefix of {start} and the next token")
    path = "/generate"
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": top_k,
        "token_ids_logprob": list(at) or None,
    }
    reply = server.send(path, body)
    try:
        meta = _Answer[_Meta].model_validate(reply).meta_info
    except ValidationError as error:
        raise _bad(server, path, problem(error), "log-probabilities of the prompt") from None
    _check_ids(server, meta, ids, start)
    # The first entry is the first computed token, which no position predicts.
    own, top = meta.input_token_logprobs[1:], meta.input_top_logprobs[1:]
    asked = (meta.input_token_ids_logprobs or [None])[1:] if at else [[] for _ in own]
    for rows, width in ((top, top_k), (asked, len(at))):
        if len(rows) != positions or any(row is None or len(row) != width for row in rows):
            raise _bad(server, path, f"{len(rows)} rows", f"{positions} rows of {width} log-probabilities")
    return Score(
        cached_tokens=meta.cached_tokens,
        token=_values([own])[0],
        top_ids=np.array([[entry[1] for entry in row or ()] for row in top], dtype=np.int32),
        top=_values(top),
        at=_values(asked),
    )


def _check_ids(server: Scorer, meta: _Meta, ids: Sequence[int], start: int) -> None:
    """Raise EngineError unless the scored ids are the given ones, or 0: SGLang returns 0 for ids at the end of the vocabulary, its
    guard against image placeholders.
    """
    scored = [entry[1] for entry in meta.input_token_logprobs]
    same = len(scored) == len(ids) - start and all(a in (b, 0) for a, b in zip(scored, ids[start:], strict=True))
    if meta.prompt_tokens != len(ids) or not same:
        received = f"log-probabilities of {len(scored)} tokens of a prompt of {meta.prompt_tokens}"
        raise _bad(
            server, "/generate", received, f"the last {len(ids) - start} of the {len(ids)} tokens that were sent"
        )


def _values(rows: Sequence[Sequence[_Entry] | None]) -> Floats:
    """Convert to an array, NaN for null: SGLang's JSON has null for every number that is not finite."""
    numbers = [[number(entry[0]) for entry in row or ()] for row in rows]
    return np.array(numbers, dtype=np.float32).reshape(len(rows), -1)


def _bad(server: Scorer, path: str, found: str, expected: str) -> EngineError:
    return EngineError(
        f"{server.who} answered {path} with an unusable reply: {found}.",
        expected,
        f"use SGLang {MIN_SGLANG} or newer",
    )
