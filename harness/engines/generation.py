"""Greedy answers as token ids, and replies that are read field by field: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from assay.harness.engines.base import ChatRequest, Engine, Generation
from assay.harness.engines.client import CHAT, MALFORMED, chat_body, problem
from assay.harness.errors import EngineError
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
