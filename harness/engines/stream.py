"""The streaming client: prompts out, and the time at which each token of their answers arrived.

Definitions follow SGLang's ``sglang.benchmark.serving``: the clock starts when the request is sent; the time to first token ends
with the first chunk that carries one; the gap between two chunks is divided among the tokens of the later one; the latency ends
with the last line. Lines are parsed only once their answer is complete, so that parsing delays no other stream's clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import ValidationError

from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.engines.client import (
    BROKEN,
    LARGEST_ANSWER,
    Client,
    excerpt,
    read_response,
    reason,
    served_models,
)
from assay.harness.engines.wire import BadReply, Chunk

_DATA, _DONE = "data: ", "[DONE]"
_EVENT = b"data:"
_EVENTS_OF_A_TOKEN, _FURTHER_EVENTS = 4, 64
"""Most events of a stream: a token has one, unless its text looks like the start of another; then come usage and the end."""


@dataclass(frozen=True)
class _TokenRequest(ChatRequest):
    """A prompt as token ids, whose answer must be exactly `max_tokens` long."""

    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamReply(Reply):
    """An answer, and when its tokens arrived.

    Attributes:
        sent_s: when the request was sent, by ``time.perf_counter``.
        chunk_s: seconds from sending to each chunk that carried a token.
        chunk_tokens: tokens of the answer up to and including each chunk.
    """

    sent_s: float = 0.0
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()


def _read_stream(lines: Sequence[tuple[float, str]], ask: ChatRequest, sent_s: float) -> StreamReply:
    """Parse the lines of a streamed completion.

    Args:
        lines: (arrival by the clock of ``sent_s``, line), in order.
        ask: the request.
        sent_s: when it was sent.

    Raises:
        BadReply: a line is not a chunk, the stream ended early, or the answer does not have the requested length.
    """
    times: list[float] = []
    tokens: list[int] = []
    text, reason, name, usage = "", "", "", None
    for came_s, chunk in _chunks(lines):
        name, usage = chunk.id, chunk.usage or usage
        for choice in chunk.choices[:1]:
            before = tokens[-1] if tokens else 0
            # Without running counts, a chunk is taken for one token, as in sglang.benchmark.serving.
            after = chunk.usage.completion_tokens if chunk.usage else before + 1
            if after > before:
                times.append(came_s - sent_s)
                tokens.append(after)
            text += choice.text
            reason = choice.finish_reason or reason
    if usage is None or not reason or not lines[-1][1].endswith(_DONE):
        raise BadReply("the stream ended without a finish reason, usage and [DONE]")
    if usage.completion_tokens != ask.max_tokens or tokens[-1:] != [ask.max_tokens]:
        raise BadReply(
            f"{usage.completion_tokens} tokens by its usage and {tokens[-1] if tokens else 0} by its chunks, but "
            f"{ask.max_tokens} were requested with ignore_eos"
        )
    return StreamReply(
        request_id=name,
        text=text,
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        latency_s=lines[-1][0] - sent_s,
        sent_s=sent_s,
        chunk_s=tuple(times),
        chunk_tokens=tuple(tokens),
    )


def _chunks(lines: Sequence[tuple[float, str]]) -> Iterator[tuple[float, Chunk]]:
    for came_s, line in lines:
        if not line.startswith(":") and not line.endswith(_DONE):  # a colon begins a comment
            try:
                yield came_s, Chunk.model_validate_json(line.removeprefix(_DATA))
            except ValidationError as error:
                raise BadReply(f"{error.errors()[0]['msg']} in {excerpt(line)}") from None


class _StreamClient(Client):
    """A `Client` whose requests are `_TokenRequest`s and whose replies are `StreamReply`s.

    No request is sent twice: a retry would count as latency.
    """

    async def _reply(self, session: aiohttp.ClientSession, model: str, ask: ChatRequest) -> Reply:
        assert isinstance(ask, _TokenRequest)
        arrivals: list[tuple[float, bytes]] = []
        body, sent_s = _completion_body(model, ask), time.perf_counter()
        unlimited, size, events = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s), 0, 0
        clock = asyncio.get_running_loop().time
        try:
            async with (
                asyncio.timeout(self.timeout_s) as silence,
                session.post(
                    f"{self.url}/v1/completions", json=body, timeout=unlimited, allow_redirects=False
                ) as response,
            ):
                refused = None if response.status == 200 else await read_response(response)
                async for data in response.content.iter_any():
                    arrivals.append((time.perf_counter(), data))
                    size += len(data)
                    if carried := data.count(_EVENT):  # comments keep a connection alive, and may come for ever
                        events += carried
                        silence.reschedule(clock() + self.timeout_s)
                    if size > LARGEST_ANSWER or events > _EVENTS_OF_A_TOKEN * ask.max_tokens + _FURTHER_EVENTS:
                        raise self.error(
                            f"streams without end: {events:,} events, {size:,} bytes so far.",
                            f"{ask.max_tokens:,} tokens",
                            "time a server that supports max_tokens",
                        )
        except TimeoutError:
            self._check()
            raise self.error(
                f"sent nothing for {self.timeout_s:g} s.",
                "a token within the request time-out",
                "find out why it hangs, or raise --request-timeout",
            ) from None
        except BROKEN as error:
            await self._wait_for_death()
            raise self.error(f"broke the connection: {reason(error)}.") from error
        if refused:
            raise await self._refusal(refused)
        try:
            return _read_stream(_lines(arrivals), ask, sent_s)
        except BadReply as error:
            raise self.error(
                f"did not stream a completion of the requested length: {error}.",
                "chunks with usage, a finish reason, and [DONE]",
                "time a server that supports ignore_eos, such as SGLang or vLLM",
            ) from None


def _lines(arrivals: Iterable[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """Yield the lines with the arrival of their ends, without empty ones."""
    lines: list[tuple[float, bytes]] = []
    came_s, rest = 0.0, b""
    for came_s, data in arrivals:
        *complete, rest = (rest + data).split(b"\n")
        lines += [(came_s, line) for line in complete]
    lines.append((came_s, rest))
    return [(came_s, line.decode(errors="replace").rstrip("\r")) for came_s, line in lines if line.strip()]


def _completion_body(model: str, ask: _TokenRequest) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(ask.tokens),
        "temperature": 0,
        "max_tokens": ask.max_tokens,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


class Streamer:
    """Streams from one running engine.

    Args:
        engine: a running engine. A stream fails after its request time-out without a token.

    Raises:
        EngineError: the server does not report which model it serves.
    """

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client(_StreamClient)
        self._model = served_models(self._client)[0]

    def stream(self, prompts: Sequence[tuple[int, ...]], output: int, concurrency: int) -> list[StreamReply]:
        """Send all prompts and return their answers, in the order of the prompts.

        Args:
            prompts: token ids; sent in this order.
            output: tokens of each answer.
            concurrency: limit of the requests in flight.

        Raises:
            EngineError: the server failed, or an answer has another length.
        """
        replies: dict[int, Reply] = {}
        asks = [_TokenRequest("", output, tokens=tokens) for tokens in prompts]
        self._client.ask(self._model, asks, concurrency, replies.__setitem__)
        return [reply for _, reply in sorted(replies.items()) if isinstance(reply, StreamReply)]
