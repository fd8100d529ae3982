"""Greedy answers as token ids, and replies that are read field by field: the same for every engine."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from assay.harness.engines.base import ChatRequest, Engine, Generation, ProbeRequest, Score
from assay.harness.engines.client import CHAT, MALFORMED, chat_body, number, problem
from assay.harness.errors import EngineError
from assay.harness.evidence.probes import Scores
from assay.harness.evidence.records import Answer, Item, Token
from assay.harness.sides import profile_of


def generate(server: Engine, prompt: str, max_tokens: int) -> Generation:
    """Generate one greedy answer with its exact token ids, as the server returns them (``return_token_ids``).

    Raises:
        EngineError: the server failed, or returns no token ids.
    """
    body = {**chat_body(ChatRequest(prompt, max_tokens)), "logprobs": True, "return_token_ids": True}
    reply = server.send(CHAT, body)
    with readable(server, CHAT, "a chat completion with token ids"):
        choice = reply["choices"][0]
        ids = choice["response_token_ids" if "response_token_ids" in choice else "token_ids"]  # vLLM, and SGLang 0.5.17
        prompt_ids = choice["prompt_token_ids"] if "prompt_token_ids" in choice else reply["prompt_token_ids"]  # vLLM
        texts = tuple(entry["token"] for entry in choice["logprobs"]["content"])
        if len(texts) != len(ids):
            raise ValueError(f"{len(ids)} token ids and {len(texts)} texts")
        return Generation(tuple(map(int, prompt_ids)), tuple(map(int, ids)), texts)


def generate_all(
    server: Engine, items: Sequence[Item], prompts: Sequence[Sequence[int]], tokens: Sequence[int], top_logprobs: int
) -> list[Answer]:
    """Implement `Engine.generate_all` by probes that score no token of their prompts."""
    name, begun = f"assay-generated-{secrets.token_hex(4)}", time.monotonic()
    requests = [
        ProbeRequest(item.id, f"{name}-{number}", tuple(ids), len(ids) - 1, most, top=top_logprobs)
        for number, (item, ids, most) in enumerate(zip(items, prompts, tokens, strict=True))
    ]
    replies = server.probe(requests) if requests else []
    seconds = time.monotonic() - begun
    made = []
    for item, request, reply in zip(items, requests, replies, strict=True):
        own = reply.decode
        rows = zip(own.tokens, own.own, own.ids, own.logprobs, strict=True)
        answer = ChatRequest.of(item, len(own.tokens)).answered(
            server.role,
            " ".join(map(str, own.tokens)),
            request_id=server.request_id(request.name),
            finish_reason="length",
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=len(own.tokens),
            cached_tokens=reply.cached_tokens,
            latency_s=seconds,
            tokens=tuple(
                Token(text=str(id_), logprob=logprob, top=tuple(zip(map(str, ids), top, strict=True))[:top_logprobs])
                for id_, logprob, ids, top in rows
            ),
        )
        made.append(answer)
    return made


def score(server: Engine, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
    """Implement `Engine.score` by a probe."""
    if start < 0 or len(ids) - start < 2:
        raise ValueError(f"{len(ids)} tokens leave nothing to score after a prefix of {start} and the next token")
    name = f"assay-score-{secrets.token_hex(6)}"
    (reply,) = server.probe([ProbeRequest("", name, tuple(ids), start, 1, top=top_k, at=tuple(at))])
    own = reply.prefill
    with readable(server, "with scores", f"{top_k} log-probabilities at each position, and those of {len(at)} tokens"):
        if any(len(row) < top_k for row in own.ids):
            raise ValueError(f"rows without {top_k} log-probabilities")
        rows = [dict(zip(*row, strict=True)) for row in zip(own.ids, own.logprobs, strict=True)]
        begin = len(ids) - start - 1 - len(rows)  # after those that the cache had, though no earlier prompt did

        def of(values: Sequence[Any], *width: int, missing: float = math.nan) -> Any:
            return np.array([*[np.full(width, missing)] * begin, *values]).reshape(begin + len(rows), *width)

        return Score(
            cached_tokens=reply.cached_tokens,
            token=of(own.own).astype(np.float32),
            top_ids=of([row[:top_k] for row in own.ids], top_k, missing=0).astype(np.int32),
            top=of([row[:top_k] for row in own.logprobs], top_k).astype(np.float32),
            at=of([[row[id_] for id_ in at] for row in rows], len(at)).astype(np.float32),
        )


def scores(
    first: int, tokens: Sequence[int], own: Sequence[float | None], rows: Sequence[Mapping[int, float | None]]
) -> Scores:
    """Return the scores of tokens, from their log-probabilities and those by id at each position, which are ranked; None is NaN."""
    numbers = [{id_: round(number(logprob), 7) for id_, logprob in row.items()} for row in rows]
    ranked = [sorted(row.items(), key=lambda each: math.inf if math.isnan(each[1]) else -each[1]) for row in numbers]
    return Scores(
        first=first,
        tokens=tuple(tokens),
        own=tuple(round(number(logprob), 7) for logprob in own),
        ids=tuple(tuple(id_ for id_, _ in row) for row in ranked),
        logprobs=tuple(tuple(logprob for _, logprob in row) for row in ranked),
    )


@contextmanager
def readable(server: Engine, path: str, expected: str) -> Iterator[None]:
    """Turn exceptions raised while reading an unexpected reply into EngineError."""
    try:
        yield
    except MALFORMED as error:
        profile = profile_of(server.kind)
        raise EngineError(
            f"{server.who} answered {path} with an unusable reply: {problem(error)}.",
            expected,
            f"use {profile.title} {profile.oldest} or newer",
        ) from None
