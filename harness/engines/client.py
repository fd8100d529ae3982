"""The client side: questions out, replies in, over the OpenAI-compatible interface."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import openai
from pydantic import BaseModel, Field, ValidationError

from assay.harness.engines.base import ChatRequest, Reply
from assay.harness.errors import EngineError
from assay.harness.evidence.records import Token

WATCH_EVERY_S = 0.25
DEATH_SHOWS_S = 3.0
"""A dying server breaks its connections before its exit can be seen: so long is waited for the better explanation."""
RETRIES = 2
EXCERPT = 300


class _TopLogprob(BaseModel):
    token: str
    logprob: float | None


class _Logprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] = []


class _Logprobs(BaseModel):
    content: list[_Logprob]


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message
    finish_reason: str
    logprobs: _Logprobs | None = None


class _CachedTokens(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Completion(BaseModel):
    id: str
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


class BadReply(ValueError):
    """A body that is no chat completion; says what it lacks."""


def read_reply(body: str, ask: ChatRequest, latency_s: float) -> Reply:
    """The `Reply` in the body of a chat completion.

    A log-probability that is null (SGLang writes NaN so) is read as NaN: it is a finding about the candidate, not about
    the engine.

    Raises:
        BadReply: the body is no JSON, or lacks what every chat completion has, or what ``ask`` asked for.
    """
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadReply(f"{where}: {first['msg']}" if where else first["msg"]) from None
    choice, usage = completion.choices[0], completion.usage
    if ask.top_logprobs and choice.logprobs is None:
        raise BadReply("log-probabilities were asked for, and there are none")
    return Reply(
        request_id=completion.id,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
        latency_s=latency_s,
        tokens=tuple(_token(entry) for entry in choice.logprobs.content) if choice.logprobs else (),
    )


def _token(entry: _Logprob) -> Token:
    top = [(other.token, _number(other.logprob)) for other in entry.top_logprobs]
    top.sort(key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1], reverse=True)
    return Token(text=entry.token, logprob=_number(entry.logprob), top=tuple(top))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Client:
    """Talks to one server.

    Args:
        url: where the server listens, without ``/v1``.
        who: the server in words, such as "the candidate server (sage_attn)"; begins every error.
        api_key: sent with each request.
        timeout_s: seconds that a question may take, retries included.
        proxies: whether the proxy settings of the environment apply; not for a server on this machine.
        check: raises EngineError if the server's process is gone: the better explanation of any failure.
        log_tail: the last lines of the server's log, which end every error; empty where there is none.
    """

    def __init__(
        self,
        url: str,
        who: str,
        api_key: str,
        timeout_s: float,
        proxies: bool,
        check: Callable[[], None],
        log_tail: Callable[[], str],
    ) -> None:
        self.url, self.who, self.timeout_s = url, who, timeout_s
        self._api_key, self._proxies, self._check, self._log_tail = api_key, proxies, check, log_tail

    def error(self, found: str, expected: str = "", do: str = "") -> EngineError:
        """An EngineError about this server, with the last lines of its log."""
        return EngineError("\n".join(filter(None, [f"{self.who} {found}", self._log_tail()])), expected, do)

    def get(self, path: str, timeout_s: float) -> Any:
        """The JSON document at ``path``. Raises EngineError for anything else."""
        return self._document(path, self._call("GET", path, timeout_s))

    def post(self, path: str, timeout_s: float) -> None:
        """POST to ``path``. Raises EngineError unless the answer is good."""
        self._call("POST", path, timeout_s)

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON document that a POST of ``body`` to ``path`` brings, within the time-out of a question.

        Raises:
            EngineError: anything else. If the server died, that is what the error says.
        """
        try:
            return self._document(path, self._call("POST", path, self.timeout_s, body))
        except EngineError:
            asyncio.run(self._see_death())
            raise

    def _document(self, path: str, response: httpx.Response) -> Any:
        try:
            return json.loads(response.text)
        except json.JSONDecodeError:
            raise self.error(f"answered {path} with {_excerpt(response.text)}.", "JSON") from None

    def status(self, path: str, timeout_s: float, method: str = "GET") -> int | None:
        """HTTP status of ``path``; None if there is no answer."""
        try:
            return self._request(method, path, timeout_s).status_code
        except httpx.HTTPError:
            return None

    def _call(self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._request(method, path, timeout_s, body)
        except httpx.HTTPError as error:
            self._check()
            raise self.error(f"did not answer {self.url}{path}: {_reason(error)}.") from error
        if not response.is_success:
            raise self.error(
                f"answered {path} with HTTP {response.status_code}: {_excerpt(response.text)}.", "HTTP 200"
            )
        return response

    def _request(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._api_key}"}
        with httpx.Client(trust_env=self._proxies, timeout=timeout_s, headers=headers) as client:
            return client.request(method, f"{self.url}{path}", json=body)

    def ask(
        self, model: str, asks: Sequence[ChatRequest], concurrency: int, on_reply: Callable[[int, Reply], None]
    ) -> None:
        """`Engine.ask` with the name of the model."""
        if asks:
            asyncio.run(self._ask(model, asks, concurrency, on_reply))

    async def _ask(
        self, model: str, asks: Sequence[ChatRequest], concurrency: int, on_reply: Callable[[int, Reply], None]
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        transport = httpx.AsyncClient(trust_env=self._proxies, limits=limits, timeout=None)
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self._api_key, max_retries=RETRIES, timeout=None, http_client=transport
        ) as api:
            waiting = iter(enumerate(asks))

            async def work() -> None:
                for index, ask in waiting:
                    on_reply(index, await self._reply(api, model, ask))

            work_all = asyncio.gather(*(work() for _ in range(min(concurrency, len(asks)))))
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.wait((work_all, watch), return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    await watch
                await work_all
            finally:
                watch.cancel()
                work_all.cancel()
                await asyncio.gather(watch, work_all, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self._check()
            await asyncio.sleep(WATCH_EVERY_S)

    async def _see_death(self) -> None:
        deadline = time.monotonic() + DEATH_SHOWS_S
        while time.monotonic() < deadline:
            self._check()
            await asyncio.sleep(WATCH_EVERY_S)

    async def _reply(self, api: openai.AsyncOpenAI, model: str, ask: ChatRequest) -> Reply:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                raw = await api.chat.completions.with_raw_response.create(
                    model=model,
                    messages=[{"role": "user", "content": ask.prompt}],
                    temperature=0,
                    max_tokens=ask.max_tokens,
                    logprobs=True if ask.top_logprobs else openai.omit,
                    top_logprobs=ask.top_logprobs or openai.omit,
                )
            return read_reply(raw.text, ask, time.monotonic() - started)
        except BadReply as error:
            raise self.error(
                f"answered what is no chat completion: {error}. It answered: {_excerpt(raw.text)}.",
                "JSON with choices, a message text, a finish reason and usage",
            ) from None
        except TimeoutError:
            self._check()
            raise self.error(
                f"has not answered a question for {self.timeout_s:g} s.",
                "an answer within the request time-out",
                "see why it hangs, or give --request-timeout more seconds",
            ) from None
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                await self._see_death()
            raise self.error(
                f"answered HTTP {error.status_code}: {_excerpt(error.response.text)}.", "HTTP 200"
            ) from error
        except openai.APIConnectionError as error:
            await self._see_death()
            raise self.error(f"broke the connection: {_reason(error.__cause__ or error)}.") from error


def _excerpt(body: str) -> str:
    return repr(body if len(body) <= EXCERPT else body[:EXCERPT] + "...")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")
