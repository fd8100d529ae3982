"""The streaming client: prompts out, and when each token of their answers came.

Definitions are those of SGLang's own ``sglang.benchmark.serving``: the clock starts when the request is sent; time to first token
ends with the first chunk that carries one; a gap between two chunks is shared out among the tokens that the later one carries;
the whole latency ends with the last line. Lines are parsed only when their answer is whole, so that parsing delays no other
stream's clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import openai
from pydantic import BaseModel, ValidationError

from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.engines.client import BadReply, Client
from assay.harness.engines.remote import LOOPBACK
from assay.harness.engines.sglang import served_models

_DATA, _DONE = "data: ", "[DONE]"
EXCERPT = 300


@dataclass(frozen=True)
class TokenRequest(ChatRequest):
    """A prompt as token numbers, whose answer is to be exactly `max_tokens` long."""

    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class StreamReply(Reply):
    """An answer, and when its tokens came.

    Attributes:
        sent_s: when the request was sent, by ``time.perf_counter``.
        chunk_s: seconds from sending to each chunk that carried a token.
        chunk_tokens: tokens of the answer up to and with each chunk.
    """

    sent_s: float = 0.0
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(BaseModel):
    text: str
    finish_reason: str | None = None


class _Chunk(BaseModel):
    id: str
    choices: list[_Choice]
    usage: _Usage | None = None


def read_stream(lines: Sequence[tuple[float, str]], ask: ChatRequest, sent_s: float) -> StreamReply:
    """The `StreamReply` in the lines of a streamed completion.

    Args:
        lines: (when it came by the clock of ``sent_s``, line), in order.
        ask: what was asked.
        sent_s: when it was asked.

    Raises:
        BadReply: a line is no chunk, the stream ended early, or the answer is not as long as was asked.
    """
    times: list[float] = []
    tokens: list[int] = []
    text, reason, name, usage = "", "", "", None
    for came_s, chunk in _chunks(lines):
        name, usage = chunk.id, chunk.usage or usage
        for choice in chunk.choices[:1]:
            before = tokens[-1] if tokens else 0
            # A server that does not count as it goes sends a token a chunk, as sglang.benchmark.serving supposes too.
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
            f"{usage.completion_tokens} tokens by its usage and {tokens[-1] if tokens else 0} by its chunks, where "
            f"{ask.max_tokens} were asked for with ignore_eos"
        )
    return StreamReply(
        request_id=name,
        text=text,
        finish_reason=reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
        latency_s=lines[-1][0] - sent_s,
        sent_s=sent_s,
        chunk_s=tuple(times),
        chunk_tokens=tuple(tokens),
    )


def _chunks(lines: Sequence[tuple[float, str]]) -> Iterator[tuple[float, _Chunk]]:
    for came_s, line in lines:
        if line and not line.endswith(_DONE):
            try:
                yield came_s, _Chunk.model_validate_json(line.removeprefix(_DATA))
            except ValidationError as error:
                raise BadReply(f"{error.errors()[0]['msg']} in {line[:EXCERPT]!r}") from None


class StreamClient(Client):
    """A `Client` whose questions are `TokenRequest`s and whose replies are `StreamReply`s.

    No question is asked twice: a retry would be counted as latency.
    """

    async def _reply(self, api: openai.AsyncOpenAI, model: str, ask: ChatRequest) -> Reply:
        assert isinstance(ask, TokenRequest)
        lines: list[tuple[float, str]] = []
        sent_s = time.perf_counter()
        try:
            async with api.with_options(
                max_retries=0, timeout=self.timeout_s
            ).completions.with_streaming_response.create(
                model=model,
                prompt=list(ask.tokens),
                temperature=0,
                max_tokens=ask.max_tokens,
                stream=True,
                extra_body={
                    "ignore_eos": True,
                    "skip_special_tokens": False,
                    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                },
            ) as response:
                async for line in response.iter_lines():
                    lines.append((time.perf_counter(), line))
            return read_stream([pair for pair in lines if pair[1]], ask, sent_s)
        except BadReply as error:
            raise self.error(
                f"streamed what is no completion of the length asked for: {error}.",
                "chunks with usage, a finish reason, and [DONE]",
                "time a server that knows ignore_eos, as SGLang and vLLM do",
            ) from None
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                await self._see_death()
            body = (await error.response.aread()).decode(errors="replace")
            raise self.error(f"answered HTTP {error.status_code}: {body[:EXCERPT]!r}.", "HTTP 200") from error
        except (openai.APITimeoutError, httpx.TimeoutException):
            self._check()
            raise self.error(
                f"sent nothing for {self.timeout_s:g} s.",
                "a token within the request time-out",
                "see why it hangs, or give --request-timeout more seconds",
            ) from None
        except (openai.APIConnectionError, httpx.HTTPError) as error:
            await self._see_death()
            cause = error.__cause__ or error
            raise self.error(f"broke the connection: {type(cause).__name__}: {cause}".rstrip(": ") + ".") from error


class Streamer:
    """Streams from one running engine.

    Args:
        engine: started.
        timeout_s: seconds without a token after which a stream is given up.

    Raises:
        EngineError: it does not say which model it serves.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._started_here = started_here = bool(engine.launch_command)
        self._client = StreamClient(
            engine.url,
            f"the {engine.role} server ({engine.backend})",
            api_key="EMPTY" if started_here else os.environ.get("OPENAI_API_KEY") or "EMPTY",
            timeout_s=timeout_s,
            proxies=urlsplit(engine.url).hostname not in LOOPBACK,
            check=engine.check,
            log_tail=str,
        )
        self._model = served_models(self._client)[0]

    def stream(self, prompts: Sequence[tuple[int, ...]], output: int, concurrency: int) -> list[StreamReply]:
        """Send all prompts and return their answers, in the order of the prompts.

        Args:
            prompts: token numbers; started in this order.
            output: tokens of each answer.
            concurrency: most requests in flight at a time.

        Raises:
            EngineError: the server failed, or gave answers of another length.
        """
        replies: dict[int, Reply] = {}
        asks = [TokenRequest("", output, tokens=tokens) for tokens in prompts]
        self._client.ask(self._model, asks, concurrency, replies.__setitem__)
        found = [reply for _, reply in sorted(replies.items()) if isinstance(reply, StreamReply)]
        # SGLang up to 0.5.17 leaves the report of cached tokens out where there are none.
        return [replace(one, cached_tokens=one.cached_tokens or 0) for one in found] if self._started_here else found
