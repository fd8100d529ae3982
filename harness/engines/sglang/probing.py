"""Probes: a prompt scored token by token and an answer of a given length, in one request to SGLang's ``/generate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from assay.harness.engines.client import number, problem
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.errors import EngineError
from assay.harness.evidence.invariance import ProbeReply, Scores

TOP = 8
"""Most probable tokens that are returned at each position."""
_PATH = "/generate"
_Entry = tuple[float | None, int, str | None]  # log-probability, token id, text


@dataclass(frozen=True)
class ProbeRequest:
    """One request.

    Attributes:
        probe: id of the probe.
        rid: its id in the server.
        ids: tokens of the prompt.
        start: the tokens after the first ``start + 1`` are scored; at most ``start`` tokens come from the cache.
        depth: tokens to generate, the end-of-text token or not.
    """

    probe: str
    rid: str
    ids: tuple[int, ...]
    start: int
    depth: int


class _Meta(BaseModel):
    prompt_tokens: int
    cached_tokens: int = 0
    cached_tokens_details: dict[str, Any] | None = None
    finish_reason: dict[str, Any] | None = None
    num_retractions: int = 0
    spec_verify_ct: int = 0
    input_token_logprobs: list[_Entry] = Field(default_factory=list)
    input_top_logprobs: list[list[_Entry] | None] = Field(default_factory=list)
    output_token_logprobs: list[_Entry] = Field(default_factory=list)
    output_top_logprobs: list[list[_Entry] | None] = Field(default_factory=list)


class _Answer(BaseModel):
    output_ids: list[int]
    meta_info: _Meta


def ask_together(server: SGLangServer, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
    """Send requests at once, in one message, and return the replies in their order.

    Raises:
        EngineError: the server failed, or did not answer each of them.
    """
    replies = server.send(_PATH, _body(requests, server.adapter))
    if len(replies) != len(requests):
        raise _unusable(server, f"{len(replies)} answers to {len(requests)} requests")
    return [_reply(server, request, reply, 1) for request, reply in zip(requests, replies, strict=True)]


def leave_in_cache(server: SGLangServer, requests: Sequence[ProbeRequest]) -> None:
    """Send requests at once, without log-probabilities, so that their K and V are left in the cache.

    SGLang mixes chunks of prompts with decode only where no request asks for log-probabilities.

    Raises:
        EngineError: the server failed.
    """
    scores = ("logprob_start_len", "return_logprob", "top_logprobs_num")
    server.send(_PATH, {name: value for name, value in _body(requests, server.adapter).items() if name not in scores})


def ask_streamed(server: SGLangServer, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
    """Send requests at once, each of which answers in pieces, and return the replies in their order.

    Raises:
        EngineError: as `ask_together`.
    """

    def single(request: ProbeRequest) -> ProbeReply:
        body = _body([request], server.adapter)
        fields = {key: value[0] for key, value in body.items() if isinstance(value, list)}
        events = server.stream(_PATH, {**fields, "return_logprob": True, "top_logprobs_num": TOP, "stream": True})
        if not events:
            raise _unusable(server, "a stream without an answer")
        return _reply(server, request, events[-1], len(events))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(single, requests))


def _body(requests: Sequence[ProbeRequest], adapter: str) -> dict[str, Any]:
    named = {"lora_path": [adapter] * len(requests)} if adapter else {}
    return {
        **named,
        "rid": [request.rid for request in requests],
        "input_ids": [list(request.ids) for request in requests],
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": request.depth, "ignore_eos": True} for request in requests
        ],
        "logprob_start_len": [request.start for request in requests],
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }


def _reply(server: SGLangServer, request: ProbeRequest, reply: Any, pieces: int) -> ProbeReply:
    try:
        answer = _Answer.model_validate(reply)
    except ValidationError as error:
        raise _unusable(server, problem(error)) from None
    meta, scored = answer.meta_info, request.ids[request.start + 1 :]
    if meta.prompt_tokens != len(request.ids) or len(meta.input_token_logprobs) != len(scored) + 1:
        raise _unusable(
            server, f"{len(meta.input_token_logprobs) - 1} scored tokens of a prompt of {meta.prompt_tokens}"
        )
    if not len(answer.output_ids) == len(meta.output_token_logprobs) == len(meta.output_top_logprobs):
        raise _unusable(server, f"{len(answer.output_ids)} tokens, {len(meta.output_token_logprobs)} log-probabilities")
    return ProbeReply(
        probe=request.probe,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        host_tokens=int((meta.cached_tokens_details or {}).get("host") or 0),
        # The first entry is the first computed token, which no position predicts.
        prefill=_scores(
            request.start + 1,
            scored,
            [entry[0] for entry in meta.input_token_logprobs[1:]],
            meta.input_top_logprobs[1:],
        ),
        decode=_scores(
            len(request.ids),
            answer.output_ids,
            [
                _of(token, entry, row)
                for token, entry, row in zip(
                    answer.output_ids, meta.output_token_logprobs, meta.output_top_logprobs, strict=True
                )
            ],
            meta.output_top_logprobs,
        ),
        finish=str((meta.finish_reason or {}).get("type", "")),
        retractions=meta.num_retractions,
        verifications=meta.spec_verify_ct,
        pieces=pieces,
    )


def _of(token: int, sampled: _Entry, top: Sequence[_Entry] | None) -> float | None:
    """Return the log-probability of a token that was written: of the sampled one or, where another was forced, among the top."""
    return sampled[0] if sampled[1] == token else next((logprob for logprob, id_, _ in top or () if id_ == token), None)


def _scores(
    first: int, tokens: Sequence[int], own: Sequence[float | None], top: Sequence[list[_Entry] | None]
) -> Scores:
    ranked = [sorted(row or (), key=lambda entry: -_finite(entry[0])) for row in top]
    return Scores(
        first=first,
        tokens=tuple(tokens),
        own=tuple(round(number(logprob), 7) for logprob in own),
        ids=tuple(tuple(id_ for _, id_, _ in row) for row in ranked),
        logprobs=tuple(tuple(round(number(logprob), 7) for logprob, _, _ in row) for row in ranked),
    )


def _finite(value: float | None) -> float:
    return -math.inf if value is None else value


def _unusable(server: SGLangServer, found: str) -> EngineError:
    return EngineError(
        f"{server.who} answered {_PATH} with an unusable reply: {found}.",
        "every prompt scored, and every token of its answer",
        "use SGLang 0.5.23",
    )
