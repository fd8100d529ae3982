"""The client of OpenAI-compatible servers: requests out, stored answers in, and streams with the time at which each token came.

The openai client sends requests, over aiohttp. It handles keys, organisations, proxies, certificates, retries and their pauses, so
assay can compare any URL that it works with: a gateway, or Azure's ``https://NAME.openai.azure.com/openai/v1``. Responses are
taken raw and parsed once, here.

Times of a stream follow SGLang's ``sglang.benchmark.serving``: the clock starts when the request is sent; the time to first token
ends with the first chunk that carries one; the gap between two chunks is divided among the tokens of the later one; the latency
ends with the last line. Lines are parsed only once their answer is complete, so that parsing delays no other stream's clock.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from assay.harness.backend import LOOPBACK
from assay.harness.engines.base import ChatRequest, never
from assay.harness.engines.guardian import HELPER_GRACE_S
from assay.harness.engines.process import GRACE_S
from assay.harness.errors import EngineError
from assay.harness.evidence.bench_folder import Stream
from assay.harness.evidence.records import Answer, Token
from assay.harness.sides import Role

if TYPE_CHECKING:  # the openai client takes a third of a second to import
    import httpx
    from openai import AsyncOpenAI

# Seconds that a server may take to describe itself.
INFO_TIMEOUT_S = 60.0
CHAT, _COMPLETIONS, _TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
_WATCH_INTERVAL_S = 0.25
# A dying server drops its connections before its exit is visible, since the guardian first ends its other processes; a failed
# request waits this long for an explanation.
_DEATH_WAIT_S = GRACE_S + HELPER_GRACE_S + 2.0
_RETRIES = 2
_EXCERPT = 300
_DATA, _DONE = "data:", "[DONE]"
# Errors from reading an unexpected reply; a ValidationError is a ValueError.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError, RecursionError)

_Done = TypeVar("_Done")
_Asked = TypeVar("_Asked")


@dataclass(frozen=True)
class Client:
    """Talks to one server. The environment's proxy settings do not apply to a server on this machine.

    Attributes:
        url: where the server listens, without ``/v1``.
        who: what error messages call the server, for example "the candidate server (sage_attn)".
        role: which side of the comparison it is.
        api_key: sent with each request.
        timeout_s: seconds that a request may take, including retries; for a stream, seconds without a token.
        model: the model that requests name.
        check: raises EngineError if the server's process is gone, which explains any other failure, or None if assay did not start
            it.
        log_tail: returns the last lines of the server's log, which end every error message.
        unreported_cache: the number of cached tokens of an answer that reports none, or None if it is unknown.
    """

    url: str
    who: str
    role: Role
    api_key: str
    timeout_s: float
    model: str = ""
    check: Callable[[], None] | None = None
    log_tail: Callable[[], str] = str
    unreported_cache: int | None = None

    def error(self, found: str, expected: str = "", do: str = "") -> EngineError:
        """Make an EngineError about this server, with the last lines of its log."""
        do = do or "find out why in the server's log, and repeat the command, which resumes"
        return EngineError(f"{self.who} {found}", expected, do, details=self.log_tail())

    def text(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0) -> str:
        """Return the body of a successful response, within `timeout_s` seconds, or the limit of any request.

        Raises:
            EngineError: the request failed. If the server died, the error states that.
        """
        return self._run(partial(self._send, method, path, body, timeout_s or self.timeout_s))

    def json(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 0.0) -> Any:
        """Return the JSON document of a response. Raises EngineError as `text` does, and if it is not JSON."""
        return self._document(path, self.text(method, path, body, timeout_s))

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST `body`, and return the JSON of each event of the response. Errors are those of `json`."""
        data = [
            line.removeprefix(_DATA).strip()
            for line in self.text("POST", path, body).splitlines()
            if line.startswith(_DATA)
        ]
        return [self._document(path, each) for each in data if each != _DONE]

    def status(self, path: str, timeout_s: float, method: str = "GET", authorized: bool = True) -> int | None:
        """Return the HTTP status of ``path``, asked with the key or without, or None without a response."""
        import openai

        async def ask(api: AsyncOpenAI) -> int:
            async with asyncio.timeout(timeout_s):
                return (await self._exchange(method, path, api, authorized=authorized)).status_code

        try:
            return self._run(ask, watched=False)
        except openai.APIStatusError as error:
            return error.status_code
        except (TimeoutError, openai.OpenAIError):
            return None

    def models(self, timeout_s: float = INFO_TIMEOUT_S) -> list[str]:
        """Return the names of the models that the server lists.

        Raises:
            EngineError: it lists none in OpenAI's format, or does not answer within `timeout_s` seconds.
        """
        listed = self.json("GET", "/v1/models", timeout_s=timeout_s)
        try:
            return [str(model["id"]) for model in listed["data"]]
        except (TypeError, KeyError):
            said = f"answered /v1/models with {str(listed)[:_EXCERPT]}."
            raise self.error(
                said, "a list of models in OpenAI's format", "name the URL of an OpenAI-compatible server"
            ) from None

    def ask(
        self, asks: Sequence[ChatRequest], concurrency: int, on_answer: Callable[[int, Answer], None],
        enough: Callable[[], bool] = never,
    ) -> None:  # fmt: skip
        """Implement `Engine.ask`."""
        self._each(self._answer, asks, concurrency, on_answer, enough)

    def stream(self, prompts: Sequence[tuple[int, ...]], output: int, concurrency: int) -> list[Stream]:
        """Send prompts of token ids, each once, since a retry would count as latency, and time the tokens of their answers.

        Returns the streams in the order of the prompts, each of `output` tokens, with at most `concurrency` requests in flight.

        Raises:
            EngineError: the server failed, or an answer has another length.
        """
        streams: dict[int, Stream] = {}
        self._each(partial(self._stream, output), prompts, concurrency, streams.__setitem__)
        return [streams[index] for index in range(len(prompts))]

    def _each(
        self, exchange: Callable[[_Asked, AsyncOpenAI], Awaitable[_Done]], asks: Sequence[_Asked], concurrency: int,
        on_done: Callable[[int, _Done], None], enough: Callable[[], bool] = never,
    ) -> None:  # fmt: skip
        """Send requests, each worker one after the other."""
        waiting = iter(enumerate(asks))

        async def work(api: AsyncOpenAI) -> None:
            for index, ask in waiting:
                if enough():
                    return
                on_done(index, await exchange(ask, api))

        async def all_of_them(api: AsyncOpenAI) -> None:
            await asyncio.gather(*(work(api) for _ in range(min(concurrency, len(asks)))))

        if asks:
            self._run(all_of_them)

    def _run(self, work: Callable[[AsyncOpenAI], Awaitable[_Done]], *, watched: bool = True) -> _Done:
        """Do work in a session; `watched` ends it with an EngineError as soon as the server's process is gone or stopped."""

        async def run() -> _Done:
            from openai import AsyncOpenAI, DefaultAioHttpClient

            # Reading this machine's certificates takes 25 ms, and a starting server is asked a hundred times over plain HTTP.
            # A redirected POST would become a GET.
            connections = DefaultAioHttpClient(
                verify=self.url.startswith("https:"), trust_env=urlsplit(self.url).hostname not in LOOPBACK,
                follow_redirects=False, timeout=None,
            )  # fmt: skip
            async with AsyncOpenAI(
                api_key=self.api_key, base_url=self.url, timeout=None, max_retries=0, http_client=connections
            ) as api:
                doing = asyncio.ensure_future(work(api))
                tasks: list[asyncio.Future[Any]] = [doing]
                tasks += [asyncio.create_task(self._watch(math.inf))] if watched and self.check is not None else []
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    if not doing.done():
                        await tasks[-1]
                    return await doing
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

        return asyncio.run(run())

    async def _watch(self, seconds: float) -> None:
        """Raise EngineError if the process of a server that assay started is seen to be gone within this many seconds."""
        deadline = time.monotonic() + seconds
        while self.check is not None and time.monotonic() < deadline:
            self.check()
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def _exchange(
        self, method: str, path: str, api: AsyncOpenAI, body: Mapping[str, Any] | None = None, *,
        retries: int = 0, authorized: bool = True, stream: bool = False,
    ) -> httpx.Response:  # fmt: skip
        """Send one request and return its raw response; with `stream` its body is still to be read."""
        import httpx
        import openai

        options: Any = {"max_retries": retries, "headers": {} if authorized else {"Authorization": openai.Omit()}}
        if method == "GET":
            return await api.get(path, cast_to=httpx.Response, options=options)
        if stream:
            options["headers"]["Accept-Encoding"] = "identity"
        response: httpx.Response = await api.post(
            path, cast_to=httpx.Response, body=body, options=options, stream=stream
        )
        return response

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, api: AsyncOpenAI, retries: int = 0
    ) -> str:  # fmt: skip
        """Send one request and return the text of a success. Raises EngineError otherwise."""
        async with self._explained(path, timeout_s):
            return (await self._exchange(method, path, api, body, retries=retries)).text

    @asynccontextmanager
    async def _explained(self, path: str, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Limit the time of a request, and make its failure an EngineError; the death of the server explains it best."""
        import httpx
        import openai

        try:
            async with asyncio.timeout(timeout_s) as limit:
                yield limit
        except openai.APIStatusError as error:
            # SGLang refuses chats that a template does not take with 500.
            if error.status_code >= 500 and path != _TOKENIZE:
                await self._watch(_DEATH_WAIT_S)
            said = f"HTTP {error.status_code}: {_excerpt(error.response.text)}"
            raise self.error(f"answered {path} with {said}.", "HTTP 200") from None
        except TimeoutError as error:
            if self.check is not None:
                self.check()
            raise self.error(
                f"has not answered a request to {path} for {timeout_s:g} s.",
                "an answer within the request time-out",
                "find out why it hangs, or raise request_timeout in assay.toml",
            ) from error
        except (openai.OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
            await self._watch(_DEATH_WAIT_S)
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise self.error(
                f"did not answer {self.url}{path}: {f'{type(cause).__name__}: {cause}'.rstrip(': .')}.",
                "an answer",
                "check that the server runs and that this machine reaches it, and repeat the command, which resumes",
            ) from error

    def _document(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except MALFORMED:
            raise self.error(f"answered {path} with {_excerpt(text)}.", "JSON") from None

    async def _answer(self, ask: ChatRequest, api: AsyncOpenAI) -> Answer:
        started, body = time.monotonic(), {"model": self.model, **chat_body(ask)}
        text = await self._send("POST", CHAT, body, self.timeout_s, api, _RETRIES)
        try:
            return read_answer(text, ask, self.role, time.monotonic() - started, self.unreported_cache)
        except MALFORMED as error:
            raise self.error(
                f"sent something other than a chat completion: {problem(error)}. It sent: {_excerpt(text)}.",
                "JSON with choices, a message text, a finish reason and usage",
            ) from None

    async def _stream(self, output: int, prompt: tuple[int, ...], api: AsyncOpenAI) -> Stream:
        arrivals: list[tuple[float, bytes]] = []
        sent_s = time.perf_counter()
        body = {
            "model": self.model, "prompt": list(prompt), "temperature": 0, "max_tokens": output, "ignore_eos": True,
            "skip_special_tokens": False, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        clock = asyncio.get_running_loop().time
        async with self._explained(_COMPLETIONS, self.timeout_s) as silence:
            response = await self._exchange("POST", _COMPLETIONS, api, body, stream=True)
            async for data in response.aiter_raw():
                arrivals.append((time.perf_counter(), data))
                if _DATA.encode() in data:  # comments keep a connection alive, and may come forever
                    silence.reschedule(clock() + self.timeout_s)
        try:
            return _read_stream(_lines(arrivals), output, sent_s)
        except MALFORMED as error:
            raise self.error(
                f"did not stream a completion of the requested length: {problem(error)}.",
                "chunks with usage, a finish reason, and [DONE]",
                "time a server that supports ignore_eos, such as SGLang or vLLM",
            ) from None


def chat_body(ask: ChatRequest) -> dict[str, Any]:
    """Make the body of a chat completion, without the model."""
    body = {
        "messages": [{"role": "user", "content": ask.prompt}],
        "temperature": 0,
        "max_tokens": ask.max_tokens,
    }
    return {**body, "logprobs": True, "top_logprobs": ask.top_logprobs} if ask.top_logprobs else body


def read_answer(
    body: str, ask: ChatRequest, role: Role, latency_s: float, unreported_cache: int | None = None
) -> Answer:
    """Parse the body of a chat completion, once, into the answer that a run stores.

    A log-probability of null, which is how SGLang writes NaN, becomes NaN: that is a finding about the candidate, not an
    engine failure. Raises one of `MALFORMED` if a field is missing or the log-probabilities that ``ask`` requests are.
    """
    told = json.loads(body)
    choice, usage = told["choices"][0], told["usage"]
    stopped = choice.get("matched_stop")
    positions = (choice.get("logprobs") or {}).get("content")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if ask.top_logprobs and positions is None:
        raise ValueError("log-probabilities were requested, but not returned")
    return ask.answered(
        role,
        choice["message"]["content"],
        request_id=told["id"],
        finish_reason=choice["finish_reason"],
        stopped_at="" if stopped is None else str(stopped),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=unreported_cache if cached is None else cached,
        latency_s=latency_s,
        tokens=tuple(map(_token, positions or ())),
    )


def _token(position: Mapping[str, Any]) -> Token:
    top = [(other["token"], number(other["logprob"])) for other in position.get("top_logprobs") or ()]
    top.sort(key=lambda pair: -math.inf if math.isnan(pair[1]) else pair[1], reverse=True)
    return Token(text=position["token"], logprob=number(position["logprob"]), top=tuple(top))


def _read_stream(lines: Sequence[tuple[float, str]], output: int, sent_s: float) -> Stream:
    """Parse the lines of a streamed completion, with their arrivals by the clock of ``sent_s``.

    Raises one of `MALFORMED` if a line is not a chunk, the stream ended early, or the answer does not have the requested length.
    """
    times: list[float] = []
    tokens: list[int] = []
    usage: dict[str, Any] | None = None
    finished = False
    for came_s, line in lines:
        if line.startswith(":") or line.endswith(_DONE):  # a colon begins a comment
            continue
        try:
            chunk = json.loads(line.removeprefix(_DATA))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"][:1]:
                before = tokens[-1] if tokens else 0
                # Without running counts, a chunk is taken for one token, as in sglang.benchmark.serving.
                after = chunk["usage"]["completion_tokens"] if chunk.get("usage") else before + 1
                if after > before:
                    times.append(came_s - sent_s)
                    tokens.append(after)
                finished = finished or bool(choice.get("finish_reason"))
        except MALFORMED as error:
            raise ValueError(f"{problem(error)} in {_excerpt(line)}") from None
    if usage is None or not finished or not lines[-1][1].endswith(_DONE):
        raise ValueError("the stream ended without a finish reason, usage and [DONE]")
    counted = usage.get("completion_tokens")
    if counted != output or tokens[-1:] != [output]:
        raise ValueError(
            f"{counted} tokens by its usage and {tokens[-1] if tokens else 0} by its chunks, but "
            f"{output} were requested with ignore_eos"
        )
    return Stream(
        sent_s=round(sent_s, 6),
        latency_s=round(lines[-1][0] - sent_s, 6),
        chunk_s=tuple(round(came_s, 6) for came_s in times),
        chunk_tokens=tuple(tokens),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=output,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def _lines(arrivals: Iterable[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """Return the lines with the arrival of their ends, without empty ones."""
    lines: list[tuple[float, bytes]] = []
    came_s, rest = 0.0, b""
    for came_s, data in arrivals:
        *complete, rest = (rest + data).split(b"\n")
        lines += [(came_s, line) for line in complete]
    lines.append((came_s, rest))
    return [(came_s, line.decode(errors="replace").rstrip("\r")) for came_s, line in lines if line.strip()]


def number(value: float | None) -> float:
    """Return a number of an answer; NaN for null, which SGLang writes for every number that is not finite."""
    return math.nan if value is None else value


def problem(error: BaseException) -> str:
    """Describe what is wrong with an answer; for a field that pydantic refuses, name the field and the expected type."""
    if not isinstance(error, ValidationError):
        return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _excerpt(body: str) -> str:
    """Quote the beginning of a response for an error message."""
    return repr(body if len(body) <= _EXCERPT else body[:_EXCERPT] + "...")
